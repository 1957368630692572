"""Exchanges that "auto" compiles for GPUs of which no link is known: 8 bits cross under a recipe of blocks."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import Float8BlockScaling, QuantizedArray, hlo
from expertmesh.ep import EpConfig, combine, dispatch, prepare

pytestmark = pytest.mark.aot

R, T, K, E, D = 4, 64, 2, 16, 256
FORMATS = Float8BlockScaling().formats()


def exchanges(mesh, capacity):
    """The collectives of rows there and back, by kind, and what crosses."""
    config = EpConfig(num_experts=E, axis="ep", capacity=capacity)

    def both(topk_idx, data, scale, dy):
        handle = prepare(topk_idx, config)
        x = QuantizedArray(
            data=data, scale=scale, block=(1, 128), format=FORMATS.x, dtype="bfloat16"
        )
        rows = dispatch(handle, x)
        return rows, combine(handle, dy, wire_format=FORMATS.grad_dgrad)

    def struct(shape, dtype):
        sharding = NamedSharding(mesh, PartitionSpec("ep", *(None,) * (len(shape) - 1)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows = capacity or R * T * K
    operands = (
        struct((R * T, K), jnp.int32),
        struct((R * T, D), jnp.float8_e4m3fn),
        struct((R * T, D // 128), jnp.float32),
        struct((R, rows, D), jnp.bfloat16),
    )
    text = jax.jit(both).lower(*operands).compile().as_text()
    return [
        (found.kind, shape)
        for found in hlo.collectives(text)
        for shape in found.shapes
        if hlo.num_bytes(shape) >= R * D
    ]


@pytest.mark.parametrize("capacity, there", [(None, "all-gather"), (T // 2, "all-to-all")])
def test_rows_cross_as_bytes_of_8_bits_and_scales(h100_mesh, capacity, there):
    found = exchanges(h100_mesh({"ep": R}, AxisType.Explicit), capacity)
    width = D + 4 * D // 128
    block = min(T, capacity or T)
    wide = [each for each in found if f",{width}]" in each[1]]
    assert [kind for kind, _ in wide] == [there, "all-to-all"], found
    assert [shape for _, shape in wide] == [f"u8[{R * block},{width}]"] * 2
    assert not [shape for _, shape in found if f",{D}]" in shape], found
