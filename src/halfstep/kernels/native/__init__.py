"""The operators on CPU: `kernels.cpp`, compiled into the wheel or on the user's machine, and called through ctypes.

A C++ compiler is all it needs: no headers of torch or Python, so one library serves all their versions. ctypes releases
the interpreter's lock during a call.
"""
