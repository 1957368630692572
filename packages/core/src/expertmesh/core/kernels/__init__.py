"""Kernels, one file per op with the op's basename: in Triton, in Gluon, and some for Hopper in CUDA C++.

Of the last, `.cu` is one op's, `.cuh` is what several share, and `cuda_call.py` compiles and launches them. Imported
when a kernel is launched, never before.
"""
