"""weight_rows against a loop; NaN in rows that hold no token reaches nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cases.contract import contract_tests
from expertmesh.core.testing import OpCase, magnitudes, relative_error
from expertmesh.flax_moe.weight_rows import weight_rows


def operands(rng, size, dtype):
    """8 participants; a third of the rows is padding, and the first participant has no token."""
    rows, D = {"regular": (24, 16), "odd": (29, 16), "empty": (0, 16)}[size]
    source = np.where(rng.random((8, rows)) < 0.3, -1, rng.integers(0, 9, (8, rows)))
    source[0] = -1
    y = magnitudes(rng, (8, rows, D), dtype)
    weights = rng.normal(size=(8, rows)).astype(np.float32)
    weights[:, ::3] = 0
    return y, weights, source.astype(np.int32)


def live_rows(source):
    """(participant, row) of every token."""
    return [(p, r) for p, r in np.ndindex(source.shape) if source[p, r] != -1]


def oracle(y, weights, source):
    out = np.zeros_like(y)
    for p, r in live_rows(source):
        out[p, r] = weights[p, r] * y[p, r]
    return out


def poison(y, weights, source):
    dead = np.ones(weights.shape, bool)
    for p, r in live_rows(source):
        dead[p, r] = False
    y, weights = y.copy(), weights.copy()
    y[dead], weights[dead] = np.nan, np.nan
    return y, weights, source


CASE = OpCase(
    name="weight_rows",
    function=weight_rows,
    operands=operands,
    oracle=oracle,
    wrt=(0, 1),
    layouts={
        "one": (P("b"),) * 3,
        "several": (P("a", None, "b"), P("a"), P("a")),
        "tuple": (P(("a", "b")),) * 3,
    },
    independent={"one": (P("b"),), "tuple": (P(("a", "b")),)},
    poison=poison,
)


test_covering_array, test_full_product = contract_tests(
    [CASE],
    mesh=((1, 1), (2, 4)),
    layout=("tuple",),
    transform=("grad", "poison"),
    dtype=("float32",),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_in_unused_rows_changes_no_bit(dtype):
    clean = operands(np.random.default_rng(0), "odd", dtype)

    def both(y, weights, source):
        out, vjp = jax.vjp(lambda y, w: weight_rows(y, w, source), y, weights)
        return out, vjp(jnp.ones_like(out))

    for a, b in zip(
        jax.tree.leaves(both(*map(jnp.asarray, clean))),
        jax.tree.leaves(both(*map(jnp.asarray, poison(*clean)))),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_gradients():
    """A weight of 0 has a gradient; the weights' gradient is of the unweighted row."""
    y, weights, source = operands(np.random.default_rng(1), "odd", "float32")
    g = np.random.default_rng(2).normal(size=y.shape).astype(np.float32)
    _, vjp = jax.vjp(lambda y, w: weight_rows(y, w, source), y, weights)
    d_y, d_weights = vjp(jnp.asarray(g))
    want_y, want_weights = np.zeros(y.shape), np.zeros(weights.shape)
    for p, r in live_rows(source):
        want_y[p, r] = weights[p, r] * g[p, r].astype(np.float64)
        want_weights[p, r] = g[p, r].astype(np.float64) @ y[p, r].astype(np.float64)
    assert relative_error(d_y, want_y) < 1e-6
    assert relative_error(d_weights, want_weights) < 1e-5
    zero = [pr for pr in live_rows(source) if weights[pr] == 0]
    assert zero and all(d_weights[pr] != 0 for pr in zero)


def test_bfloat16_weights_gradient_is_computed_in_float32():
    y, weights, source = operands(np.random.default_rng(3), "odd", "bfloat16")
    g = np.random.default_rng(4).normal(size=y.shape).astype(y.dtype)
    _, vjp = jax.vjp(lambda w: weight_rows(jnp.asarray(y), w, source), weights)
    want = np.zeros(weights.shape)
    for p, r in live_rows(source):
        want[p, r] = g[p, r].astype(np.float64) @ y[p, r].astype(np.float64)
    assert relative_error(vjp(jnp.asarray(g))[0], want) < 1e-6
