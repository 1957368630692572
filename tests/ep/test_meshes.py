"""EP groups on all kinds of meshes and several exchanges in one program: who exchanges with whom, and nothing mixes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cases.covering import covering, full
from ep.exchange_case import Case, check, exchange, operands_of
from ep.exchange_oracle import Exchange, routing, shards
from expertmesh.core import MeshResource, global_shard_guard, grouped_gemm, hlo
from expertmesh.core.testing import relative_error
from expertmesh.ep import (
    EpConfig,
    combine,
    dispatch,
    dispatch_weights,
    prepare,
    recv_capacity,
)


def round_trip(config, topk_idx, x):
    handle = prepare(topk_idx, config)
    return combine(handle, dispatch(handle, x))


DEVICES = [3, 0, 6, 1, 7, 2, 5, 4]  # no order that rank arithmetic could guess


@pytest.mark.parametrize("spec", [(), ("ep",), ("fsdp",), (("fsdp", "ep"),), (None, "fsdp")])
@pytest.mark.parametrize("kinds", [("Auto", "Explicit"), ("Explicit", "Auto")])
def test_experts_meet_their_rows_where_types_name_some_axes(kinds, spec):
    """Rows are of participants over (fsdp, ep), of which a type names the Explicit one alone."""
    types = tuple(AxisType[kind] for kind in kinds)
    mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=types, devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    idx = np.argsort(rng.random((24, 8)), axis=1)[:, :2].astype(np.int32)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((24, 16), (8, 16, 6)))
    want = np.einsum("td,tkdf->tf", x.astype(float), w[idx].astype(float))

    @jax.jit
    def run(idx, x, w):
        handle = prepare(idx, EpConfig(num_experts=8, axis="ep"))
        rows = dispatch(handle, x)
        return combine(handle, grouped_gemm(rows, w, handle.group_sizes))

    resource = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
    with jax.set_mesh(mesh), global_shard_guard(resource):
        put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
        got = run(put(idx, *spec[:1]), put(x, *spec), put(w, "ep"))
    assert relative_error(np.asarray(got), want) < 1e-5


@pytest.mark.parametrize(
    "shape, axes, devices, groups, transport",
    [
        # EP outermost: groups are the columns, one for each coordinate of the other axes.
        ((4, 2), ("expert", "tensor"), range(8), {(0, 2, 4, 6), (1, 3, 5, 7)}, "ring"),
        full((2, 4), ("data", "expert"), range(8), {(0, 1, 2, 3), (4, 5, 6, 7)}, "all_to_all"),
        full(
            (2, 2, 2),
            ("data", "expert", "tensor"),
            range(8),
            {(0, 2), (1, 3), (4, 6), (5, 7)},
            "ring",
        ),
        ((4, 2), ("expert", "tensor"), DEVICES, {(3, 6, 7, 5), (0, 1, 2, 4)}, "all_to_all"),
        full((2,), ("expert",), [5, 2], {(5, 2)}, "ring"),
    ],
)
def test_groups_are_those_of_the_mesh(shape, axes, devices, groups, transport):
    devices = np.array(jax.devices())[list(devices)].reshape(shape)
    mesh = Mesh(devices, axes, axis_types=(jax.sharding.AxisType.Explicit,) * len(axes))
    sharding = NamedSharding(mesh, PartitionSpec("expert"))
    idx = jax.ShapeDtypeStruct((16, 2), jnp.int32, sharding=sharding)
    x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding)
    config = EpConfig(num_experts=8, axis="expert", transport=transport)
    program = jax.jit(partial(round_trip, config)).lower(idx, x).compile()
    found = hlo.collectives(program.as_text())
    assert len(found) == 3
    flat = [device.id for device in devices.flat]
    for collective in found:  # which numbers devices by their place in the mesh
        members = {tuple(flat[i] for i in group) for group in collective.groups}
        assert members == groups


@covering("transport", ["ring", "all_to_all"], covers=["all_to_all"])
def test_some_devices_in_any_order(transport):
    """EP over two of six devices, which are not the first ones."""
    case = Case(
        mesh=(("dp", 3), ("ep", 2)), spec=(("ep", "dp"),), sizes=(36,), A=4, transport=transport
    )
    topk = routing("holes", 36, 3, 8)
    oracle = case.oracle(topk)
    operands = operands_of(case, oracle, topk, "float32")
    devices = np.array(jax.devices())[[7, 2, 4, 6, 1, 3]].reshape(3, 2)
    mesh = Mesh(devices, ("dp", "ep"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, case.specs()[0], strict=True)
    ]
    check(jax.jit(partial(exchange, config=case.config))(*placed), case, oracle, operands)


def test_ranks_without_tokens():
    """Ranks that send nothing, receive nothing, or both, beside busy ones."""
    case = Case(mesh=(("ep", 8),), sizes=(40,), A=8, C=32)
    mesh = jax.make_mesh((8,), ("ep",))
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    for transport in ("ring", "all_to_all"):
        config = Case(A=8, C=32, transport=transport).config
        step = jax.jit(partial(exchange, config=config))
        for silent, targets in [([0, 3, 7], [1, 2, 7]), ([1, 2, 3, 4, 5, 6, 7], [0])]:
            topk = np.random.default_rng(0).choice(targets, (40, 3)).astype(np.int32)
            topk.reshape(8, 5, 3)[silent] = -1
            oracle = case.oracle(topk)
            operands = operands_of(case, oracle, topk, "float32")
            check(step(*(jax.device_put(x, sharding) for x in operands)), case, oracle, operands)


LAYERS = [  # another K, alignment, capacity, transport and number of experts each; the third drops
    dict(K=2, E=8, A=1, C=None, transport="ring"),
    dict(K=3, E=16, A=8, C=None, transport="all_to_all"),
    dict(K=1, E=4, A=4, C=8, transport="ring"),
    dict(K=2, E=8, A=1, C=None, transport="ring"),  # the first one's config, another routing
]


def deep(routings, x, g):
    """Each layer's rows depend on its slot, so that mixed-up handles show; each layer's input on the last output."""

    def forward(x):
        outs = []
        handles = [
            prepare(idx, config_of(layer)) for idx, layer in zip(routings, LAYERS, strict=True)
        ]
        for handle in handles:
            rows = dispatch(handle, x)
            factor = 1 + jnp.arange(rows.shape[1], dtype=x.dtype)[None, :, None] / 8
            x = 0.25 - x + combine(handle, rows * factor)
            outs.append(x)
        return outs

    outs, pull = jax.vjp(forward, x)
    return outs, pull([g] * len(outs))[0]


def config_of(layer):
    return EpConfig(
        num_experts=layer["E"],
        capacity=layer["C"],
        alignment=layer["A"],
        transport=layer["transport"],
        axis="ep",
    )


def deep_oracle(topks, x, g):
    blocks = list(shards({"ep": 4}, ("ep",), (24,), ("ep",)))
    exchanges = [
        Exchange(
            topk,
            blocks,
            4,
            layer["E"],
            layer["C"] or recv_capacity(layer["E"], layer["K"], 6, 4, layer["A"]),
            layer["A"],
        )
        for topk, layer in zip(topks, LAYERS, strict=True)
    ]
    # Every layer is x -> 0.25 + (M - 1) x for a diagonal M.
    scales = []
    for e in exchanges:
        scale = np.zeros(24)
        for _, n, t, _ in e.live():
            scale[t] += 1 + n / 8
        scales.append(scale[:, None])
    outs = []
    for scale in scales:
        x = 0.25 + (scale - 1) * x
        outs.append(x)
    gradient = np.zeros_like(g)
    for scale in reversed(scales):
        gradient = (gradient + g) * (scale - 1)
    return outs, gradient, exchanges


@covering("donate", [False, True], covers=[True])
def test_layers_of_other_sizes_in_one_program(donate):
    rng = np.random.default_rng(5)
    topks = [
        routing("uniform" if i < 3 else "skewed", 24, layer["K"], layer["E"], seed=i)
        for i, layer in enumerate(LAYERS)
    ]
    x, g = rng.normal(size=(2, 24, 3))
    outs, gradient, exchanges = deep_oracle(topks, x, g)
    assert sum(exchanges[2].dropped) > 0
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4])
    place = partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("ep")))
    operands = [place(t) for t in topks], place(np.float32(x)), place(np.float32(g))
    step = jax.jit(deep, donate_argnums=(1, 2) if donate else ())
    got_outs, got_gradient = step(*operands)
    for got, want in zip([*got_outs, got_gradient], [*outs, gradient], strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    assert operands[1].is_deleted() == donate


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donated_rows_and_handle():
    """combine may write over what it is given, and the next step's buffers are new."""
    mesh = jax.make_mesh((8,), ("ep",))
    place = partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("ep")))
    topk, x = routing("uniform", 40, 3, 8), np.random.default_rng(0).normal(size=(40, 8))
    config = EpConfig(num_experts=8, axis="ep")
    send = jax.jit(lambda i, x: (h := prepare(i, config), dispatch(h, x)))
    back = jax.jit(combine, donate_argnums=(0, 1))
    for sign in (1, -1):
        handle, rows = send(place(topk), place(np.float32(sign * x)))
        np.testing.assert_allclose(back(handle, rows), 3 * sign * x, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_other_dtypes_are_converted(dtype):
    """Never read as float32 bits; the cotangent has the weights' dtype."""
    idx = jnp.asarray([[0, 2], [2, -1]], jnp.int32)
    weights = jnp.asarray([[0.5, 1.5], [-3, 7]], dtype)
    handle = prepare(idx, EpConfig(num_experts=3))
    out, pull = jax.vjp(lambda w: dispatch_weights(handle, w), weights)
    assert out.dtype == jnp.float32 and out[0].tolist() == [0.5, 1.5, -3, 0]
    (d,) = pull(jnp.asarray([[2.0, 4.0, 8.0, jnp.nan]]))
    assert d.dtype == dtype and d.tolist() == [[2, 4], [8, 0]]


@covering(
    "dtype",
    ["int8", "uint8", "uint16", "int32", "uint32", "int64"],
    covers=["int8", "uint8", "int64"],
)
def test_expert_ids_of_any_integer_dtype(dtype):
    topk = np.asarray([[0, 299 % 120], [119, 1]]).astype(dtype)
    with jax.enable_x64(True):
        handle = prepare(jnp.asarray(topk), EpConfig(num_experts=300))
        assert handle.slot.dtype == jnp.int32
    oracle = Exchange(topk.astype(np.int64), [np.arange(2)], 1, 300, handle.source.shape[1])
    np.testing.assert_array_equal(handle.slot, oracle.slot())
    np.testing.assert_array_equal(handle.source, oracle.source())


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int16"])
def test_no_tokens_have_ids_of_any_integer_dtype(dtype):
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Explicit,))
    topk = jax.device_put(jnp.zeros((0, 2), dtype), NamedSharding(mesh, PartitionSpec("ep")))
    with jax.set_mesh(mesh):  # JAX 0.12 does not find it by arrays that nothing depends on
        handle = prepare(topk, EpConfig(num_experts=4, axis="ep"))
    assert handle.slot.shape == (0, 2) and handle.slot.dtype == jnp.int32


