"""Numeric operators: a reference in plain PyTorch, and backends native (C++), triton (CUDA) and eager (torch)."""
