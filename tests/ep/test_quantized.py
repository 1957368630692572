"""Quantized rows on the way: the same bits as rows that are quantized where they arrive, in one collective of bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases.covering import full
from ep.exchange_oracle import Exchange, routing, shards
from expertmesh.core import (
    MeshResource,
    TensorFormat,
    global_shard_guard,
    grouped_quantize,
    quantize,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.testing import magnitudes, relative_error
from expertmesh.ep import EpConfig, combine, dispatch, prepare
from flax_moe.quantized_oracle import rounded

E, K, N, D = 8, 3, 48, 64
E8M0 = TensorFormat(dtype="float8_e4m3fn", block=(1, 32), scale="float8_e8m0fnu")
POWERS = TensorFormat(dtype="float8_e5m2", block=(1, 48), scale="power_of_2", amax_epsilon=2.0**-8)
FREE = TensorFormat(dtype="float8_e4m3fn", block=(1, 32), scale="float32")
DP_EP, EP_TP = {"dp": 2, "ep": 4}, {"ep": 4, "tp": 2}
RESOURCE = MeshResource(dp_resource="dp", ep_resource="ep")


def operands():
    """Tokens of all magnitudes, one of zeros, one with Inf and NaN; choices with holes."""
    rng = np.random.default_rng(0)
    x = magnitudes(rng, (N, D))
    x[3], x[5, 7], x[6, 40] = 0, np.inf, np.nan
    return x, routing("holes", N, K, E)


def both_orders(x, topk_idx, *, config, format):
    """Rows that are quantized and dispatched, and rows that are dispatched and quantized."""
    handle = prepare(topk_idx, config)
    first = dispatch(handle, quantize(x, format))
    then = grouped_quantize(dispatch(handle, x), handle.group_sizes, format)
    assert (first.block, first.format, first.dtype) == (then.block, then.format, then.dtype)
    return (first.data, first.scale), (then.data, then.scale)


@pytest.mark.parametrize(
    "mode, mesh, spec, transport, format",
    [
        full("explicit", DP_EP, P(("dp", "ep")), "ring", POWERS),
        full("explicit", EP_TP, P("ep", "tp"), "all_to_all", E8M0),
        full("resource", DP_EP, P(("dp", "ep")), "all_to_all", FREE),
        ("manual", DP_EP, P(("dp", "ep")), "auto", E8M0),
        full("auto", DP_EP, P(("dp", "ep")), "auto", POWERS),
    ],
)
def test_quantizing_before_or_after_is_the_same(mode, mesh, spec, transport, format):
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(kind,) * 2)
    axis = None if mode == "resource" else "ep"
    config = EpConfig(num_experts=E, alignment=8, axis=axis, transport=transport)
    function = functools.partial(both_orders, config=config, format=format)
    tokens = P(spec[0])
    if mode == "manual":
        function = jax.shard_map(function, mesh=mesh, in_specs=(spec, tokens), out_specs=tokens)
    x, idx = operands()
    placed = jax.device_put((x, idx), (NamedSharding(mesh, spec), NamedSharding(mesh, tokens)))
    with global_shard_guard(RESOURCE if mode == "resource" else None):
        first, then = jax.jit(function)(*placed)
    for a, b in zip(first, then, strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim) or mode == "auto"
        a, b = (np.asarray(q).view(np.uint8) for q in (a, b))
        assert a.size and len(np.unique(a)) > 2
        np.testing.assert_array_equal(a, b)


def test_data_and_scales_are_one_collective_of_bytes():
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Explicit,))
    x, idx = (jax.device_put(a, NamedSharding(mesh, P("ep"))) for a in operands())
    for transport in ("ring", "all_to_all"):
        config = EpConfig(num_experts=E, axis="ep", transport=transport)
        handle = jax.jit(prepare, static_argnums=1)(idx, config)
        program = jax.jit(lambda handle, x: dispatch(handle, quantize(x, FREE)))
        text = program.lower(handle, x).compile().as_text()
        moved = {shape.partition("[")[0] for found in collectives(text) for shape in found.shapes}
        assert len(collectives(text)) == 1 and moved == {"u8"}, collectives(text)


@pytest.mark.parametrize(
    "ranks, transport, wire_format",
    [(4, "all_to_all", E8M0), full(4, "auto", "bfloat16"), (1, "local", E8M0)],
)
def test_sums_that_are_rounded_on_the_way(ranks, transport, wire_format):
    """Each rank rounds what it has added up for a token; what is added up of that is not rounded again."""
    x, idx = operands()
    blocks = list(shards({"ep": ranks}, ("ep",), (N,), ("ep",)))
    exchange = Exchange(idx, blocks, ranks, E, len(x) * K)
    rng = np.random.default_rng(1)
    rows = magnitudes(rng, (exchange.P, exchange.C, D))
    want = np.zeros((N, D))
    for p in range(exchange.P):
        sums = np.zeros((N, D), np.float32)
        for q, n, t, _ in exchange.live():
            if q == p:
                sums[t] += rows[p, n]
        want += (
            sums.astype(jnp.bfloat16).astype(np.float32)
            if wire_format == "bfloat16"
            else rounded(sums, wire_format, 1)
        )
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(AxisType.Explicit,))
    config = EpConfig(num_experts=E, axis="ep", capacity=exchange.C, transport=transport)

    @jax.jit
    def function(idx, rows):
        return combine(prepare(idx, config), rows, wire_format=wire_format)

    got = function(*jax.device_put((idx, rows), NamedSharding(mesh, P("ep"))))
    assert relative_error(got, want) < 1e-6
    assert relative_error(got, exchange.combine(rows)) > 1e-3


def test_one_rank_makes_no_copy_to_round_or_to_join():
    """What is rounded once is moved as it is, in as many bytes; data and scales are not put together to be moved."""
    x, idx = operands()
    x, idx = jnp.asarray(x, jnp.bfloat16), jnp.asarray(idx)
    config = EpConfig(num_experts=E)

    def bytes_of(function):
        return jax.jit(function).lower().compile().cost_analysis()["bytes accessed"]

    handle = prepare(idx, config)
    rows = dispatch(handle, x)
    plain, rounded_once = (
        bytes_of(lambda wire=wire: combine(handle, rows, wire_format=wire))
        for wire in (None, "bfloat16")
    )
    assert rounded_once == plain
    q = quantize(x, FREE)
    data, scale = (bytes_of(lambda part=part: dispatch(handle, part)) for part in (q.data, q.scale))
    assert bytes_of(lambda: dispatch(handle, q)) < 1.1 * (data + scale)


TENSOR, FOUR_BITS = (
    TensorFormat(dtype="float8_e4m3fn"),
    TensorFormat(dtype="float4_e2m1fn", block=(1, 16), scale="float8_e4m3fn"),
)


@pytest.mark.parametrize("format", [TENSOR, FOUR_BITS])
def test_formats_that_do_not_travel(format):
    x, idx = operands()
    handle = prepare(idx, EpConfig(num_experts=E, axis=()))
    with pytest.raises(
        ValueError, match="scales for blocks inside a token.*before it is quantized"
    ):
        dispatch(handle, quantize(x[:, :32], format))
    with pytest.raises(ValueError, match="wire_format must be of 8 bits"):
        combine(handle, dispatch(handle, x), wire_format=format)


@pytest.mark.parametrize("name", ["int8", "bool", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_sums_travel_as_floats_of_16_bits_or_more(name):
    """Fewer bits hold no sum without a scale."""
    x, idx = operands()
    handle = prepare(idx, EpConfig(num_experts=E, axis=()))
    rows = jnp.zeros((1, handle.source.shape[1], D))
    for wire_format in (name, getattr(jnp, name)):
        with pytest.raises(
            ValueError, match=f"combine: .* 16 bits; got wire_format={name}; take bfloat16"
        ):
            combine(handle, rows, wire_format=wire_format)
    with pytest.raises(TypeError, match="combine: wire_format must be a dtype; got .*'foo'; pass"):
        combine(handle, rows, wire_format="foo")


@pytest.mark.parametrize("wire_format", [jnp.bfloat16, jnp.dtype("bfloat16")])
def test_a_dtype_is_taken_for_its_name(wire_format):
    x, idx = operands()
    handle = prepare(idx, EpConfig(num_experts=E, axis=()))
    rows = dispatch(handle, x)
    got, want = (combine(handle, rows, wire_format=wire) for wire in (wire_format, "bfloat16"))
    np.testing.assert_array_equal(got, want)


def test_the_ring_adds_on_the_way():
    x, idx = operands()
    handle = prepare(idx, EpConfig(num_experts=E, axis=()))
    with pytest.raises(ValueError, match="'ring'.*'all_to_all'"):
        combine(
            handle, jnp.zeros((1, handle.source.shape[1], D)), transport="ring", wire_format=E8M0
        )
