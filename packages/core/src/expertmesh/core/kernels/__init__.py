"""Kernels, one file per op with the op's basename: in Triton, and some for Hopper in CUDA C++.

Of the latter, `.cu` is one op's and `.cuh` is what several share; `cuda_call.py` compiles them. `launcher.py` launches
the kernels of both languages. Imported when a kernel is launched, never before. Two have other names than their ops:
`router.py` is of `router/route.py`, `load_balance.py` of `router/balance.py`.
"""
