"""What the exchanges move between devices, by the text of compiled programs (tests 9 and 11)."""

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
from expertmesh.core import hlo
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
    down, up = TRANSPORTS[setting.transport](setting.num_ranks)
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
