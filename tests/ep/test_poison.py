"""Nothing reads what no token wrote: NaN in every unused slot of every buffer changes no bit, forward and backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cases.covering import covering
from ep.exchange_case import Case
from ep.exchange_oracle import routing
from ep.ragged_stand_in import ragged_all_to_all
from expertmesh.ep import combine, dispatch, dispatch_weights, prepare
from expertmesh.ep.route import Route
from expertmesh.ep.transports import BY_NAME, blocks

FILLS = (0.0, np.nan, np.inf)
CASE = Case(E=16, A=4, C=16)
EP = PartitionSpec("ep")


@jax.custom_vjp
def fill_unused(x, live, fill):
    """`fill` in the unused slots of a buffer, and in those of its cotangent."""
    return jnp.where(live, x, fill.astype(x.dtype))


fill_unused.defvjp(
    lambda x, live, fill: (fill_unused(x, live, fill), (live, fill)),
    lambda kept, g: (jnp.where(kept[0], g, kept[1].astype(g.dtype)), None, None),
)


def step(topk, x, weights, g, fill, config):
    """An expert that works on rows one by one, and whose every buffer is poisoned."""

    def forward(x, weights):
        handle = prepare(topk, config)
        live = handle.source >= 0
        rows = fill_unused(dispatch(handle, x), live[..., None], fill)
        rows = fill_unused(jnp.sin(rows), live[..., None], fill)
        weight = fill_unused(dispatch_weights(handle, weights), live, fill)
        rows = fill_unused(rows * weight[..., None].astype(rows.dtype), live[..., None], fill)
        return combine(handle, rows)

    out, pull = jax.vjp(forward, x, weights)
    return out, *pull(g)


@covering(
    "transport, dtype",
    ["ring", "all_to_all"],
    ["float32", "bfloat16"],
    covers=[("ring", "float32"), ("all_to_all", "bfloat16")],
)
def test_buffers_between_ops(transport, dtype):
    rng = np.random.default_rng(0)
    topk = routing("holes", 40, 3, 16)
    assert sum(CASE.oracle(topk).dropped) > 0  # dropped choices have no slot either
    weights = rng.normal(size=topk.shape).astype(np.float32)
    weights[(topk < 0) | (topk >= 16)] = np.nan  # nor have these
    x, g = (jnp.asarray(rng.normal(size=(40, 6)), dtype) for _ in range(2))
    config = Case(E=16, A=4, C=16, transport=transport).config
    mesh = jax.make_mesh((8,), ("ep",))
    place = partial(jax.device_put, device=NamedSharding(mesh, EP))
    run = jax.jit(partial(step, config=config))
    operands = [place(a) for a in (topk, x, weights, g)]
    clean, *poisoned = ([np.asarray(a) for a in run(*operands, jnp.float32(f))] for f in FILLS)
    assert all(np.isfinite(a.astype(np.float32)).all() and a.any() for a in clean)
    for outs in poisoned:
        for a, b in zip(clean, outs, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def poison_blocks(monkeypatch, fill):
    """What a sender leaves empty in its blocks, every receiver gets."""

    def poisoned(pack, members, x, route, size):
        out = pack(x, route, size)
        count_R = jnp.sum(members(route, size), axis=1)
        filled_RB = jnp.arange(len(out) // size) < count_R[:, None]
        return jnp.where(filled_RB.reshape(-1, 1), out, fill)

    for pack, members in [
        (blocks.blocks_of_tokens, blocks.sent),
        (blocks.blocks_of_sums, blocks.received),
    ]:
        monkeypatch.setattr(blocks, pack.__name__, partial(poisoned, pack, members))


@covering("name", ["local", "ring", "all_to_all", "ragged"], covers=["ragged"])
def test_buffers_inside_a_transport(name, monkeypatch):
    """Each transport's two functions are each other's transposes: together they are the forward and the backward."""
    transport, size = BY_NAME[name], 1 if name == "local" else 4
    case = Case(mesh=(("ep", size),), sizes=(24,), E=8, A=4, C=12)
    topk = routing("holes", 24, 3, 8)
    oracle = case.oracle(topk)
    assert sum(oracle.dropped) > 0
    mesh = jax.make_mesh((size,), ("ep",), devices=jax.devices()[:size])
    place = partial(jax.device_put, device=NamedSharding(mesh, EP))
    handle = jax.jit(partial(prepare, config=case.config))(place(topk))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 5)), rng.normal(size=(oracle.P, oracle.C, 5))

    def both(slot, source, row, x, y):
        route = Route(slot, source[0], row[0])
        rows = transport.dispatch(x, route, axis=("ep",))
        return rows[None], transport.combine(y[0], route, axis=("ep",))

    def ragged_into(fill, operand, output, *params, axis_name):
        return ragged_all_to_all(operand, jnp.full_like(output, fill), *params, axis_name=axis_name)

    results = []
    for fill in FILLS:
        y[oracle.source() < 0] = fill
        monkeypatch.undo()
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", partial(ragged_into, fill))
        poison_blocks(monkeypatch, fill)
        run = jax.jit(
            jax.shard_map(
                lambda *operands: both(*operands),  # another function: traced again
                mesh=mesh,
                in_specs=(EP,) * 5,
                out_specs=(EP, EP),
                check_vma=False,
            )
        )
        operands = (place(np.float32(x)), place(np.float32(y)))
        results.append([np.asarray(a) for a in run(*handle.maps, *operands)])
    want = oracle.dispatch(np.float32(x)), oracle.combine(np.where(np.isnan(y), 0, y))
    for rows, tokens in results:
        np.testing.assert_array_equal(rows.view(np.uint8), results[0][0].view(np.uint8))
        np.testing.assert_array_equal(tokens.view(np.uint8), results[0][1].view(np.uint8))
    np.testing.assert_array_equal(results[0][0], want[0])
    np.testing.assert_allclose(results[0][1], want[1], rtol=1e-5, atol=1e-6)
