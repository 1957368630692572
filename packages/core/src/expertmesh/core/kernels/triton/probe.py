"""The smallest kernel: whether the installed versions compile and load any."""

import jax
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher


@triton.jit
def _copy_kernel(x, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(x + index))


def copy(x):
    """`x` [SIZE], a power of two."""
    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launcher.triton_call(
        x, kernel=_copy_kernel, out_type=out_type, grid=(1,), SIZE=x.shape[0]
    )
