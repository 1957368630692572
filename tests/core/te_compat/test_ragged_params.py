"""Ragged all-to-all parameters against an exchange that is carried out with lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from expertmesh.core import (
    local_permute_after_a2a,
    local_unpermute_before_a2a,
    missing_rows,
    ragged_params,
)

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax


def exchange(inputs, params, num_rows):
    """What `jax.lax.ragged_all_to_all` does, on lists of rows; rows that nothing is sent to are None."""
    outputs = [[None] * num_rows for _ in inputs]
    for s, rows in enumerate(inputs):
        for r in range(len(inputs)):
            size, begin, to = (
                int(field[r])
                for field in (
                    params[s].send_sizes,
                    params[s].input_offsets,
                    params[s].output_offsets,
                )
            )
            assert size == int(params[r].recv_sizes[s])
            outputs[r][to : to + size] = rows[begin : begin + size]
        assert all(len(output) == num_rows for output in outputs)
    return outputs


def counts_of(rng, R, E, kind):
    counts = rng.integers(0, 5, (R, E))
    if kind == "zeros":
        counts *= rng.random((R, E)) < 0.4
    elif kind == "one":
        counts *= np.arange(E) == E - 1
    elif kind == "none":
        counts *= 0
    elif kind == "silent":  # a shard without rows
        counts[R // 2] = 0
    return counts.astype(np.int32)


@settings(max_examples=20, deadline=None)
@given(
    size=st.sampled_from([(1, 3), (2, 2), (3, 6), (4, 20)]),
    kind=st.sampled_from(["dense", "zeros", "one", "none", "silent"]),
    seed=st.integers(0, 1000),
)
def test_there_and_back_is_the_identity_on_all_rows(size, kind, seed):
    R, E = size
    counts, g = counts_of(np.random.default_rng(seed), R, E, kind), E // R
    # Row = (shard, expert, number), in the order of experts.
    inputs = [[(s, e, i) for e in range(E) for i in range(counts[s, e])] for s in range(R)]
    num_rows = 4 * R * E
    there = [ragged_params(jnp.asarray(counts), s) for s in range(R)]
    back = [ragged_params(jnp.asarray(counts), s, reverse=True) for s in range(R)]
    received = exchange(inputs, there, num_rows)
    for r in range(R):
        mine = range(r * g, (r + 1) * g)
        rows = [(s, e, i) for s in range(R) for e in mine for i in range(counts[s, e])]
        assert received[r] == rows + [None] * (num_rows - len(rows))
        assert int(there[r].recv_sizes.sum()) == len(rows)

        ids = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        order, group_sizes = local_permute_after_a2a(ids, jnp.asarray(counts), r)
        by_expert = [received[r][n] for n in order[:, 0].tolist()]
        want = [(s, e, i) for e in mine for s in range(R) for i in range(counts[s, e])]
        assert by_expert == want + [None] * (num_rows - len(want))
        assert group_sizes.tolist() == [counts[:, e].sum() for e in mine]
        undone = local_unpermute_before_a2a(order, jnp.asarray(counts), r)
        assert undone.tolist() == ids.tolist()
    returned = exchange(received, back, num_rows)
    for s in range(R):
        assert returned[s] == inputs[s] + [None] * (num_rows - len(inputs[s]))


def test_missing_rows():
    counts = jnp.asarray([[3, 1, 0, 2], [4, 0, 0, 0]])
    assert missing_rows(counts, num_rows=6).tolist() == [2, 0]
    assert missing_rows(counts, num_rows=8).tolist() == [0, 0]


def test_inside_shard_map_with_a_traced_shard():
    """Each shard's integers and rows, and the gradient, as outside."""
    R, E = 4, 8
    mesh = jax.make_mesh((R,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    counts = jnp.asarray(counts_of(np.random.default_rng(0), R, E, "zeros"))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(R * 40, 3)), jnp.float32)

    def local(x, counts):
        me = jax.lax.axis_index("ep")
        there, back = ragged_params(counts, me), ragged_params(counts, me, reverse=True)
        out, pull, sizes = jax.vjp(
            lambda x: local_permute_after_a2a(x, counts, me), x, has_aux=True
        )
        return jnp.stack([*there, *back]), out, *pull(out), sizes

    ep = PartitionSpec("ep")
    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(ep, PartitionSpec()),
        out_specs=(PartitionSpec(None, "ep"), ep, ep, ep),
    )
    ints, out, dx, sizes = jax.jit(function)(x, counts)
    for s in range(R):
        both = *ragged_params(counts, s), *ragged_params(counts, s, reverse=True)
        np.testing.assert_array_equal(ints[:, s * R : (s + 1) * R], jnp.stack(both))
        mine = slice(s * 40, (s + 1) * 40)
        want, want_sizes = local_permute_after_a2a(x[mine], counts, s)
        np.testing.assert_array_equal(out[mine], want)
        np.testing.assert_array_equal(sizes[s * 2 : s * 2 + 2], want_sizes)
    np.testing.assert_array_equal(dx, x)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda c, x: ragged_params(c * 1.0, 0), TypeError, "dtype=float32"),
        (lambda c, x: ragged_params(c[0], 0), ValueError, r"counts.shape=\(4,\)"),
        (lambda c, x: ragged_params(c[:, :3], 0, reverse=True), ValueError, r"shape=\(2, 3\)"),
        (lambda c, x: missing_rows(c[:, :3], num_rows=1), ValueError, r"shape=\(2, 3\)"),
        (lambda c, x: local_permute_after_a2a(x[None], c, 0), ValueError, r"shape=\(1, 5, 2\)"),
        (lambda c, x: local_unpermute_before_a2a(x, c[:, :3], 0), ValueError, r"shape=\(2, 3\)"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call(jnp.ones((2, 4), jnp.int32), jnp.ones((5, 2)))
