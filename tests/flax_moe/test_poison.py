"""The block reads no row that holds nothing: NaN in all such rows of all buffers changes no bit of what it returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.covering import full
from expertmesh.core import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, op
from expertmesh.ep import recv_capacity
from expertmesh.flax_moe import init_quant_state, moe
from flax_moe.moe_oracle import EXPLICIT, make_config, make_data, make_mesh, place

TOKENS, TOP_K, EXPERTS, RANKS = 24, 2, 4, 2


def fill_unused(monkeypatch, capacity, live, fill):
    """Fills the rows from `live` on of whatever an op gives; only receive buffers have `capacity` rows.

    Forward and backward, and what devices exchange, are ops: these are all the buffers. Returns the names of the ops.
    """
    monkeypatch.undo()
    real, filled = op._local, []

    def poisoned(x):
        if capacity not in x.shape or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.shape.index(capacity))
        # Behind a barrier, so that the compiler makes the same program of every fill.
        return jnp.where(rows < live, x, jax.lax.optimization_barrier(jnp.asarray(fill, x.dtype)))

    def local(call, operands, overrides=()):
        out = real(call, operands, overrides)
        if any(capacity in x.shape for x in jax.tree.leaves(out)):
            filled.append(call.op.name)
        return jax.tree.map(poisoned, out)

    monkeypatch.setattr(op, "_local", local)
    jax.clear_caches()
    return filled


@pytest.mark.parametrize(
    "options",
    [
        dict(use_bias=False),
        full(dict(shared_expert_dim=8)),
        full(dict(use_bias=False, alignment=8, activation="relu")),
        full(dict(use_bias=False, remat="recompute")),
        full(dict(recipe=MXFP8BlockScaling())),
        full(dict(recipe=Float8BlockScaling(), use_bias=False, quantize_backward_combine=True)),
        full(dict(recipe=DelayedScaling(), use_bias=False)),
    ],
    ids=["plain", "biases", "aligned", "recompute", "mx", "blocks", "delayed"],
)
def test_rows_that_hold_nothing(options, monkeypatch, request):
    request.addfinalizer(
        jax.clear_caches
    )  # after the monkeypatch is undone, no poisoned program is left
    config = make_config(num_experts=EXPERTS, top_k=TOP_K, expert_dim=32, **options)
    data = make_data(config, (TOKENS, 10 if config.recipe is None else 32))
    # As many choices for each expert, so that each rank's buffers are filled as far.
    idx = np.arange(TOKENS * TOP_K, dtype=np.int32).reshape(TOKENS, TOP_K) % EXPERTS
    params, x, dy = place(data, config, make_mesh((1, RANKS), EXPLICIT))
    idx = jax.device_put(idx, x.sharding)
    state = init_quant_state(config) if isinstance(config.recipe, DelayedScaling) else None

    def step(params, x, dy):
        out, pull = jax.vjp(
            lambda *of: moe(*of, config, topk_idx=idx, quant_state=state).y, params, x
        )
        return out, pull(dy)

    alignment = config.row_alignment
    capacity = recv_capacity(EXPERTS, TOP_K, TOKENS // RANKS, RANKS, alignment)
    of_each = -(-TOKENS * TOP_K // EXPERTS // alignment) * alignment
    live = EXPERTS // RANKS * of_each
    results = []
    for fill in (0.0, np.nan):
        filled = fill_unused(monkeypatch, capacity, live, fill)
        results.append(jax.tree.map(np.asarray, jax.jit(step)(params, x, dy)))
        assert {"ep_dispatch_values"} < set(filled)
    for clean, poisoned in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.isfinite(clean).all() and clean.any()
        np.testing.assert_array_equal(clean.view(np.uint8), poisoned.view(np.uint8))
