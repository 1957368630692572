"""The quantized block: forward and gradients against an emulation of the recipe in float64, on every kind of mesh."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep.exchange_oracle import shards
from expertmesh.core import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
    global_shard_guard,
)
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import (
    MoEConfig,
    init_quant_state,
    linen,
    moe,
    native_moe,
    nnx,
    param_specs,
    quantize_kernels,
)
from flax_moe import quantized_oracle
from flax_moe.moe_oracle import (
    RESOURCE,
    Data,
    assert_result,
    make_config,
    make_data,
    make_mesh,
    place,
    value_and_gradients,
)

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
CURRENT = Float8CurrentScaling()
BLOCK = Float8BlockScaling()
HYBRID = Float8BlockScaling(fp8_format=Format.HYBRID, power_2_scale=False)
MX = MXFP8BlockScaling()
FOUR = NVFP4BlockScaling(disable_stochastic_rounding=True)
TOLERANCE = 1e-5


def setup(recipe, **changes):
    """Sizes of few blocks; every group has padding, whose hidden rows are not zero where there are biases."""
    wide = isinstance(recipe, Float8BlockScaling)
    config = make_config(recipe=recipe, expert_dim=128 if wide else 32, **changes)
    return config, make_data(config, (8, 5, 256) if wide else (8, 8, 64))


def compare(config, data, mesh=None):
    placed = place(data, config, mesh)
    (_, output), gradients = jax.jit(value_and_gradients(moe, config))(*placed)
    sizes = {"fsdp": 1, "ep": 1} if mesh is None else dict(mesh.shape)
    blocks = list(shards(sizes, (("fsdp", "ep"),), data.x.shape[:-1], ("ep",)))
    want = quantized_oracle.run(data, config, blocks, sizes["ep"])
    assert_result(output, gradients, want, TOLERANCE)
    return placed, gradients


@pytest.mark.parametrize(
    "recipe, changes",
    [
        (CURRENT, dict(shared_expert_dim=48)),
        (HYBRID, dict(use_bias=False, num_chunks=1, remat="recompute")),
        (MX, dict(apply_topk_weights_early=True, shared_expert_dim=64)),
        (FOUR, dict(alignment=32, remat="save_min")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_device(recipe, changes):
    compare(*setup(recipe, **changes))


@pytest.mark.parametrize(
    "recipe, kind, transport",
    [(BLOCK, EXPLICIT, "all_to_all"), (MX, AUTO, "ring"), (CURRENT, EXPLICIT, "auto")],
    ids=["block, explicit", "mx, resource", "tensor, explicit"],
)
def test_meshes(recipe, kind, transport):
    """Blocks along rows begin with each participant's experts; gradients are laid out like their primals."""
    config, data = setup(recipe, transport=transport)
    with global_shard_guard(RESOURCE if kind == AUTO else None):
        placed, gradients = compare(config, data, make_mesh((2, 4), kind))
    for got, primal in zip(jax.tree.leaves(gradients), jax.tree.leaves(placed[:2]), strict=True):
        assert got.sharding.is_equivalent_to(primal.sharding, got.ndim)
        assert got.dtype == primal.dtype


def test_the_compiler_chooses_layouts():
    """Auto axes without a resource: one participant holds everything."""
    config, data = setup(MX)
    placed = place(data, config, make_mesh((2, 4), AUTO))
    (_, output), gradients = jax.jit(value_and_gradients(moe, config))(*placed)
    blocks = [np.arange(data.x[..., 0].size)]
    assert_result(output, gradients, quantized_oracle.run(data, config, blocks), TOLERANCE)
