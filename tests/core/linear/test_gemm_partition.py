"""What crosses devices in gemm and grouped_gemm, forward and backward, and that sharding changes no value.

One row per layout of requirements 2.1.2 and 2.1.4; Explicit axes and Auto axes under a MeshResource must agree.
"""

import functools
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases.covering import covering
from expertmesh.core import MeshResource, gemm, global_shard_guard, grouped_gemm
from expertmesh.core.hlo import axes_of, collectives
from expertmesh.core.testing import magnitudes, relative_error

AXES = {"fsdp": 2, "ep": 2, "tp": 2}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")
TOKENS = ("fsdp", "ep")
MESH_KINDS = [AxisType.Explicit, AxisType.Auto]
KINDS = pytest.mark.parametrize("kind", MESH_KINDS, ids=lambda k: k.name)


def mesh_of(kind):
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * len(AXES))


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def crossing(text):
    """How often each (kind, axes, shape) crosses devices."""
    return Counter(
        (found.kind, axes_of(found.groups, AXES), shape)
        for found in collectives(text)
        for shape in found.shapes
    )


def gather(axes, shape):
    return ("all-gather", axes, shape)


def scatter(axes, shape):
    return ("reduce-scatter", axes, shape)


def total(axes, shape):
    return ("all-reduce", axes, shape)


FSDP, EP, TP = ("fsdp",), ("ep",), ("tp",)


@functools.cache
def dense_data():
    rng = np.random.default_rng(0)
    x, w = magnitudes(rng, (8, 6, 16)), magnitudes(rng, (16, 2, 12))
    bias, dy = rng.normal(size=(2, 12)), rng.normal(size=(8, 6, 2, 12))
    return tuple(np.asarray(a, np.float32) for a in (x, w, bias, dy))


def dense_oracle(x, w, bias, dy):
    x, w, bias, dy = (a.astype(np.float64) for a in (x, w, bias, dy))
    return (
        np.einsum("btk,kcn->btcn", x, w) + bias,
        np.einsum("btcn,kcn->btk", dy, w),
        np.einsum("btk,btcn->kcn", x, dy),
        dy.sum((0, 1)),
    )


# layout -> specs of x, w, bias, y; what crosses, forward and backward
DENSE = {
    "compound on K": (
        (P(TOKENS), P(TOKENS), P(), P(TOKENS)),
        [
            gather(TOKENS, "f32[16,2,12]"),
            scatter(TOKENS, "f32[4,2,12]"),
            total(TOKENS, "f32[2,12]"),
        ],
    ),
    "compound on N": (
        (P(TOKENS), P(None, None, TOKENS), P(), P(TOKENS)),
        [
            gather(TOKENS, "f32[16,2,12]"),
            scatter(TOKENS, "f32[16,2,3]"),
            total(TOKENS, "f32[2,12]"),
        ],
    ),
    "fsdp and tp on N": (
        (P(TOKENS), P(None, None, ("tp", "fsdp")), P(None, "tp"), P(TOKENS, None, None, "tp")),
        [
            gather(FSDP, "f32[16,2,6]"),
            total(TP, "f32[2,6,16]"),
            scatter(FSDP, "f32[16,2,3]"),
            total(EP, "f32[16,2,3]"),
            total(TOKENS, "f32[2,6]"),
        ],
    ),
    "tp columns": (
        (P(TOKENS), P("fsdp", None, "tp"), P(None, "tp"), P(TOKENS, None, None, "tp")),
        [
            gather(FSDP, "f32[16,2,6]"),
            total(TP, "f32[2,6,16]"),
            scatter(FSDP, "f32[8,2,6]"),
            total(EP, "f32[8,2,6]"),
            total(TOKENS, "f32[2,6]"),
        ],
    ),
    "tp rows": (
        (P(TOKENS, None, "tp"), P("tp", None, "fsdp"), P(), P(TOKENS)),
        [
            gather(FSDP, "f32[8,2,12]"),
            total(TP, "f32[2,6,2,12]"),
            scatter(FSDP, "f32[8,2,6]"),
            total(EP, "f32[8,2,6]"),
            total(TOKENS, "f32[2,12]"),
        ],
    ),
    "tp columns of a split sequence": (
        (P(TOKENS, "tp"), P(None, None, "tp"), P(None, "tp"), P(TOKENS, None, None, "tp")),
        [
            gather(TP, "f32[2,6,16]"),
            scatter(TP, "f32[2,3,16]"),
            total(TOKENS, "f32[16,2,6]"),
            total(TOKENS, "f32[2,6]"),
        ],
    ),
    "tp rows to a split sequence": (
        (P(TOKENS, None, "tp"), P("tp"), P(), P(TOKENS, "tp")),
        [
            scatter(TP, "f32[2,3,2,12]"),
            gather(TP, "f32[2,6,2,12]"),
            total(TOKENS, "f32[8,2,12]"),
            total(("fsdp", "ep", "tp"), "f32[2,12]"),
        ],
    ),
}


