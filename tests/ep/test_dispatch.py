"""prepare, dispatch, combine and dispatch_weights, every transport and mesh mode, against loops in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep.exchange_oracle import KINDS, Exchange, axes_of, routing, shards
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.ep import (
    EpConfig,
    combine,
    dispatch,
    dispatch_weights,
    prepare,
    recv_capacity,
)

TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3}
RING = ["ring", "all_to_all"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, where the leading dimensions of tokens are on it, and the EP axes."""

    mesh: tuple = (("ep", 8),)
    spec: tuple = ("ep",)
    ep: tuple = ("ep",)
    sizes: tuple = (40,)
    E: int = 8
    K: int = 3
    A: int = 1
    C: int | None = None
    D: int = 6
    features: str | None = None
    transport: str = "ring"

    @property
    def R(self):
        return int(np.prod([dict(self.mesh)[a] for a in self.ep], dtype=int))

    @property
    def config(self):
        axis = self.ep[0] if len(self.ep) == 1 else self.ep
        return EpConfig(
            num_experts=self.E,
            capacity=self.C,
            alignment=self.A,
            transport=self.transport,
            axis=axis,
        )

    def oracle(self, topk):
        blocks = list(shards(dict(self.mesh), self.spec, self.sizes, self.ep))
        tokens = len(blocks[0])
        C = self.C or (recv_capacity(self.E, self.K, tokens, self.R, self.A) if tokens else 0)
        return Exchange(topk.reshape(-1, self.K), blocks, self.R, self.E, C, self.A)

    def specs(self):
        named = [a for entry in self.spec for a in axes_of(entry)]
        each = PartitionSpec(tuple(a for a in named if a not in self.ep) + self.ep)
        leading, rows = PartitionSpec(*self.spec), PartitionSpec(*each, None, self.features)
        tokens = PartitionSpec(*self.spec, self.features)
        operands = (leading, tokens, leading, rows, tokens, rows, each)
        results = dict(
            slot=leading,
            source=each,
            row=each,
            tokens_per_expert=each,
            group_sizes=each,
            total_recv=each,
            num_dropped=each,
            rows=rows,
            out=tokens,
            row_weights=each,
            d_tokens=tokens,
            d_rows=rows,
            d_weights=leading,
        )
        return operands, results


def operands_of(case, oracle, topk, dtype, seed=3):
    """Random operands; what is not a row is NaN in every buffer that a caller may leave undefined."""
    rng = np.random.default_rng(seed)
    tokens, rows = (*case.sizes, case.D), (oracle.P, oracle.C, case.D)

    def draw(shape):
        exponent = rng.integers(-9, 9, (*shape[:-1], 1))
        return np.array(jnp.asarray(rng.normal(size=shape) * 2.0**exponent, dtype))

    live = oracle.source() >= 0
    y, g_rows, g_weights = draw(rows), draw(rows), rng.normal(size=rows[:2]).astype(np.float32)
    y[~live], g_rows[~live], g_weights[~live] = np.nan, np.nan, np.nan
    weights = rng.normal(size=(*case.sizes, case.K)).astype(np.float32)
    return topk, draw(tokens), weights, y, draw(tokens), g_rows, g_weights


def exchange(topk, tokens, weights, y, g_tokens, g_rows, g_weights, *, config):
    """Everything public, with its cotangents."""
    handle = prepare(topk, config)
    rows, pull_tokens = jax.vjp(partial(dispatch, handle), tokens)
    out, pull_rows = jax.vjp(partial(combine, handle), y)
    row_weights, pull_weights = jax.vjp(partial(dispatch_weights, handle), weights)
    arrays = {name: getattr(handle, name) for name in INTEGERS}
    return arrays | dict(
        rows=rows,
        out=out,
        row_weights=row_weights,
        d_tokens=pull_tokens(g_rows)[0],
        d_rows=pull_rows(g_tokens)[0],
        d_weights=pull_weights(g_weights)[0],
    )


INTEGERS = (
    "slot",
    "source",
    "row",
    "tokens_per_expert",
    "group_sizes",
    "total_recv",
    "num_dropped",
)


