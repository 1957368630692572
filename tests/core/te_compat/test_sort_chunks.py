"""sort_chunks against slices that are put together again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from expertmesh.core import move_rows, plan_chunks, sort_chunks
from expertmesh.core.hlo import collectives

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax


def oracle(x, sizes, order):
    parts = np.split(x[: sum(sizes)], np.cumsum(sizes)[:-1])
    return np.concatenate([*(parts[c] for c in order), x[sum(sizes) :]])


def chunks(rng, num_rows, num_chunks, full=False):
    """Sizes that leave some rows over, some of them 0, and an order."""
    cuts = np.sort(rng.integers(0, num_rows + 1, num_chunks))
    sizes = np.diff(cuts, prepend=0)
    if full:
        sizes[-1] += num_rows - sizes.sum()
    return sizes.astype(np.int32), rng.permutation(num_chunks).astype(np.int32)


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([(0, 3), (1, 1), (31, 1), (31, 7), (64, 13)]),
    full=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "int8"]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients(size, full, dtype, seed):
    rng = np.random.default_rng(seed)
    sizes, order = chunks(rng, *size, full=full)
    x = jnp.asarray(rng.integers(-8, 8, (size[0], 3)), dtype)
    host = np.asarray(x, np.float32)
    out = sort_chunks(x, jnp.asarray(sizes), jnp.asarray(order))
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), oracle(host, sizes, order))
    plan = plan_chunks(jnp.asarray(sizes), jnp.asarray(order), num_rows=size[0])
    np.testing.assert_array_equal(move_rows(out, plan.inverse), x)
    if dtype == "float32":
        pull = jax.vjp(lambda x: sort_chunks(x, jnp.asarray(sizes), jnp.asarray(order)), x)[1]
        np.testing.assert_array_equal(pull(out)[0], x)  # orthogonal: the adjoint is the inverse


def test_groups_have_their_own_chunks():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 31, 3)).astype(np.float32)
    sizes, orders = map(np.stack, zip(*(chunks(rng, 31, 7) for _ in x), strict=True))
    got = sort_chunks(*map(jnp.asarray, (x, sizes, orders)))
    for p in range(4):
        np.testing.assert_array_equal(got[p], oracle(x[p], sizes[p], orders[p]))


def test_rows_that_do_not_exist_are_zeros_without_gradient():
    """Chunks of 4 and 8 rows in 10: the last two of the second don't exist."""
    x, sizes, order = jnp.ones((10, 2)), jnp.asarray([4, 8]), jnp.asarray([1, 0])
    out, pull = jax.vjp(lambda x: sort_chunks(x, sizes, order), x)
    assert out[:, 0].tolist() == [1] * 6 + [0, 0, 1, 1]
    assert pull(jnp.arange(20.0).reshape(10, 2))[0][:, 0].tolist() == [16, 18, 0, 0] + [
        0, 2, 4, 6, 8, 10,
    ]  # fmt: skip


def test_no_chunks_and_negative_sizes():
    x = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(
        sort_chunks(x, jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)), x
    )
    out = sort_chunks(x, jnp.asarray([-5, 1, 1]), jnp.asarray([2, 0, 1]))
    assert out[:, 0].tolist() == [2, 0, 4]


def test_nan_stays_in_its_row_and_adjoints_are_gathers():
    x, sizes, order = jnp.ones((9, 2)), jnp.asarray([2, 3]), jnp.asarray([1, 0])
    out = sort_chunks(x.at[0].set(jnp.nan), sizes, order)
    assert np.flatnonzero(np.isnan(out).any(axis=1)).tolist() == [3]
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(sort_chunks(x, sizes, order))))
    assert "scatter" not in str(jax.make_jaxpr(grad)(x))


@covering(
    "kind, layout",
    [AxisType.Auto, AxisType.Explicit],
    ["rows", "groups", "features"],
    covers=[
        (AxisType.Auto, "rows"),
        (AxisType.Explicit, "groups"),
        (AxisType.Explicit, "features"),
    ],
)
def test_sharding_changes_no_value(kind, layout):
    """Groups and features move nothing between devices; rows that are sharded are gathered."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    spec, few = {
        "rows": (PartitionSpec("a", "b"), PartitionSpec("a")),
        "groups": (PartitionSpec(("a", "b")), PartitionSpec(("a", "b"))),
        "features": (PartitionSpec("a", None, "b"), PartitionSpec("a")),
    }[layout]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 32, 8)).astype(np.float32)
    sizes, orders = map(np.stack, zip(*(chunks(rng, 32, 7) for _ in x), strict=True))

    def run(x, sizes, orders):
        out, pull = jax.vjp(lambda x: sort_chunks(x, sizes, orders), x)
        return out, *pull(out * out)

    placed = [
        jax.device_put(o, NamedSharding(mesh, s))
        for o, s in zip((x, sizes, orders), (spec, few, few), strict=True)
    ]
    compiled = jax.jit(run).lower(*placed).compile()
    out, dx = compiled(*placed)
    for p in range(8):
        want = oracle(x[p], sizes[p], orders[p])
        np.testing.assert_array_equal(np.asarray(out)[p], want)
    np.testing.assert_array_equal(dx, x * x)
    assert bool(collectives(compiled.as_text())) == (layout == "rows")


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x, s: sort_chunks(x, s * 1.0, s), TypeError, "split_sizes .* dtype=float32"),
        (lambda x, s: sort_chunks(x, s, s * 1.0), TypeError, "order .* dtype=float32"),
        (lambda x, s: sort_chunks(x, s, s[1:]), ValueError, r"order.shape=\(1,\)"),
        (lambda x, s: sort_chunks(x[0], s, s), ValueError, r"x.shape=\(2,\)"),
        (lambda x, s: sort_chunks(x[None], s, s), ValueError, r"x.shape=\(1, 5, 2\), map: \(5,\)"),
        (lambda x, s: plan_chunks(s, s, num_rows=2**31), ValueError, "num_rows=2147483648"),
        (lambda x, s: plan_chunks(s, s, num_rows=-1), ValueError, "num_rows=-1"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call(jnp.ones((5, 2)), jnp.asarray([1, 0]))
