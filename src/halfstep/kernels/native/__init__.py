"""The operators on CPU: `kernels.cpp`, compiled without headers of torch or Python, and called through ctypes."""