def check(out, case, oracle, operands):
    _, tokens, weights, y, g_tokens, g_rows, g_weights = (
        np.asarray(x, np.float64) for x in operands
    )
    tokens, g_tokens = tokens.reshape(-1, case.D), g_tokens.reshape(-1, case.D)
    integers = dict(
        slot=oracle.slot().reshape(*case.sizes, case.K),
        source=oracle.source(),
        row=oracle.row(),
        tokens_per_expert=oracle.raw,
        group_sizes=oracle.sizes,
        total_recv=oracle.total,
        num_dropped=oracle.dropped,
    )
    for name, want in integers.items():
        assert out[name].dtype == jnp.int32, name
        np.testing.assert_array_equal(out[name], want, err_msg=name)
    dtype = operands[1].dtype
    exact = dict(
        rows=(oracle.dispatch(tokens), dtype),
        d_rows=(oracle.dispatch(g_tokens), dtype),
        row_weights=(oracle.dispatch_weights(weights.reshape(-1, case.K)), jnp.float32),
        d_weights=(
            oracle.combine_weights(g_weights).reshape(*case.sizes, case.K),
            jnp.float32,
        ),
    )
    for name, (want, kind) in exact.items():
        assert out[name].dtype == kind, name
        np.testing.assert_array_equal(np.asarray(out[name], np.float64), want, err_msg=name)
    sums = dict(out=(oracle.combine(y), oracle.combine(abs(y))))
    sums["d_tokens"] = (oracle.combine(g_rows), oracle.combine(abs(g_rows)))
    for name, (want, scale) in sums.items():
        assert out[name].dtype == dtype, name
        error = np.asarray(out[name], np.float64).reshape(want.shape) - want
        # One bound per token, on the terms of its sum: tokens differ by 2 ** 18, and terms may cancel.
        bound = TOLERANCE[str(dtype)] * np.linalg.norm(scale, axis=-1)
        assert np.all(np.linalg.norm(error, axis=-1) <= bound), name


def compiled_run(case, mode, resource=None):
    """One jitted exchange on the case's mesh."""
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    names, sizes = zip(*case.mesh, strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
    operand_specs, result_specs = case.specs()
    function = partial(exchange, config=case.config)
    if mode.startswith("manual"):
        function = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=operand_specs,
            out_specs=result_specs,
            check_vma=mode == "manual",
        )
    function = jax.jit(function)

    def place(operands):
        return [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(operands, operand_specs, strict=True)
        ]

    def run(operands):
        with global_shard_guard(resource):
            return function(*place(operands))

    return run, result_specs


def run_case(case, mode="manual", dtype="float32", kinds=("holes",), resource=None):
    run, result_specs = compiled_run(case, mode, resource)
    for kind in kinds:
        topk = routing(kind, int(np.prod(case.sizes)), case.K, case.E).reshape(*case.sizes, case.K)
        oracle = case.oracle(topk)
        operands = operands_of(case, oracle, topk, dtype)
        out = run(operands)
        check(out, case, oracle, operands)
    return out, result_specs


@pytest.mark.parametrize("transport", RING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("A", [1, 16])
def test_routings(transport, dtype, A):
    run_case(Case(transport=transport, A=A), "manual", dtype, KINDS)


@pytest.mark.parametrize("transport", RING)
@pytest.mark.parametrize("A, C", [(1, 1), (1, 7), (4, 16), (16, 32)])
def test_overflow_drops_the_last_rows_and_counts_them(transport, A, C):
    run_case(Case(transport=transport, A=A, C=C, E=16), "manual", kinds=KINDS)


@pytest.mark.parametrize("transport", RING)
@pytest.mark.parametrize(
    "changed",
    [
        dict(
            E=8, K=5
        ),  # more choices than local experts: repeats are separate rows, and may be dropped
        dict(E=8, K=5, C=200),
        dict(E=24, K=1, sizes=(8,), D=1),
        dict(E=8, K=2, sizes=(0,), C=16, A=16),
        dict(E=40, K=7, sizes=(1064,), D=3),
    ],
)
def test_sizes(transport, changed):
    run_case(dataclasses.replace(Case(transport=transport), **changed))


@pytest.mark.parametrize("C", [None, 16])
@pytest.mark.parametrize("mode", ["explicit", "resource"])
def test_no_tokens_at_all(mode, C):
    resource = RESOURCES["ep"] if mode == "resource" else None
    run_case(Case(sizes=(0,), K=2, C=C, A=16), mode, resource=resource)


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


@pytest.mark.parametrize("mode", ["manual", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("layout", RESOURCES)
@pytest.mark.parametrize("transport", ["auto", "all_to_all"])
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


@pytest.mark.parametrize("axis", [None, "ep"])
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("shardy", [True, False])
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


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(13,), (3, 5), (0,), (1, 1, 1)])
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


@pytest.mark.parametrize("transport", RING)
@pytest.mark.parametrize("manual", ["dp", "ep"])
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
    rows, pull = jax.jit(lambda h, x: jax.vjp(partial(dispatch, h), x))(handle, x)
    np.testing.assert_array_equal(rows, oracle.dispatch(tokens))
    assert jax.typeof(pull(rows)[0]).sharding == jax.typeof(x).sharding


@pytest.mark.parametrize("transport", RING)
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


@pytest.mark.parametrize("transport", RING)
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


@pytest.mark.parametrize("payload", ["uint8", "float8_e4m3fn", "int32", "float16"])
def test_dispatches_any_dtype(payload):
    """Quantized rows and their scales move like the rows themselves."""
    mesh = jax.make_mesh((8,), ("ep",))
    topk = routing("holes", 40, 3, 8)
    oracle = Case(A=4).oracle(topk)
    values = np.random.default_rng(0).integers(0, 7, (40, 6))
    place = partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("ep")))
    for transport in RING:
        config = EpConfig(num_experts=8, alignment=4, axis="ep", transport=transport)
        rows = jax.jit(lambda i, x, c=config: dispatch(prepare(i, c), x))(
            place(jnp.asarray(topk)), place(jnp.asarray(values, payload))
        )
        assert rows.dtype == payload
        np.testing.assert_array_equal(np.asarray(rows, np.float64), oracle.dispatch(values))


