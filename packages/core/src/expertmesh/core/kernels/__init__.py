"""Triton kernels, one file per op with the op's basename. Imported when a kernel is launched, never before."""
