"""Kernels, one file per op with the op's basename, in two rooms: `triton/`, for all GPUs, and `cuda/`, for Hopper.

`choice/` says which of them runs, and the files here launch it. `launcher.py` launches the kernels of both languages.
Imported when a kernel is launched, never before. Two have other names than their ops: `router.py` is of
`router/route.py`, `load_balance.py` of `router/balance.py`.
"""