def compare(kind, function, operands, dy, specs, oracle, expected, resource):
    """`function(*operands)` and its gradients: values, layouts, and what crosses devices."""
    mesh = mesh_of(kind)
    placed = [put(mesh, x, spec) for x, spec in zip(operands, specs, strict=False)]
    dy = put(mesh, dy, specs[-1])

    def both(*operands):
        y, pull = jax.vjp(function, *operands[:-1])
        return y, *(g for g in pull(operands[-1]) if g.dtype != jax.dtypes.float0)

    with global_shard_guard(resource):
        program = jax.jit(both).lower(*placed, dy).compile()
        results = program(*placed, dy)
    for got, want in zip(results, oracle, strict=True):
        assert relative_error(got, want) < 1e-6
    floats = [x for x in placed if jnp.issubdtype(x.dtype, jnp.inexact)]
    for result, primal in zip(results, [dy, *floats], strict=True):
        assert result.sharding.is_equivalent_to(primal.sharding, primal.ndim)
    assert crossing(program.as_text()) == Counter(expected)


# Each layout in one kind of mesh, the kinds in turn.
@covering("layout, kind", DENSE, MESH_KINDS, covers=list(zip(DENSE, MESH_KINDS * 9, strict=False)))
def test_gemm(layout, kind):
    """Only the weight is gathered; tp never gathers it; every gradient lies where its primal does."""
    specs, expected = DENSE[layout]
    x, w, bias, dy = dense_data()
    sequence = "sequence" in layout
    given = dict(w_spec=specs[1]) if kind == AxisType.Auto else {}
    if sequence:  # where a sum is to be scattered; types say it of gradients, but not of results
        given |= dict(x_spec=specs[0], out_spec=specs[3])
    compare(
        kind,
        lambda x, w, bias: gemm(x, w, bias, **given),
        (x, w, bias),
        dy,
        specs,
        dense_oracle(x, w, bias, dy),
        expected,
        RESOURCE if kind == AxisType.Auto or sequence else None,
    )


def test_gemm_where_the_compiler_chooses():
    """Auto axes without a resource: compound axes on K, and the gradient where the parameter is updated."""
    mesh = mesh_of(AxisType.Auto)
    x, w, _, dy = dense_data()
    weight = NamedSharding(mesh, P(TOKENS))

    def both(x, w, dy):
        y, pull = jax.vjp(gemm, x, w)
        return y, w - pull(dy)[1]

    placed = put(mesh, x, P(TOKENS)), put(mesh, w, P(TOKENS)), put(mesh, dy, P(TOKENS))
    program = jax.jit(both, out_shardings=(None, weight)).lower(*placed).compile()
    y, updated = program(*placed)
    assert relative_error(y, np.einsum("btk,kcn->btcn", x, w, dtype=np.float64)) < 1e-6
    assert relative_error(w - updated, dense_oracle(x, w, dy[0, 0], dy)[2]) < 1e-5
    assert y.sharding.is_equivalent_to(placed[2].sharding, 4)
    gathered, scattered = gather(TOKENS, "f32[16,2,12]"), scatter(TOKENS, "f32[4,2,12]")
    assert crossing(program.as_text()) == Counter([gathered, scattered])


@KINDS
def test_a_float32_weight_is_gathered_in_the_dtype_of_the_tokens(kind):
    """By any dimension, once for both ways; its gradient crosses in float32. (XLA:CPU would widen bfloat16.)"""
    mesh = mesh_of(kind)
    x, w, *_ = dense_data()
    specs = P("fsdp", None, "tp"), P(None, None, TOKENS)
    placed = [put(mesh, w, spec) for spec in specs]

    def loss(w, v, x):
        y = gemm(x, w, w_spec=specs[0]) + gemm(x, v, w_spec=specs[1])
        return jnp.sum(y.astype(jnp.float32))

    with global_shard_guard(RESOURCE if kind == AxisType.Auto else None):
        x = put(mesh, x.astype(np.float16), P(TOKENS))
        text = (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*placed, x).compile().as_text()
        )
    large = {key for key in crossing(text) if key[0] != "all-reduce"}
    assert large == {
        gather(FSDP, "f16[16,2,6]"),
        gather(TOKENS, "f16[16,2,12]"),
        scatter(FSDP, "f32[8,2,6]"),
        scatter(TOKENS, "f32[16,2,3]"),
    }


