"""Permutation within shards (tests 24 and 25), by choices and by routing maps, in every mesh mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.covering import covering
from conformance.settings import (
    EACH_MODE,
    TOKENS,
    Setting,
    assert_close,
    compile_on_mesh,
    run_on_mesh,
)
from expertmesh.core import (
    move_values,
    padded_rows,
    padded_rows_sharded,
    permute,
    plan_permute,
    plan_permute_map,
    unpermute,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.testing import magnitudes

EXPERTS, TOKENS_PER_SHARD, WIDTH, ALIGNMENT = 6, 37, 5, 16
FORMS = ("choices", "map")
SINGLE = Setting("single")
each_form = pytest.mark.parametrize("form", FORMS)
# One form in each of three modes.
each_mode_and_form = covering(
    "setting, form",
    [SINGLE, *EACH_MODE],
    FORMS,
    covers=[(SINGLE, "map"), *zip(EACH_MODE[:2], FORMS, strict=False)],
)


def routing_maps(shards, seed=0):
    """bool[P, T, E]: no, some or all experts of a token; shards differ in how full they are."""
    rng = np.random.default_rng(seed)
    full = np.linspace(0.1, 0.9, shards).reshape(shards, 1, 1)
    return rng.random((shards, TOKENS_PER_SHARD, EXPERTS)) < full


def rows_of_shard(routed, alignment):
    """row[T, E], where each expert begins, and rows in use: a walk over experts and tokens."""
    row, begins, position = np.full(routed.shape, -1), [], 0
    for e in range(EXPERTS):
        begins.append(position)
        for t in np.flatnonzero(routed[:, e]):
            row[t, e] = position
            position += 1
        position += -position % alignment
    return row, np.array(begins), position


def plan_of(routed, form, alignment):
    if form == "map":
        return plan_permute_map(routed, alignment=alignment)
    choices = jnp.where(routed, jnp.arange(EXPERTS), -1)
    return plan_permute(choices, num_experts=EXPERTS, alignment=alignment)


def pipeline(routed, x, probs, scale, g, *, form, alignment):
    """unpermute(scale * permute(x), probs), its gradients, and the rows with their probabilities."""
    plan = plan_of(routed, form, alignment)

    def forward(x, probs):
        # No row may matter that holds no token: NaN there.
        rows = jnp.where(plan.source[..., None] < 0, jnp.nan, scale * permute(x, plan))
        return unpermute(rows, plan, probs)

    out, pull = jax.vjp(forward, x, probs)
    return dict(
        rows=permute(x, plan),
        row_probs=move_values(probs, plan),
        offsets=plan.group_offsets,
        raw=plan.tokens_per_expert,
        out=out,
        gradients=pull(g),
    )


def make(setting, seed=0):
    """Probabilities that sum to 1 over a token's experts, 0 on a few of them, NaN elsewhere."""
    shards = int(np.prod(setting.sizes))
    rng = np.random.default_rng(seed)
    routed = routing_maps(shards)
    probs = np.where(routed & (rng.random(routed.shape) < 0.9), rng.random(routed.shape), 0)
    probs = probs / np.maximum(probs.sum(axis=-1, keepdims=True), 1e-9)
    x = magnitudes(rng, (shards, TOKENS_PER_SHARD, WIDTH))
    rows = padded_rows(TOKENS_PER_SHARD * EXPERTS, EXPERTS, ALIGNMENT)
    scale = rng.normal(size=(shards, rows, 1)).astype(np.float32)
    g = rng.normal(size=x.shape).astype(np.float32)
    return routed, x, np.where(routed, probs, np.nan).astype(np.float32), scale, g


def run(setting, operands, form):
    specs = (TOKENS,) * len(operands)
    return run_on_mesh(setting, pipeline, operands, specs, form=form, alignment=ALIGNMENT)


