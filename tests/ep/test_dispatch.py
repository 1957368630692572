"""prepare, dispatch, combine and dispatch_weights, every transport and mesh mode, against loops in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from ep.exchange_case import (
    TOLERANCE,
    Case,
    check,
    compiled_run,
    exchange,
    operands_of,
    run_case,
)
from ep.exchange_oracle import KINDS, axes_of, routing
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.core.testing import relative_error
from expertmesh.ep import EpConfig, combine, dispatch, dispatch_weights, prepare

RING = ["ring", "all_to_all"]


@covering(
    "transport, dtype, A",
    RING,
    ["float32", "bfloat16"],
    [1, 16],
    covers=[("ring", "float32", 1), ("all_to_all", "bfloat16", 16)],
)
def test_routings(transport, dtype, A):
    run_case(Case(transport=transport, A=A), "manual", dtype, KINDS)


CAPACITIES = [(1, 1), (1, 7), (4, 16), (16, 32)]


@covering("transport, number", RING, range(4), covers=[("all_to_all", 2)])
def test_overflow_drops_the_last_rows_and_counts_them(transport, number):
    A, C = CAPACITIES[number]
    run_case(Case(transport=transport, A=A, C=C, E=16), "manual", kinds=KINDS)


SIZES = [
    # More choices than local experts: repeats are separate rows, and may be dropped.
    dict(E=8, K=5),
    dict(E=8, K=5, C=200),
    dict(E=24, K=1, sizes=(8,), D=1),
    dict(E=40, K=7, sizes=(1064,), D=3),
    dict(E=8, K=2, sizes=(0,), C=16, A=16),
]


@covering(
    "transport, number", RING, range(5), covers=[("all_to_all", 1), ("all_to_all", 2), ("ring", 4)]
)
def test_sizes(transport, number):
    run_case(dataclasses.replace(Case(transport=transport), **SIZES[number]))


@pytest.mark.parametrize("C", [None, 16])
@pytest.mark.parametrize("mode", ["explicit", "resource"])
def test_no_tokens_at_all(mode, C):
    resource = RESOURCES["ep"] if mode == "resource" else None
    run_case(Case(sizes=(0,), K=2, C=C, A=16), mode, resource=resource)


def test_tokens_without_choices():
    handle = prepare(jnp.zeros((4, 0), jnp.int32), EpConfig(num_experts=4))
    assert handle.slot.shape == (4, 0) and handle.source.shape == (1, 0)


DP_EP, TRIPLE = (("dp", 2), ("ep", 4)), (("dp", 2), ("ep", 2), ("tp", 2))
LAYOUTS = {
    "ep": Case(),
    "dp,ep": Case(mesh=DP_EP, spec=(("dp", "ep"),)),
    "ep,dp": Case(mesh=DP_EP, spec=(("ep", "dp"),), transport="all_to_all"),
    "replicated over dp": Case(mesh=DP_EP, spec=("ep",), transport="all_to_all"),
    "sequence": Case(mesh=DP_EP, spec=("dp", "ep"), sizes=(4, 12), transport="all_to_all"),
    "sequence, ep outside": Case(mesh=DP_EP, spec=("ep", "dp"), sizes=(4, 6)),
    "ep is the first axis": Case(mesh=DP_EP, spec=(("ep", "dp"),), ep=("dp",)),
    "two outer": Case(
        mesh=(("dp", 2), ("fsdp", 2), ("ep", 2)), spec=(("dp", "fsdp", "ep"),), A=4, C=24
    ),
    "three outer": Case(
        mesh=(("fsdp", 2), ("cp", 2), ("dp", 1), ("ep", 2)),
        spec=(("dp", "fsdp"), None, ("cp", "ep")),
        sizes=(2, 3, 4),
        transport="all_to_all",
    ),
    "tp beside": Case(mesh=TRIPLE, spec=(("dp", "ep"),), transport="all_to_all"),
    "features over tp": Case(mesh=TRIPLE, spec=("dp", "ep"), sizes=(2, 10), features="tp"),
    "tuple": Case(mesh=TRIPLE, spec=(("dp", "ep", "tp"),), ep=("ep", "tp")),
    "tuple, other order": Case(
        mesh=TRIPLE, spec=(("tp", "dp", "ep"),), ep=("tp", "ep"), transport="all_to_all"
    ),
    "tuple, minor to major": Case(
        mesh=TRIPLE, spec=(("dp", "tp"), None, "ep"), ep=("ep", "dp"), sizes=(4, 3, 2), A=4
    ),
    "one rank": Case(mesh=(("dp", 8), ("ep", 1)), spec=(("dp", "ep"),), E=5, transport="local"),
    "no ep": Case(mesh=(("dp", 8),), spec=("dp",), ep=(), E=5, transport="auto"),
}


@covering(
    "mode, layout",
    ["explicit", "manual"],
    LAYOUTS,
    covers=[
        ("explicit", "replicated over dp"),
        ("explicit", "features over tp"),
        ("explicit", "tuple, minor to major"),
        ("manual", "dp,ep"),
    ],
)
def test_layouts(layout, mode):
    case = LAYOUTS[layout]
    if mode == "manual" and layout == "no ep":
        case = dataclasses.replace(case, A=2)
    out, specs = run_case(case, mode)
    if mode == "explicit":
        for name, spec in specs.items():
            ndim = out[name].ndim
            want = tuple(map(axes_of, (*spec, *[None] * (ndim - len(spec)))))
            got = tuple(map(axes_of, jax.typeof(out[name]).sharding.spec))
            assert got + ((),) * (ndim - len(got)) == want, name


RESOURCES = {
    "ep": MeshResource(ep_resource="ep"),
    "dp,ep": MeshResource(dp_resource="dp", ep_resource="ep"),
    "two outer": MeshResource(dp_resource="dp", fsdp_resource="fsdp", ep_resource="ep"),
    "tp beside": MeshResource(dp_resource="dp", ep_resource="ep", tp_resource="tp"),
    "tuple": MeshResource(dp_resource="dp", ep_resource=("ep", "tp")),
    "one rank": MeshResource(dp_resource="dp", ep_resource="ep"),
    "no ep": MeshResource(dp_resource="dp"),
}


@covering(
    "layout, transport",
    RESOURCES,
    ["auto", "all_to_all"],
    covers=[("tuple", "auto")],
)
def test_auto_axes_with_a_resource(layout, transport):
    run_case(
        dataclasses.replace(LAYOUTS[layout], transport=transport),
        "auto",
        resource=RESOURCES[layout],
    )


def test_axis_comes_from_the_resource():
    case = Case(mesh=DP_EP, spec=(("dp", "ep"),))
    run, _ = compiled_run(case, "auto")
    topk = routing("holes", 40, 3, 8)
    oracle = case.oracle(topk)
    operands = operands_of(case, oracle, topk, "float32")
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), global_shard_guard(RESOURCES["dp,ep"]):
        out = jax.jit(partial(exchange, config=EpConfig(num_experts=8)))(*operands)
    check(out, case, oracle, operands)


@covering(
    "axis, placed, shardy",
    [None, "ep"],
    [True, False],
    [True, False],
    covers=[("ep", True, False)],
)
def test_auto_axes_without_a_resource_are_one_participant(axis, placed, shardy):
    case = Case(mesh=(("none", 1),), spec=(None,), ep=(), transport="auto", A=4)
    config = EpConfig(num_experts=8, alignment=4, axis=axis if placed else None)
    topk = routing("holes", 40, 3, 8)
    oracle = case.oracle(topk)
    operands = operands_of(case, oracle, topk, "float32")
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    split, whole = (NamedSharding(mesh, PartitionSpec(a)) for a in (("dp", "ep"), None))
    shardings = [split, split, split, whole, split, whole, whole]
    on_mesh = [jax.device_put(x, s) for x, s in zip(operands, shardings, strict=True)]
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        out = jax.jit(partial(exchange, config=config))(*(on_mesh if placed else operands))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    check(out, case, oracle, operands)


@covering(
    "sizes, dtype, jit",
    [(13,), (3, 5), (0,), (1, 1, 1)],
    ["float32", "bfloat16"],
    [True, False],
    covers=[((3, 5), "float32", True), ((0,), "bfloat16", True), ((1, 1, 1), "float32", False)],
)
def test_without_a_mesh(sizes, dtype, jit):
    case = Case(mesh=(("none", 1),), spec=(None,) * len(sizes), ep=(), sizes=sizes, A=4, E=5)
    config = EpConfig(num_experts=5, alignment=4)
    topk = routing("holes", int(np.prod(sizes)), 3, 5).reshape(*sizes, 3)
    oracle = case.oracle(topk)
    operands = operands_of(case, oracle, topk, dtype)
    function = partial(exchange, config=config)
    check(
        (jax.jit(function) if jit else function)(*map(jnp.asarray, operands)),
        case,
        oracle,
        operands,
    )


@covering("manual, transport", ["dp", "ep"], RING, covers=[("ep", "all_to_all")])
def test_some_axes_manual_the_others_explicit(manual, transport):
    """Inside a shard_map over one axis, P counts the participants over the other axes."""
    order = ("dp", "ep") if manual == "dp" else ("ep", "dp")  # the manual axis is the major one
    case = Case(mesh=DP_EP, spec=(order,), transport=transport)
    topk = routing("holes", 40, 3, 8)
    oracle = case.oracle(topk)
    operands = operands_of(case, oracle, topk, "float32")
    by_order = np.arange(8).reshape(2, 4) if manual == "dp" else np.arange(8).reshape(2, 4).T
    by_order = by_order.reshape(-1)

    mesh = jax.make_mesh((2, 4), ("dp", "ep"))
    function = jax.shard_map(
        partial(exchange, config=case.config),
        mesh=mesh,
        axis_names={manual},
        in_specs=PartitionSpec(manual),
        out_specs=PartitionSpec(manual),
        check_vma=False,
    )
    per_row = [len(x) == 8 for x in operands]
    operands = [x[by_order] if r else x for x, r in zip(operands, per_row, strict=True)]
    sharding = NamedSharding(mesh, PartitionSpec(order))
    out = jax.jit(function)(*(jax.device_put(x, sharding) for x in operands))
    inverse = np.argsort(by_order)
    back = {n: np.asarray(x)[inverse] if len(x) == 8 else np.asarray(x) for n, x in out.items()}
    operands = [x[inverse] if r else x for x, r in zip(operands, per_row, strict=True)]
    check(back, case, oracle, operands)


def test_tokens_elsewhere_are_resharded_to_the_handle():
    mesh = jax.make_mesh((2, 4), ("dp", "ep"))
    case = Case(mesh=DP_EP, spec=(("dp", "ep"),), D=4)
    topk = routing("holes", 40, 3, 8)
    oracle = case.oracle(topk)
    tokens = operands_of(case, oracle, topk, "float32")[1]
    topk = jax.device_put(topk, NamedSharding(mesh, PartitionSpec("dp")))
    x = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(None, "ep")))
    handle = jax.jit(partial(prepare, config=case.config))(topk)
    np.testing.assert_array_equal(handle.source, oracle.source())
    with pytest.warns(RuntimeWarning, match=r"resharded to .*\('dp', 'ep'\), None"):
        rows, pull = jax.jit(lambda h, x: jax.vjp(partial(dispatch, h), x))(handle, x)
    np.testing.assert_array_equal(rows, oracle.dispatch(tokens))
    assert jax.typeof(pull(rows)[0]).sharding == jax.typeof(x).sharding


@covering("transport", RING, covers=["all_to_all"])
def test_sums_in_float32_across_ranks(transport):
    """Even ranks hold 256 + 1 of each token, odd ones -256 + 0: in bfloat16 256 + 1 is 256."""
    case = Case(E=16, K=16, transport=transport)
    run, _ = compiled_run(case, "manual")
    topk = routing("uniform", 40, 16, 16)
    oracle = case.oracle(topk)
    operands = list(operands_of(case, oracle, topk, "bfloat16"))
    for p, n, t, k in oracle.live():
        first, even = topk[t, k] % 2 == 0, p % 2 == 0
        operands[3][p, n] = operands[5][p, n] = (256 if even else -256) if first else even
    out = run(operands)
    assert out["out"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out["out"], np.float32), 4)
    np.testing.assert_array_equal(np.asarray(out["d_tokens"], np.float32), 4)


@covering("transport", RING, covers=["all_to_all"])
def test_nan_stays_in_its_token(transport):
    case = Case(transport=transport, A=16)
    run, _ = compiled_run(case, "manual")
    topk = routing("uniform", 40, 3, 8)
    oracle = case.oracle(topk)
    operands = list(operands_of(case, oracle, topk, "float32"))
    clean = run(operands)
    tokens, y = operands[1].copy(), operands[3].copy()
    tokens[7] = np.nan
    mine = np.zeros(y.shape[:2], bool)
    for p, n, t, _ in oracle.live():
        mine[p, n] = t == 7
    y[mine] = np.nan
    operands[1], operands[3] = tokens, y
    out = run(operands)
    assert np.isnan(np.asarray(out["rows"])[mine]).all() and np.isnan(out["out"][7]).all()
    np.testing.assert_array_equal(np.asarray(out["rows"])[~mine], np.asarray(clean["rows"])[~mine])
    np.testing.assert_array_equal(np.delete(out["out"], 7, 0), np.delete(clean["out"], 7, 0))


@covering(
    "payload, transport",
    ["uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int32", "float16"],
    RING,
    covers=[
        ("float8_e5m2", "all_to_all"),
        ("float8_e8m0fnu", "ring"),
    ],
)
def test_dispatches_any_dtype(payload, transport):
    """Quantized rows and their scales move like the rows themselves."""
    mesh = jax.make_mesh((8,), ("ep",))
    topk = routing("holes", 40, 3, 8)
    oracle = Case(A=4).oracle(topk)
    values = 2 ** np.random.default_rng(0).integers(0, 7, (40, 6))  # exact in each of them
    place = partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("ep")))
    config = EpConfig(num_experts=8, alignment=4, axis="ep", transport=transport)
    rows = jax.jit(lambda i, x: dispatch(prepare(i, config), x))(
        place(jnp.asarray(topk)), place(jnp.asarray(values, payload))
    )
    assert rows.dtype == payload
    want = oracle.dispatch(values)
    if payload == "float8_e8m0fnu":
        want[oracle.source() < 0] = 2.0**-127  # it has no zero
    np.testing.assert_array_equal(np.asarray(rows, np.float64), want)


@covering(
    "size, transport",
    [1, 2],
    ["all_to_all", "ring"],
    covers=[(1, "all_to_all"), (2, "all_to_all"), (2, "ring")],
)
def test_the_gradient_of_tokens_of_8_bits(size, transport):
    """A token's is the sum of its rows', in float32, rounded once."""
    mesh = jax.make_mesh((size,), ("ep",))
    topk = jnp.asarray(routing("holes", 40, 3, 8))
    config = EpConfig(num_experts=8, alignment=4, axis="ep", transport=transport)
    place = partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("ep")))
    handle = prepare(place(topk), config)
    scale = np.random.default_rng(3).normal(size=handle.source.shape).astype(np.float32)
    scale = place(jnp.asarray(scale, jnp.float8_e4m3fn).astype(jnp.float32)[..., None])

    def weighed(x):
        return (scale * dispatch(handle, x).astype(jnp.float32)).sum()

    x = place(jnp.ones((40, 6), jnp.float8_e4m3fn))
    with jax.set_mesh(mesh):
        got = np.asarray(jax.jit(jax.grad(weighed))(x), np.float64)
    rows, source = np.asarray(scale, np.float64).reshape(-1), np.asarray(handle.source).reshape(-1)
    want = np.zeros(40)
    np.add.at(want, source[source >= 0] // 3, rows[source >= 0])
    assert relative_error(got, want[:, None].repeat(6, 1)) < 2.0**-4


def loss(topk, x, w, *, config):
    """A small block: its gradient meets every public function and both transposes."""
    handle = prepare(topk, config)
    rows = jnp.sin(dispatch(handle, x)) * dispatch_weights(handle, w)[..., None]
    return combine(handle, rows)


def value_and_pull(topk, x, w, g, *, config, function=loss):
    out, pull = jax.vjp(partial(function, topk, config=config), x, w)
    return out, *pull(g)


@covering(
    "mode, transform",
    ["explicit", "resource"],
    ["vmap", "scan", "remat", "scan of remat"],
    covers=[("explicit", "scan of remat")],
)
def test_transforms_equal_loop(transform, mode):
    rng = np.random.default_rng(1)
    num, N, K, E, D = 3, 16, 2, 8, 4
    topk = jnp.asarray(np.stack([routing(k, N, K, E) for k in ("uniform", "one", "holes")]))
    x, g = (jnp.asarray(rng.normal(size=(num, N, D)), jnp.float32) for _ in range(2))
    w = jnp.asarray(rng.normal(size=(num, N, K)), jnp.float32)
    alone = jax.jit(partial(value_and_pull, config=EpConfig(num_experts=E)))
    want = [alone(*operands) for operands in zip(topk, x, w, g, strict=True)]
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(kind,) * 2)
    config = EpConfig(num_experts=E, axis="ep", transport="auto")
    function = partial(value_and_pull, config=config)
    if "remat" in transform:
        function = partial(function, function=_remat_loss)
    if transform == "vmap":
        batched = jax.vmap(function)
    elif "scan" in transform:

        def batched(*operands):
            return jax.lax.scan(lambda c, o: (c, function(*o)), 0, operands)[1]
    else:

        def batched(*operands):
            outs = [function(*o) for o in zip(*operands, strict=True)]
            return jax.tree.map(lambda *o: jnp.stack(o), *outs)

    spec = PartitionSpec(None, ("dp", "ep"))
    operands = [jax.device_put(o, NamedSharding(mesh, spec)) for o in (topk, x, w, g)]
    roles = RESOURCES["dp,ep"] if mode == "resource" else None
    with global_shard_guard(roles):
        out = jax.jit(batched)(*operands)
    for i, expected in enumerate(want):
        for actual, e in zip(out, expected, strict=True):
            error = np.linalg.norm(actual[i] - e) / np.linalg.norm(e)
            assert error < TOLERANCE["float32"]


def _remat_loss(topk, x, w, *, config):
    return jax.checkpoint(partial(loss, config=config))(topk, x, w)


@pytest.mark.parametrize(
    "tokens, capacity, alignment, countable",
    [
        (4, 2**31 - 1, 1, True),
        (4, 2**31, 1, False),
        (2**30 - 1, 1, 1, True),  # choices of all ranks are counted too
        (2**30, 1, 1, False),
        (2**30 - 8, 2, 2, True),  # 2^31 - 16 choices and 8 of padding
        (2**30 - 4, 2, 2, False),
    ],
)
def test_rows_must_be_countable_in_int32(tokens, capacity, alignment, countable):
    config = EpConfig(num_experts=8, axis=(), capacity=capacity, alignment=alignment)
    idx = jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    if countable:
        jax.eval_shape(lambda idx: prepare(idx, config), idx)
        return
    with pytest.raises(ValueError, match=f"countable in int32; got capacity={capacity}, ep_size=1"):
        jax.eval_shape(lambda idx: prepare(idx, config), idx)


@pytest.mark.parametrize("capacity", [None, 64])
def test_a_symbolic_number_of_tokens(capacity):
    (batch,) = export.symbolic_shape("b")
    config = EpConfig(num_experts=8, capacity=capacity)
    idx = jax.ShapeDtypeStruct((batch, 2), jnp.int32)
    with pytest.raises(NotImplementedError, match="ep_prepare: .*export one program for each size"):
        export.export(jax.jit(lambda idx: prepare(idx, config)))(idx)


def test_second_call_does_not_trace_again():
    case, traced = Case(), []
    run, _ = compiled_run(case, "explicit")
    mesh = jax.make_mesh((8,), ("ep",))

    @jax.jit
    def function(*operands):
        traced.append(1)
        return exchange(*operands, config=case.config)

    topk = routing("holes", 40, 3, 8)
    operands = operands_of(case, case.oracle(topk), topk, "float32")
    specs = case.specs()[0]
    for _ in range(2):
        function(
            *(
                jax.device_put(x, NamedSharding(mesh, s))
                for x, s in zip(operands, specs, strict=True)
            )
        )
    assert len(traced) == 1


def small(**changed):
    config = EpConfig(**(dict(num_experts=4) | changed))
    return jnp.zeros((8, 2), jnp.int32), jnp.ones((8, 3)), config


def on_mesh(function, *axes, kind=AxisType.Explicit):
    """The function on 8 shards of a mesh of these axes."""
    mesh = jax.make_mesh((8,), axes, axis_types=(kind,))
    with jax.set_mesh(mesh):
        return function()


def with_roles(function):
    with global_shard_guard(MeshResource(dp_resource="dp")):
        return function()


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda i, x, c: prepare(x, c), TypeError, "dtype=float32"),
        (
            lambda i, x, c: prepare(i.tolist(), c),
            TypeError,
            "prepare: topk_idx must be an array of integers; got a list; pass",
        ),
        (
            lambda i, x, c: dispatch(prepare(i, c), x.tolist()),
            TypeError,
            "dispatch: tokens must be an array of numbers; got a list; pass",
        ),
        (
            lambda i, x, c: combine(prepare(i, c), None),
            TypeError,
            "combine: rows must be an array of floats of at least 16 bits; got None; pass",
        ),
        (
            lambda i, x, c: dispatch_weights(prepare(i, c), 1.0),
            TypeError,
            "dispatch_weights: topk_weights must be an array of floats of at least 16 bits; got a float; pass",
        ),
        (lambda i, x, c: prepare(i[0], c), ValueError, "shape=(2,)"),
        (lambda i, x, c: dispatch(prepare(i, c), x[:7]), ValueError, "(7,)"),
        (lambda i, x, c: dispatch(prepare(i, c), x[None]), ValueError, "(1, 8)"),
        (lambda i, x, c: combine(prepare(i, c), x), ValueError, "(1, 16)"),
        (lambda i, x, c: combine(prepare(i, c), i), TypeError, "dtype=int32"),
        (lambda i, x, c: dispatch(prepare(i, c), x > 0), TypeError, "dtype=bool"),
        (lambda i, x, c: dispatch(prepare(i, c), x + 1j), TypeError, "dtype=complex64"),
        (lambda i, x, c: dispatch(prepare(i, c), x.astype("int4")), TypeError, "dtype=int4"),
        (
            lambda i, x, c: dispatch(prepare(i, c), jax.random.split(jax.random.key(0), (8, 3))),
            TypeError,
            "dtype=key<fry>",
        ),
        (lambda i, x, c: dispatch_weights(prepare(i, c), i), TypeError, "dtype=int32"),
        (lambda i, x, c: dispatch_weights(prepare(i, c), x), ValueError, "(8, 3)"),  # another K
        (lambda i, x, c: dispatch(prepare(i, c), x, transport="nccl"), ValueError, "'nccl'"),
        (lambda i, x, c: prepare(i, small(axis="ep")[2]), ValueError, "axis='ep', mesh axes=()"),
        (
            lambda i, x, c: on_mesh(lambda: prepare(i, small(axis="ep")[2]), "dp"),
            ValueError,
            "axis='ep', mesh axes=('dp',)",
        ),
        (
            lambda i, x, c: on_mesh(lambda: prepare(i, small(axis="ep")[2]), "ep"),
            ValueError,
            "num_experts=4, ep_size=8, axis='ep'",
        ),
        (
            lambda i, x, c: on_mesh(
                lambda: prepare(i[:7], small(axis="ep", num_experts=8)[2]), "ep"
            ),
            ValueError,
            "leading dimensions (7,)",
        ),
        (
            lambda i, x, c: on_mesh(
                lambda: dispatch(
                    prepare(i, small(axis="ep", num_experts=8)[2]), x, transport="local"
                ),
                "ep",
            ),
            ValueError,
            "ep_size=8, axis=('ep',)",
        ),
        (lambda i, x, c: with_roles(lambda: prepare(i, c)), ValueError, "ep_resource=None"),
        (
            lambda i, x, c: on_mesh(
                lambda: with_roles(lambda: prepare(i[:4], small(axis=())[2])),
                "dp",
                kind=AxisType.Auto,
            ),
            ValueError,
            "dimensions (4,), sharded over {}, and ['dp'] of [8] shards",
        ),
        (
            lambda i, x, c: prepare(i, small(capacity=7, overflow="error")[2]),
            ValueError,
            "capacity=7, tokens=8",
        ),
        (
            lambda i, x, c: prepare(i, small(capacity=2**31)[2]),
            ValueError,
            "capacity=2147483648",
        ),
    ],
)
def test_errors(call, kind, words):
    with pytest.raises(kind) as error:
        call(*small())
    assert words in str(error.value)
