"""dispatched_experts is dispatched_dense, the activation and grouped_dense, to the bit, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np

from cases.covering import covering
from expertmesh.core import (
    Activation,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    activate,
    alignment_of,
    grouped_dense,
)
from expertmesh.ep import EpConfig, prepare
from expertmesh.flax_moe.quantized_dispatch import dispatch_quantized, dispatched_dense
from expertmesh.flax_moe.quantized_experts import dispatched_experts, takes_experts

# gpt-oss: a clamp and an offset, by which zeros past the groups would not be zeros.
ACTIVATIONS = ["silu", Activation(function="quick_gelu", limit=7.0, up_offset=1.0)]

RECIPES = [Float8BlockScaling(), MXFP8BlockScaling()]
E, K, T, D, F = 4, 2, 96, 64, 96


def _operands():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(T, D)) * 2.0 ** rng.integers(-4, 5, size=(T, 1))
    wi, wo = rng.normal(size=(E, D, 2, F)) / 4, rng.normal(size=(E, F, D)) / 8
    # The last expert has no rows.
    idx = np.argsort(rng.random((T, E - 1)), axis=1)[:, :K].astype(np.int32)
    return (*(jnp.asarray(a, "bfloat16") for a in (x, wi, wo)), jnp.asarray(idx))


@covering(
    "recipe, activation, quantize_combine",
    RECIPES,
    ACTIVATIONS,
    [False, True],
    covers=[(RECIPES[1], ACTIVATIONS[1], False), (RECIPES[0], ACTIVATIONS[0], True)],
)
def test_equals_the_layers_one_by_one(recipe, activation, quantize_combine):
    *operands, idx = _operands()
    config = EpConfig(num_experts=E, alignment=alignment_of(recipe))

    def dispatched(x):
        handle = prepare(idx, config)
        options = dict(recipe=recipe, quantize_combine=quantize_combine)
        return handle.group_sizes, *dispatch_quantized(handle, x, **options)

    def at_once(x, wi, wo):
        sizes, *rows = dispatched(x)
        return dispatched_experts(*rows, wi, wo, sizes, activation=activation, recipe=recipe)

    def one_by_one(x, wi, wo):
        sizes, *rows = dispatched(x)
        a = activate(dispatched_dense(*rows, wi, sizes, recipe=recipe), activation)
        return grouped_dense(a, wo, sizes, recipe=recipe)

    def both(function):
        def run(*operands):
            y, pull = jax.vjp(function, *operands)
            # A cotangent of rows that differ, and of rows that are none's.
            dy = jnp.asarray(np.random.default_rng(1).normal(size=y.shape), y.dtype)
            return function(*operands), y, pull(dy)

        return jax.tree.leaves(jax.jit(run)(*operands))

    got, want = both(at_once), both(one_by_one)
    assert len(got) == 5 and all(np.any(np.asarray(x)) for x in want)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_what_it_takes():
    refused = [None, Float8CurrentScaling(), DelayedScaling(), NVFP4BlockScaling()]
    assert all(takes_experts(recipe, "silu") for recipe in RECIPES)
    assert not any(takes_experts(recipe, "silu") for recipe in refused)
    assert not takes_experts(RECIPES[0], Activation(function="relu", gated=False))
