"""Rows of 8 bits are written as products read them: no copy turns them, in a program for an H100 that is not there."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cases.marks import needs_triton
from expertmesh.core import MeshResource, global_shard_guard, grouped_dense

pytestmark = [pytest.mark.aot, needs_triton]

T, E, D, F = 4096, 8, 512, 768


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current"])
def test_nothing_turns_rows_of_8_bits(h100_mesh, recipe):
    mesh = h100_mesh({"fsdp": 1})
    whole = NamedSharding(mesh, PartitionSpec())
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
        for shape in ((1, T, D), (E, D, F), (1, T, F))
    )
    sizes = jax.ShapeDtypeStruct((1, E), jnp.int32, sharding=whole)

    def step(x, w, dy, sizes):
        y, gradients = jax.vjp(lambda x, w: grouped_dense(x, w, sizes, recipe=recipe), x, w)
        return y, gradients(dy)

    with jax.sharding.set_mesh(mesh), global_shard_guard(MeshResource(fsdp_resource="fsdp")):
        program = jax.jit(step).trace(x, w, dy, sizes).lower(lowering_platforms=("cuda",))
        text = program.compile().as_text()
    rows = re.findall(rf"= (?:f8e\w+|u8)\[\S*{T}\S* (\w+)\(", text)
    assert not {"copy", "transpose", "fusion"}.intersection(rows), rows
