"""The meaning of every kernel, in plain PyTorch; each backend is tested against it."""