@pytest.mark.any_device
@each_mode_and_form
def test_each_shard_permutes_its_own_tokens(setting, form):
    """Test 24. Rows, offsets and padding are those of the shard's tokens alone; over three axes at once."""
    routed, x, probs, scale, g = operands = make(setting)
    out, alignment = run(setting, operands, form), ALIGNMENT
    shards, rows = len(routed), scale.shape[1]
    assert shards * rows == padded_rows_sharded(
        TOKENS_PER_SHARD * EXPERTS, EXPERTS, shards, alignment
    )
    assert rows == (TOKENS_PER_SHARD * EXPERTS + EXPERTS * (alignment - 1)) // alignment * alignment
    for p in range(shards):
        row, begins, used = rows_of_shard(routed[p], alignment)
        want, want_probs = np.zeros((rows, WIDTH)), np.zeros(rows)
        want[row[routed[p]]] = x[p][np.nonzero(routed[p])[0]]
        want_probs[row[routed[p]]] = probs[p][routed[p]]
        np.testing.assert_array_equal(out["rows"][p], want)
        np.testing.assert_array_equal(out["row_probs"][p], want_probs)
        np.testing.assert_array_equal(out["offsets"][p], begins)
        np.testing.assert_array_equal(out["raw"][p], routed[p].sum(axis=0))
        assert not (begins % alignment).any() and used <= rows


@pytest.mark.any_device
@each_mode_and_form
@pytest.mark.parametrize("identity", [True, False])
def test_merging_probabilities_and_padding(setting, form, identity):
    """Test 25. Probabilities that sum to 1 give the tokens back; gradients are those of a dense einsum."""
    routed, x, probs, scale, g = make(setting)
    scale = np.ones_like(scale) if identity else scale
    out = run(setting, (routed, x, probs, scale, g), form)
    # dense[p, t, e]: the scale that token t meets in its row at expert e
    dense = np.zeros(routed.shape)
    for p in range(len(routed)):
        dense[p][routed[p]] = scale[p, rows_of_shard(routed[p], 16)[0][routed[p]], 0]
    x, g = x.astype(np.float64), g.astype(np.float64)
    probs = np.where(routed, probs, 0).astype(np.float64)
    assert_close(out["out"], np.einsum("pte,pte,ptd->ptd", probs, dense, x), 2e-6, "out")
    if identity:
        some = probs.sum(axis=-1, keepdims=True) > 0
        assert_close(out["out"], np.where(some, x, 0), 2e-6, "identity")
    d_x, d_probs = out["gradients"]
    assert_close(d_x, np.einsum("pte,pte,ptd->ptd", probs, dense, g), 2e-6, "d_x")
    assert_close(d_probs, np.einsum("pte,ptd,ptd->pte", dense, x, g), 2e-6, "d_probs")
    np.testing.assert_array_equal(d_probs[~routed], 0)
    assert (d_probs[routed & (probs == 0)] != 0).all(), "a probability of 0 has a gradient"


@pytest.mark.any_device
@each_form
def test_nan_and_inf_stay_in_their_token(form):
    """Test 25. Every other token's output and gradients keep their bits."""
    setting = SINGLE
    routed, x, probs, scale, g = make(setting)
    clean = run(setting, (routed, x, probs, scale, g), form)
    bad_x, bad_g = x.copy(), g.copy()
    bad_x[0, 2], bad_x[0, 5], bad_g[0, 9] = np.nan, np.inf, np.nan
    bad = run(setting, (routed, bad_x, probs, scale, bad_g), form)
    row = rows_of_shard(routed[0], 16)[0]
    others = np.setdiff1d(np.arange(scale.shape[1]), row[[2, 5]])
    np.testing.assert_array_equal(bad["rows"][0, others], clean["rows"][0, others])
    assert np.isnan(bad["rows"][0, row[2][routed[0, 2]]]).all()
    assert np.isinf(bad["rows"][0, row[5][routed[0, 5]]]).all()
    for name, touched in [("out", [2, 5]), ("gradients", [2, 5, 9])]:
        for a, b in zip(jax.tree.leaves(bad[name]), jax.tree.leaves(clean[name]), strict=True):
            a, b = (np.delete(leaf[0], touched, axis=0) for leaf in (a, b))
            np.testing.assert_array_equal(a, b, err_msg=name)


@each_mode_and_form
def test_no_collective(setting, form):
    """Shards permute on their own, forward and backward (X-11)."""
    operands = make(setting)
    program = compile_on_mesh(
        setting, pipeline, operands, (TOKENS,) * 5, form=form, alignment=ALIGNMENT
    )
    assert not collectives(program.as_text())