def test_wide_ids_do_not_wrap_into_the_range():
    with jax.enable_x64(True):
        topk = jnp.asarray([[2**32, 1], [-(2**32), 0]])
        handle = prepare(topk, EpConfig(num_experts=4))
    assert handle.slot.tolist() == [[-1, 1], [-1, 0]]


def test_ids_that_are_no_experts_are_found_by_checkify():
    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2])
    place = partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("ep")))
    config = EpConfig(num_experts=4, axis="ep", debug=True)
    step = jax.jit(partial(round_trip, config))
    good, bad = np.int32([[0, 3], [-1, 1]]), np.int32([[0, 3], [7, 1]])
    x = place(jnp.ones((2, 3)))
    checked = checkify.checkify(step)
    error, out = checked(place(good), x)
    assert error.get() is None
    np.testing.assert_array_equal(out[:, 0], [2, 1])
    assert "num_experts=4; got 7" in checked(place(bad), x)[0].get()
    np.testing.assert_array_equal(step(place(bad), x)[:, 0], [2, 1])  # not routed
    quiet = dataclasses.replace(config, debug=False)
    jaxpr = str(jax.make_jaxpr(partial(round_trip, quiet))(place(good), x))
    assert "check[" not in jaxpr  # an effect, which some transforms refuse


def test_second_order_is_an_error():
    config = EpConfig(num_experts=4)
    idx = jnp.asarray([[0, 1], [2, 3]])

    def loss(x):
        return jnp.sum(jnp.sin(round_trip(config, idx, x)))

    with pytest.raises(NotImplementedError):
        jax.hessian(loss)(jnp.ones((2, 3)))