def test_vmap_keeps_where_gradients_are_wanted():
    """By its role, which nobody gave: fsdp along K. And under vmap, where the role is one dimension on."""
    mesh = mesh_of(AxisType.Auto)
    x, w, _, dy = dense_data()
    stack = P(None, TOKENS), P(None, "fsdp"), P(None, TOKENS)
    placed = [put(mesh, np.stack([a, a]), spec) for a, spec in zip((x, w, dy), stack, strict=True)]
    wgrad = jax.vmap(lambda x, w, dy: jax.vjp(gemm, x, w)[1](dy)[1])
    with global_shard_guard(RESOURCE):
        program = jax.jit(wgrad).lower(*placed).compile()
        gradient = program(*placed)
    assert relative_error(gradient[1], dense_oracle(x, w, dy[0, 0], dy)[2]) < 1e-6
    assert set(crossing(program.as_text())) == {
        scatter(FSDP, "f32[2,8,2,12]"),
        total(EP, "f32[2,8,2,12]"),
    }


@KINDS
def test_in_a_partly_manual_region(kind):
    """tp is the caller's own: a shard of the columns is a weight like any other, gathered narrow and over fsdp."""
    mesh = mesh_of(kind)
    x, w, _, dy = dense_data()
    x, dy = x.astype(np.float16), dy.astype(np.float16)

    def body(x, w, dy):
        y, pull = jax.vjp(lambda w: gemm(x, w, w_spec=P("fsdp", None, "tp")), w)
        return y, *pull(dy)

    columns = P(None, None, None, "tp"), P(None, None, "tp")
    specs = (P(), columns[1], columns[0])
    function = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=columns, axis_names={"tp"}, check_vma=False
    )
    at_rest = P(TOKENS), P("fsdp", None, "tp"), P(TOKENS, None, None, "tp")
    placed = [put(mesh, a, spec) for a, spec in zip((x, w, dy), at_rest, strict=True)]
    with global_shard_guard(RESOURCE if kind == AxisType.Auto else None):
        program = jax.jit(function).lower(*placed).compile()
        y, gradient = program(*placed)
    narrow = w.astype(np.float16).astype(np.float64)
    assert relative_error(y, np.einsum("btk,kcn->btcn", x, narrow)) < 1e-3
    assert relative_error(gradient, dense_oracle(x, w, dy[0, 0], dy)[2]) < 1e-6
    assert crossing(program.as_text()) == Counter(
        [gather(FSDP, "f16[16,2,6]"), scatter(FSDP, "f32[8,2,6]"), total(EP, "f32[8,2,6]")]
    )


@functools.cache
def grouped_data():
    """Four participants of two sets of two experts: D * E = 8 groups against E = 4 weights."""
    rng = np.random.default_rng(1)
    sizes = np.array([[3, 2], [0, 5], [4, 0], [1, 1]], np.int32)
    lhs, rhs = magnitudes(rng, (4, 10, 16)), magnitudes(rng, (4, 16, 2, 12))
    bias, dy = rng.normal(size=(4, 2, 12)), rng.normal(size=(4, 10, 2, 12))
    lhs, rhs, bias, dy = (np.asarray(a, np.float32) for a in (lhs, rhs, bias, dy))
    return lhs, rhs, sizes, bias, dy


@KINDS
def test_a_float32_weight_of_experts_is_gathered_in_the_dtype_of_the_rows(kind):
    """As that of a dense product."""
    mesh, (lhs, rhs, sizes, *_) = mesh_of(kind), grouped_data()
    at_rest = P("ep", "fsdp")
    operands = (lhs.astype(np.float16), P(TOKENS)), (rhs, at_rest), (sizes, P(TOKENS))
    placed = [put(mesh, a, spec) for a, spec in operands]

    def loss(lhs, rhs, sizes):
        return jnp.sum(grouped_gemm(lhs, rhs, sizes, w_spec=at_rest).astype(jnp.float32))

    with global_shard_guard(RESOURCE if kind == AxisType.Auto else None):
        text = jax.jit(jax.grad(loss, argnums=1)).lower(*placed).compile().as_text()
        narrow = jax.jit(grouped_gemm).lower(*placed).compile().as_text()
    for found in (text, narrow):
        gathered = {shape for kind, _, shape in crossing(found) if kind == "all-gather"}
        assert all(shape.startswith("f16[") for shape in gathered), gathered
    assert gathered
    scattered = {shape for kind, _, shape in crossing(text) if kind == "reduce-scatter"}
    assert scattered and all(shape.startswith("f32[") for shape in scattered), scattered


