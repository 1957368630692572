"""Quantization compiles for GPUs without the formats' instructions: 8- and 4-bit casts, blocks, random numbers."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import RECIPES, as_recipe, dequantize, grouped_quantize, quantize
from expertmesh.core.hlo import collectives

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
    "name, axis_type",
    [(name, AxisType.Auto) for name in RECIPES if name != "fp8_delayed"]
    + [("nvfp4", AxisType.Explicit)],
)
def test_quantize_and_dequantize_compile_for_h100(name, axis_type, h100_mesh):
    """Only the amax of a tensor crosses devices."""
    mesh = h100_mesh({"a": 2, "b": 4}, axis_type)
    formats = as_recipe(name).formats()

    def on_mesh(shape, dtype, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def function(x, w, sizes, key):
        return [
            dequantize(q)
            for q in (
                quantize(x, formats.x),
                quantize(w, formats.weight, axis=1, across=2, batch_dims=1),
                grouped_quantize(x, sizes, formats.grad_wgrad, axis=1, key=key),
            )
        ]

    compiled = (
        jax.jit(function)
        .lower(
            on_mesh((8, 256, 256), jnp.bfloat16, ("a", "b")),
            on_mesh((4, 256, 128), jnp.bfloat16, "b", "a"),
            on_mesh((8, 3), jnp.int32, ("a", "b")),
            on_mesh((2,), jnp.uint32),
        )
        .compile()
    )
    found = collectives(compiled.as_text())
    assert {c.kind for c in found} <= {"all-reduce"}
    assert all(shape in ("s32[]", "s32[1]") for c in found for shape in c.shapes)
