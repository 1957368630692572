"""Kernels in Triton, in its public language, for all NVIDIA GPUs; one file per op with the op's basename."""