@functools.cache
def grouped_oracle():
    """Each row with its own weight."""
    lhs, rhs, sizes, bias, dy = (np.asarray(a, np.float64) for a in grouped_data())
    out, dlhs = np.zeros(dy.shape), np.zeros(lhs.shape)
    drhs, dbias = np.zeros(rhs.shape), np.zeros(bias.shape)
    for p in range(4):
        for row, g in enumerate(np.repeat([0, 1], sizes[p].astype(int))):
            e = p % 2 * 2 + g
            out[p, row] = np.tensordot(lhs[p, row], rhs[e], 1) + bias[e]
            dlhs[p, row] = np.tensordot(rhs[e], dy[p, row], 2)
            drhs[e] += np.multiply.outer(lhs[p, row], dy[p, row])
            dbias[e] += dy[p, row]
    return out, dlhs, drhs, dbias


# layout -> specs of lhs, rhs, sizes, bias, out; what crosses, forward and backward
GROUPED = {
    "fsdp on K": (
        (P(TOKENS), P("ep", "fsdp"), P(TOKENS), P("ep"), P(TOKENS)),
        [
            gather(FSDP, "f32[2,16,2,12]"),
            scatter(FSDP, "f32[2,8,2,12]"),
            total(FSDP, "f32[2,2,12]"),
        ],
    ),
    "fsdp on N": (
        (P(TOKENS), P("ep", None, None, "fsdp"), P(TOKENS), P("ep"), P(TOKENS)),
        [
            gather(FSDP, "f32[2,16,2,12]"),
            scatter(FSDP, "f32[2,16,2,6]"),
            total(FSDP, "f32[2,2,12]"),
        ],
    ),
    "compound on E": (
        (P(TOKENS), P(("ep", "fsdp")), P(TOKENS), P("ep"), P(TOKENS)),
        [
            gather(FSDP, "f32[2,16,2,12]"),
            scatter(FSDP, "f32[1,16,2,12]"),
            total(FSDP, "f32[2,2,12]"),
        ],
    ),
    "tp columns": (
        (
            P(TOKENS),
            P("ep", "fsdp", None, "tp"),
            P(TOKENS),
            P("ep", None, "tp"),
            P(TOKENS, None, None, "tp"),
        ),
        [
            gather(FSDP, "f32[2,16,2,6]"),
            total(TP, "f32[1,10,16]"),
            scatter(FSDP, "f32[2,8,2,6]"),
            total(FSDP, "f32[2,2,6]"),
        ],
    ),
    "tp rows": (
        (P(TOKENS, None, "tp"), P("ep", "tp", None, "fsdp"), P(TOKENS), P("ep"), P(TOKENS)),
        [
            gather(FSDP, "f32[2,8,2,12]"),
            total(TP, "f32[1,10,2,12]"),
            scatter(FSDP, "f32[2,8,2,6]"),
            total(FSDP, "f32[2,2,12]"),
        ],
    ),
    "tp rows to columns": (
        (
            P(TOKENS, None, "tp"),
            P("ep", "tp"),
            P(TOKENS),
            P("ep", None, "tp"),
            P(TOKENS, None, None, "tp"),
        ),
        [
            scatter(TP, "f32[1,10,2,6]"),
            gather(TP, "f32[1,10,2,12]"),
            total(FSDP, "f32[2,8,2,12]"),
            total(FSDP, "f32[2,2,6]"),
        ],
    ),
}


@covering(
    "layout, kind",
    GROUPED,
    MESH_KINDS,
    covers=list(zip(GROUPED, MESH_KINDS * 9, strict=False))[1:5],
)
def test_grouped_gemm(layout, kind):
    """Only the weight is gathered, over fsdp alone; every gradient lies where its primal does."""
    specs, expected = GROUPED[layout]
    lhs, rhs, sizes, bias, dy = grouped_data()
    scattered = layout == "tp rows to columns"
    given = dict(w_spec=specs[1]) if kind == AxisType.Auto else {}
    given |= dict(out_spec=specs[4]) if scattered else {}
    compare(
        kind,
        lambda lhs, rhs, sizes, bias: grouped_gemm(lhs, rhs, sizes, bias, **given),
        (lhs, rhs, sizes, bias),
        dy,
        specs,
        grouped_oracle(),
        expected,
        RESOURCE if kind == AxisType.Auto or scattered else None,
    )


