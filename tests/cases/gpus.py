"""GPUs that are not there: kernels are chosen for one of them, and run on the one that is there."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

OPTION = "--as-gpu"
HERE = "sm_90"  # with kernels in CUDA C++
TRITON = "sm_90, Triton"  # alone, as where kernels in CUDA C++ are refused
# What kernels are chosen for; those that are not PTX are compiled for the GPU that is there.
CHOSEN_FOR = {"sm_100": 10.0, "sm_89": 8.9, "PTX of sm_89": 8.9, "PTX of sm_80": 8.0}
NAMES = (HERE, TRITON, *CHOSEN_FOR)
FIRST_OF_8_BITS = 8.9


def has_8_bits(name: str) -> bool:
    """Whether kernels that are chosen for it take numbers of 8 bits."""
    return CHOSEN_FOR.get(name, 9.0) >= FIRST_OF_8_BITS


@contextlib.contextmanager
def as_gpu(name: str) -> Iterator[None]:
    """Inside, what is traced takes the kernels of a GPU of NAMES."""
    import jax

    from expertmesh.core import _jax
    from expertmesh.core.kernels import device

    if name not in NAMES:
        raise ValueError(f"as_gpu: name must be one of {', '.join(NAMES)}; got name={name!r}")
    if name == HERE:
        yield
        return
    chosen = CHOSEN_FOR.get(name)
    jax.clear_caches()  # of programs for the GPU that is there
    with contextlib.ExitStack() as patches:
        if chosen is None:
            patches.enter_context(mock.patch.object(device, "nvrtc", lambda: None))
        else:
            of_gpu = mock.patch.object(_jax, "compute_capability", lambda: chosen)
            patches.enter_context(of_gpu)
            if name.startswith("PTX"):
                compiled = functools.partial(as_ptx, _jax.compile_triton, round(10 * chosen))
                patches.enter_context(mock.patch.object(_jax, "compile_triton", compiled))
        yield
    jax.clear_caches()


def as_ptx(compile_triton, capability, *kernel_and_options):
    """What `compile_triton` gives for another capability, as PTX, which the driver compiles for this GPU."""
    *kernel, _ = kernel_and_options
    return compile_triton(*kernel, capability, "ptx")
