"""Lint: find mistakes of mixed precision in a script or a task before it runs."""
