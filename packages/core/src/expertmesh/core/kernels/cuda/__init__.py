"""Kernels for Hopper in CUDA C++: a `.cu` is one op's, a `.cuh` is what several share, and a `.py` launches them."""
