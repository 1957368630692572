"""Routing maps: layout of both formats, round trips, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import ROUTING_MAP_FORMATS, from_routing_map, to_routing_map

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax


def some_choices(num_experts, top_k, dtype=np.int32):
    """Distinct within a token, ascending, some not routed (at the end)."""
    rng = np.random.default_rng(num_experts)
    rows = []
    for count in rng.integers(0, top_k + 1, size=21):
        chosen = np.sort(rng.permutation(num_experts)[:count])
        rows.append([*chosen, *[-1] * (top_k - count)])
    return np.array(rows, dtype).reshape(3, 7, top_k)


@pytest.mark.parametrize("num_experts", [1, 7, 8, 9, 64, 130])
@pytest.mark.parametrize("format", ROUTING_MAP_FORMATS)
def test_layout_and_round_trip(num_experts, format):
    """Bit e % 8 of byte e // 8; unused bits are 0."""
    top_k = min(3, num_experts)
    topk_idx = some_choices(num_experts, top_k)
    got = np.asarray(to_routing_map(jnp.asarray(topk_idx), num_experts, format))
    width = num_experts if format == "bytemap" else (num_experts + 7) // 8
    want = np.zeros((3, 7, width), bool if format == "bytemap" else np.uint8)
    for b, t, k in np.ndindex(*topk_idx.shape):
        e = topk_idx[b, t, k]
        if e >= 0 and format == "bytemap":
            want[b, t, e] = True
        elif e >= 0:
            want[b, t, e // 8] += 2 ** (e % 8)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    back = from_routing_map(jnp.asarray(got), num_experts, top_k, format)
    assert back.dtype == jnp.int32
    np.testing.assert_array_equal(back, topk_idx)


def test_integers_are_flags():
    """uint8 in a bytemap is one expert a byte, whatever its bits."""
    flags = jnp.array([[0, 255, 0, 2], [0, 0, 0, 0]], jnp.uint8)
    np.testing.assert_array_equal(from_routing_map(flags, 4, 3), [[1, 3, -1], [-1, -1, -1]])


def test_out_of_range_and_repeated_choices():
    topk_idx = jnp.array([[2, 2, -1], [-5, 4, 300]], jnp.int32)
    want = [[False, False, True, False], [False] * 4]
    np.testing.assert_array_equal(to_routing_map(topk_idx, 4), want)


def test_narrow_indices_and_many_experts():
    got = to_routing_map(jnp.array([[-1, 3]], jnp.int8), 300)
    np.testing.assert_array_equal(np.flatnonzero(got), [3])


def test_wide_indices_are_not_cut():
    """2^32 + 3 is 3 in int32."""
    with jax.enable_x64(True):
        got = to_routing_map(jnp.asarray([[2**32 + 3, 1]], jnp.int64), 4)
    assert got.tolist() == [[False, True, False, False]]


def test_more_experts_than_choices_and_unused_bits():
    np.testing.assert_array_equal(from_routing_map(jnp.array([True] * 4), 4, 2), [0, 1])
    full = jnp.array([0xFF], jnp.uint8)
    np.testing.assert_array_equal(from_routing_map(full, 3, 3, "bitmap"), [0, 1, 2])


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: to_routing_map(jnp.zeros((2, 2), int), 4, "csr"), ValueError, ["'csr'", "bitmap"]),
        (lambda: to_routing_map(jnp.zeros((2, 2)), 4), TypeError, ["topk_idx", "float32"]),
        (lambda: to_routing_map(jnp.zeros((), int), 4), ValueError, ["()", "[..., K]"]),
        (
            lambda: from_routing_map(jnp.zeros((2, 4)), 4, 1),
            TypeError,
            ["routing_map", "bools or integers", "float32"],
        ),
        (lambda: from_routing_map(jnp.zeros((2, 4), bool), 4, 1, "bits"), ValueError, ["'bits'"]),
        (lambda: from_routing_map(jnp.zeros((2, 5), bool), 4, 1), ValueError, ["(2, 5)", "4"]),
        (lambda: from_routing_map(jnp.zeros((2, 4), bool), 4, 5), ValueError, ["top_k=5"]),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as info:
        call()
    assert all(word in str(info.value) for word in ["routing_map", *words]), str(info.value)
