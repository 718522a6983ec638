"""CPU kernels in C++ (``csrc/cpu``), called through ctypes; each module has the torch reference of its operation too.

A call runs the compiled kernel where one is built and takes the dtype, and the reference otherwise.
"""