def test_a_replicated_weight_is_sliced_to_the_experts():
    """The rows are not gathered for it, nor is anything else."""
    lhs, rhs, sizes, *_ = grouped_data()
    mesh = mesh_of(AxisType.Explicit)
    placed = put(mesh, lhs, P(TOKENS)), put(mesh, rhs, P()), put(mesh, sizes, P(TOKENS))
    assert not crossing(jax.jit(grouped_gemm).lower(*placed).compile().as_text())


def test_axes_that_shard_no_work_are_named_once():
    """An axis over the rows, and one of a weight that shards nothing else; a resource's axes are no surprise."""
    lhs, rhs, sizes, *_ = grouped_data()
    mesh = mesh_of(AxisType.Explicit)
    tokens, sizes = P("fsdp"), put(mesh, sizes, P("fsdp"))
    rows = put(mesh, lhs, P("fsdp", "ep")), put(mesh, rhs, P()), sizes
    experts = put(mesh, lhs, tokens), put(mesh, rhs, P("tp")), sizes
    with pytest.warns(RuntimeWarning, match="grouped_gemm: axis 'ep' shards") as found:
        y = jax.jit(lambda *operands: (grouped_gemm(*operands), grouped_gemm(*operands)))(*rows)
    assert len(found) == 1
    assert relative_error(y[0], grouped_oracle()[0] - _bias_of_rows()) < 1e-6
    with pytest.warns(RuntimeWarning, match="grouped_gemm: axis 'tp' shards"):
        jax.jit(grouped_gemm).lower(*experts)
    with global_shard_guard(RESOURCE), warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(grouped_gemm).lower(*experts)


def _bias_of_rows():
    _, _, sizes, bias, _ = grouped_data()
    out = np.zeros((4, 10, 2, 12))
    for p in range(4):
        for row, g in enumerate(np.repeat([0, 1], sizes[p])):
            out[p, row] = bias[p % 2 * 2 + g]
    return out


@pytest.mark.parametrize(
    "spec, words",
    [
        (P("ep", "expert"), ["axis='expert'", "'fsdp', 'ep', 'tp'"]),
        (P("ep", "ep"), ["grouped_gemm", "['ep', 'ep']", "tuple such as ('ep', 'fsdp')"]),
        (P(*[None] * 4, "tp"), ["spec=(None, None, None, None, 'tp')", "ndim="]),
    ],
)
@pytest.mark.parametrize("name", ["w_spec", "x_spec", "out_spec"])
def test_specs_that_cannot_be(spec, words, name):
    lhs, rhs, sizes, *_ = grouped_data()
    mesh = mesh_of(AxisType.Auto)
    placed = put(mesh, lhs, P(TOKENS)), put(mesh, rhs, P()), put(mesh, sizes, P(TOKENS))
    with global_shard_guard(RESOURCE), pytest.raises(ValueError) as info:
        grouped_gemm(*placed, **{name: spec})
    assert all(word in str(info.value) for word in words)


def test_the_order_of_fsdp_and_ep_on_one_dimension_is_given():
    """ep Explicit, fsdp Auto, both on E: a tuple says which is major; without it there is an error that names both."""
    kinds = AxisType.Auto, AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=kinds)
    lhs, rhs, sizes, bias, dy = grouped_data()
    placed = put(mesh, lhs, P("ep")), put(mesh, rhs, P("ep")), put(mesh, sizes, P("ep"))

    def function(lhs, rhs, sizes, spec):
        return grouped_gemm(lhs, rhs, sizes, x_spec=P("ep"), w_spec=spec)

    with global_shard_guard(MeshResource(fsdp_resource="fsdp", ep_resource="ep")):
        with pytest.raises(ValueError, match=r"\['fsdp'\] in dimension 0.* over 'ep'.*tuple"):
            jax.jit(function, static_argnums=3)(*placed, P("fsdp"))
        y = jax.jit(function, static_argnums=3)(*placed, P(("ep", "fsdp")))
    assert relative_error(y, grouped_oracle()[0] - _bias_of_rows()) < 1e-6
