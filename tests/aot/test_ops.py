"""Every op of core compiles for GPUs, under the compiler's propagation and over Explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from cases.core import CASES

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.wrt], ids=lambda case: case.name)
def test_forward_and_backward_compile_for_h100(case, axis_type, h100_mesh):
    mesh = h100_mesh({"a": 2, "b": 2}, axis_type)
    operands = [
        np.asarray(x) for x in case.operands(np.random.default_rng(0), "regular", "bfloat16")
    ]
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(operands, case.layouts["tuple"], strict=True)
    ]

    def loss(*operands):
        return jnp.sum(jnp.square(case.function(*operands).astype(jnp.float32)))

    jax.jit(jax.grad(loss, case.wrt)).lower(*placed).compile()
