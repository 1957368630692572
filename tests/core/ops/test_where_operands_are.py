"""Ops of rows and quantizers work where roles and given specs say that their operands are: no data cross devices."""

import functools
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import (
    Activation,
    MeshResource,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    activate,
    global_shard_guard,
    grouped_quantize,
    quantize,
    quantize_weight,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.quantization.activate_quantize import activate_quantize
from expertmesh.core.quantization.quantize_rows import grouped_quantize_both
from expertmesh.core.testing import magnitudes

RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")
NO_TP = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
TOKENS = ("fsdp", "ep")
COLUMNS = P(TOKENS, None, "tp")
MX, NV = MXFP8BlockScaling().formats(), NVFP4BlockScaling().formats()
FORMATS = {"mx": (MX.x, MX.x_wgrad), "nv": (NV.x, NV.x_wgrad)}
SIZES = np.full((4, 1), 64, np.int32)
WEIGHTED = dict(weights=np.ones((4, 64), np.float32), row_source=np.zeros((4, 64), np.int32))
GELU = Activation(function="gelu", gated=False)


@functools.cache
def rows(*more):
    return np.asarray(magnitudes(np.random.default_rng(0), (4, 64, *more, 128)), np.float32)


def gradient(function):
    return lambda x: jax.vjp(function, x)[1](x)[0]


# What is called with one operand; the operand; where it is.
CASES = {
    "activate": (lambda h: activate(h, GELU), rows(), COLUMNS),
    "activate, its gradient": (gradient(lambda h: activate(h, GELU)), rows(), COLUMNS),
    "activate_quantize": (
        lambda h: activate_quantize(h, SIZES, FORMATS["mx"], "silu", spec=COLUMNS),
        rows(2),
        P(TOKENS, None, None, "tp"),
    ),
    "activate_quantize in four bits": (
        lambda h: activate_quantize(h, SIZES, FORMATS["nv"], "silu", spec=COLUMNS),
        rows(2),
        P(TOKENS, None, None, "tp"),
    ),
    "activate_quantize times weights": (
        lambda h: activate_quantize(h, SIZES, FORMATS["nv"], "silu", spec=COLUMNS, **WEIGHTED),
        rows(2),
        P(TOKENS, None, None, "tp"),
    ),
    "grouped_quantize_both": (
        lambda x: grouped_quantize_both(x, SIZES, FORMATS["mx"], spec=COLUMNS),
        rows(),
        COLUMNS,
    ),
    "grouped_quantize_both in four bits": (
        lambda x: grouped_quantize_both(x, SIZES, FORMATS["nv"], spec=COLUMNS),
        rows(),
        COLUMNS,
    ),
    "quantize_weight": (
        lambda w: quantize_weight(w, "mxfp8", spec=P(None, "tp")),
        rows()[0],
        P(None, "tp"),
    ),
    "quantize, of experts": (
        lambda w: quantize(w, MX.weight, axis=1, batch_dims=1),
        rows(),
        P("ep", "fsdp"),
    ),
    "quantize_weight of experts": (
        lambda w: quantize_weight(w, "mxfp8", batch_dims=1, spec=P(None, None, "tp")),
        rows(),
        P(None, None, "tp"),
    ),
}


def mesh():
    return jax.make_mesh((2, 2, 2), (*TOKENS, "tp"), axis_types=(AxisType.Auto,) * 3)


BY_SPEC = [name for name in CASES if name.startswith("activate_quantize")]


@pytest.mark.parametrize(
    "name, resource", [*((name, RESOURCE) for name in CASES), *((name, NO_TP) for name in BY_SPEC)]
)
def test_only_amaxes_cross_devices(name, resource):
    """By roles and by specs, also of an axis without a role."""
    function, x, spec = CASES[name]
    placed = jax.device_put(x, NamedSharding(mesh(), spec))
    with global_shard_guard(resource):
        program = jax.jit(function).lower(placed).compile()
    found = collectives(program.as_text())
    assert all(one.kind == "all-reduce" for one in found), found
    assert {shape for one in found for shape in one.shapes} <= {"s32[1,1]", "s32[1]"}, found
    for got, want in zip(
        jax.tree.leaves(program(placed)), jax.tree.leaves(function(x)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_rows_over_an_axis_with_a_role_are_no_reason_to_warn():
    """A split sequence is gathered on purpose; an axis without a role is an oversight."""
    x = jax.device_put(rows(), NamedSharding(mesh(), P(TOKENS, "tp")))

    def quantized(x):
        return grouped_quantize(x, SIZES, MX.x, spec=P(TOKENS, "tp"))

    with warnings.catch_warnings(), global_shard_guard(RESOURCE):
        warnings.simplefilter("error", RuntimeWarning)
        jax.jit(quantized).lower(x)
    with pytest.warns(RuntimeWarning, match="'tp' shards an operand"), global_shard_guard(NO_TP):
        jax.jit(quantized).lower(x)
