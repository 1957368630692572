"""What crosses devices, by the text of compiled programs (tests 9 and 11, F-05, and the grouped GEMM's part of 20)."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import full
from conformance.settings import (
    EACH_MODE,
    MORE,
    TOKENS,
    TRANSPORTS,
    compile_on_mesh,
    parametrize,
    place,
)
from ep.exchange_oracle import routing
from expertmesh.core import gemm, grouped_gemm, hlo
from expertmesh.ep import EpConfig, combine, dispatch, dispatch_weights, prepare

NUM_EXPERTS, TOP_K, WIDTH = 16, 2, 4


def moved(compiled) -> dict[str, int]:
    return dict(collections.Counter(found.kind for found in hlo.collectives(compiled.as_text())))


def added(*counts) -> dict[str, int]:
    return dict(sum(map(collections.Counter, counts), collections.Counter()))


def forward(handle, x):
    return combine(handle, dispatch(handle, x)), dispatch(handle, x)


def backward(handle, x, rows):
    """The two transposes; what they transpose is linear, so nothing else runs."""
    d_x = jax.vjp(functools.partial(dispatch, handle), x)[1](rows)[0]
    return d_x, jax.vjp(functools.partial(combine, handle), rows)[1](x)[0]


def weights_and_back(handle, weights):
    rows, pull = jax.vjp(functools.partial(dispatch_weights, handle), weights)
    return rows, pull(rows)[0]


@parametrize(EACH_MODE[1:2], EACH_MODE[:1] + EACH_MODE[2:3] + MORE[:-1])
def test_exchanges_move_what_their_transport_says(setting):
    """Test 9. Forward and backward, and no reshard: rows and tokens lie over all axes of the participants."""
    if setting.num_ranks == 1 and jax.default_backend() == "gpu":
        pytest.skip("XLA:GPU leaves out collectives over one rank")
    num_tokens = 8 * int(np.prod(setting.sizes))
    idx = routing("uniform", num_tokens, TOP_K, NUM_EXPERTS)
    config = setting.config(NUM_EXPERTS)
    make = compile_on_mesh(setting, prepare, (idx,), (TOKENS,), config=config)
    assert moved(make) == {"all-gather": 1}
    handle = make(*place(setting, (idx,), (TOKENS,)))
    maps, tree = jax.tree.flatten(handle)
    maps = tuple(map(np.asarray, maps))

    def check(function, operands, want):
        def of_arrays(*arrays):
            handle = jax.tree.unflatten(tree, arrays[: len(maps)])
            return function(handle, *arrays[len(maps) :])

        operands = maps + operands
        compiled = compile_on_mesh(setting, of_arrays, operands, (TOKENS,) * len(operands))
        assert moved(compiled) == want
        each = NamedSharding(setting.mesh, TOKENS)
        assert all(s.is_equivalent_to(each, 2) for s in compiled.output_shardings)

    rows = np.ones((*handle.source.shape, WIDTH), setting.dtype)
    tokens, weights = np.ones((num_tokens, WIDTH), setting.dtype), np.ones(idx.shape, np.float32)
    down, up = TRANSPORTS[setting.transport]
    check(forward, (tokens,), added(down, up))
    check(backward, (tokens, rows), added(down, up))
    check(weights_and_back, (weights,), {"all-gather": 1, "reduce-scatter": 1})


@pytest.mark.parametrize(
    "names, sizes, groups",
    [
        full(("ep", "tp"), (4, 2), {(0, 2, 4, 6), (1, 3, 5, 7)}),
        full(("tp", "ep"), (2, 4), {(0, 1, 2, 3), (4, 5, 6, 7)}),
        (("ep", "dp"), (2, 4), {(0, 4), (1, 5), (2, 6), (3, 7)}),
    ],
)
def test_groups_are_lines_of_the_mesh(names, sizes, groups):
    """Test 11. One EP group for each coordinate of the other axes, wherever the EP axis stands."""
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * 2)
    tokens = PartitionSpec(tuple(n for n in names if n in ("dp", "ep")))
    idx = jax.device_put(routing("uniform", 16, 2, 8), NamedSharding(mesh, tokens))
    x = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, tokens))
    config = EpConfig(num_experts=8, axis="ep", transport="ring")

    def round_trip(idx, x):
        handle = prepare(idx, config)
        return combine(handle, dispatch(handle, x))

    text = jax.jit(round_trip).lower(idx, x).compile().as_text()
    found = hlo.collectives(text)
    assert len(found) == 3 and all(set(collective.groups) == groups for collective in found)


BOTH = ("fsdp", "ep")


def put(mesh, shape, *spec):
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec(*spec)))


def step(function, *operands):
    """Result and gradients; the last operand is the cotangent."""
    out, pull = jax.vjp(function, *operands[:-1])
    return out, *pull(operands[-1])


def crossing(function, *operands):
    """(kind, shapes) of all that moves; every gradient must lie where its primal does."""
    wanted = tuple(x.sharding for x in (operands[-1], *operands[:-1]))
    # Over Auto axes nothing but a consumer says where results are wanted.
    auto = AxisType.Auto in wanted[0].mesh.axis_types
    options = dict(out_shardings=wanted) if auto else {}
    compiled = jax.jit(functools.partial(step, function), **options).lower(*operands).compile()
    for got, want, x in zip(
        compiled.output_shardings, wanted, (operands[-1], *operands), strict=False
    ):
        assert got.is_equivalent_to(want, x.ndim)
    return hlo.collectives(compiled.as_text())


def kinds_and_shapes(found):
    return sorted((c.kind, shape) for c in found for shape in c.shapes)


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize(
    "weight, kind",
    [(("fsdp",), EXPLICIT), ((BOTH,), AUTO), ((None, BOTH), EXPLICIT), (("ep", "fsdp"), AUTO)],
    ids=str,
)
def test_dense_gathers_the_weight_only(weight, kind):
    """F-05. Activations over ('fsdp', 'ep') stay where they are, forward and backward."""
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(kind,) * 2)
    x, dy = put(mesh, (8, 3, 16), BOTH), put(mesh, (8, 3, 24), BOTH)
    found = crossing(gemm, x, put(mesh, (16, 24), *weight), dy)
    assert {c.kind for c in found} <= {"all-gather", "all-reduce", "reduce-scatter"} and found
    assert all("3," not in shape for c in found for shape in c.shapes), kinds_and_shapes(found)


@pytest.mark.parametrize(
    "weight, gathered, scattered",
    [
        full(("ep",), [], []),
        (("ep", "fsdp"), ["f32[4,16,24]"], ["f32[4,8,24]"]),
        (("ep", None, "fsdp"), ["f32[4,16,24]"], ["f32[4,16,12]"]),
    ],
    ids=str,
)
def test_grouped_weights_are_gathered_over_fsdp(weight, gathered, scattered):
    """Test 20. Experts stay on their EP rank; fsdp is gathered for use, and gradients summed over it, not ep."""
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(AxisType.Explicit,) * 2)
    lhs, dy = put(mesh, (8, 10, 16), BOTH), put(mesh, (8, 10, 24), BOTH)
    sizes = put(mesh, (8, 4), BOTH).astype(jnp.int32)
    bias, w = put(mesh, (16, 24), "ep"), put(mesh, (16, 16, 24), *weight)
    grouped = lambda lhs, w, bias: grouped_gemm(lhs, w, sizes, bias)  # noqa: E731
    found = crossing(grouped, lhs, w, bias, dy)
    want = [("all-reduce", "f32[4,24]")] + [("all-gather", s) for s in gathered]
    want += [("reduce-scatter", s) for s in scattered]
    want += [("all-reduce", "f32[4,16,24]")] * (not scattered)
    assert kinds_and_shapes(found) == sorted(want)
    assert {c.groups for c in found} == {((0, 4), (1, 5), (2, 6), (3, 7))}
