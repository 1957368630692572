"""`check_op` finds what breaks the contract: faults that are planted in small functions."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from expertmesh.core.testing import AXES, OpCase, Setting, check_op


def _of_this_device(on_first, on_others, x):
    """Devices compute different values of what is said to be replicated."""
    first = jax.lax.axis_index(AXES) == 0
    return jax.lax.cond(first, on_first, on_others, x)


def _on_each_device(on_first, on_others, x):
    mesh = jax.typeof(x).sharding.mesh
    body = functools.partial(_of_this_device, on_first, on_others)
    return jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)


def case(on_others):
    """x + 1 on the first device, whose value NumPy reads; `on_others` on all others."""
    return OpCase(
        name="add_one",
        function=functools.partial(_on_each_device, lambda x: x + 1, on_others),
        operands=lambda rng, size, dtype: (rng.normal(size=8).astype(dtype),),
        oracle=lambda x: x + 1,
        wrt=(0,),
        layouts={"one": (P(),)},
    )


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "scan"])
def test_replicas_that_differ_are_found(transform):
    setting = Setting("explicit", (2, 4), "one", transform, "float32", "regular")
    check_op(case(lambda x: x + 1), setting)
    with pytest.raises(AssertionError, match="holds another value"):
        check_op(case(lambda x: np.float32(1 + 2**-20) * x + 1), setting)