def loss(topk, x, w, *, config):
    """A small block: its gradient meets every public function and both transposes."""
    handle = prepare(topk, config)
    rows = jnp.sin(dispatch(handle, x)) * dispatch_weights(handle, w)[..., None]
    return combine(handle, rows)


def value_and_pull(topk, x, w, g, *, config, function=loss):
    out, pull = jax.vjp(partial(function, topk, config=config), x, w)
    return out, *pull(g)


@pytest.mark.parametrize("transform", ["vmap", "scan", "remat", "scan of remat"])
@pytest.mark.parametrize("mode", ["plain", "explicit", "manual", "resource"])
def test_transforms_equal_loop(transform, mode):
    rng = np.random.default_rng(1)
    num, N, K, E, D = 3, 16, 2, 8, 4
    topk = jnp.asarray(np.stack([routing(k, N, K, E) for k in ("uniform", "one", "holes")]))
    x, g = (jnp.asarray(rng.normal(size=(num, N, D)), jnp.float32) for _ in range(2))
    w = jnp.asarray(rng.normal(size=(num, N, K)), jnp.float32)
    want = [
        value_and_pull(*o, config=EpConfig(num_experts=E)) for o in zip(topk, x, w, g, strict=True)
    ]
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(kind,) * 2)
    config = EpConfig(num_experts=E, axis=None if mode == "plain" else "ep", transport="auto")
    function = partial(value_and_pull, config=config)
    if "remat" in transform:
        function = partial(function, function=jax.checkpoint(loss, static_argnums=()))
        function = partial(value_and_pull, config=config, function=_remat_loss)
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
    if mode == "manual":
        batched = jax.shard_map(batched, mesh=mesh, in_specs=spec, out_specs=spec)
    operands = (topk, x, w, g)
    if mode != "plain":
        operands = [jax.device_put(o, NamedSharding(mesh, spec)) for o in operands]
    roles = RESOURCES["dp,ep"] if mode == "resource" else None
    with global_shard_guard(roles):
        out = jax.jit(batched)(*operands)
    for i, expected in enumerate(want):
        for actual, e in zip(out, expected, strict=True):
            error = np.linalg.norm(actual[i] - e) / np.linalg.norm(e)
            assert error < TOLERANCE["float32"]


def _remat_loss(topk, x, w, *, config):
    return jax.checkpoint(partial(loss, config=config))(topk, x, w)


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


def on_mesh(function, *axes):
    """The function on 8 shards of an Explicit mesh of these axes."""
    mesh = jax.make_mesh((8,), axes)
    with jax.set_mesh(mesh):
        return function()


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda i, x, c: prepare(x, c), TypeError, "dtype=float32"),
        (lambda i, x, c: prepare(i[0], c), ValueError, "shape=(2,)"),
        (lambda i, x, c: dispatch(prepare(i, c), x[:7]), ValueError, "(7,)"),
        (lambda i, x, c: dispatch(prepare(i, c), x[None]), ValueError, "(1, 8)"),
        (lambda i, x, c: combine(prepare(i, c), x), ValueError, "(1, 16)"),
        (lambda i, x, c: dispatch_weights(prepare(i, c), i), TypeError, "dtype=int32"),
        (lambda i, x, c: dispatch_weights(prepare(i, c), x), ValueError, "(8, 3)"),
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
