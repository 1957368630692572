"""activate_dense is grouped_dense of the activation, to the bit, forward and backward."""

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
    grouped_dense,
)
from expertmesh.flax_moe.quantized_activation import activate_dense, activates_quantized

# gpt-oss: a clamp and an offset, by which zeros past the groups would not be zeros.
ACTIVATIONS = ["silu", Activation(function="quick_gelu", limit=7.0, up_offset=1.0)]

RECIPES = [Float8BlockScaling(), MXFP8BlockScaling()]


def _operands(dtype):
    rng = np.random.default_rng(0)
    sizes = np.array([[128, 0, 256]], np.int32)
    h = rng.normal(size=(1, 512, 2, 96)) * 2.0 ** rng.integers(-4, 5, size=(1, 512, 1, 1))
    h[:, sizes.sum() :] = np.nan  # must reach nothing
    kernel, dy = rng.normal(size=(3, 96, 64)) / 8, rng.normal(size=(1, 512, 64))
    return (*(jnp.asarray(x, dtype) for x in (h, kernel, dy)), jnp.asarray(sizes))


@covering(
    "recipe, activation",
    RECIPES,
    ACTIVATIONS,
    covers=[(RECIPES[1], ACTIVATIONS[1])],
)
def test_equals_the_two_layers(recipe, activation):
    h, kernel, dy, sizes = _operands("bfloat16")
    rest = {"activation": activation, "recipe": recipe}

    def one(h, kernel):
        return activate_dense(h, kernel, sizes, **rest)

    def two(h, kernel):
        return grouped_dense(activate(h, activation), kernel, sizes, recipe=recipe)

    def both(f):
        def run(h, kernel, dy):
            y, pull = jax.vjp(f, h, kernel)
            return f(h, kernel), y, pull(dy)

        return jax.tree.leaves(jax.jit(run)(h, kernel, dy))

    got, want = both(one), both(two)
    for x, y in zip(got, want, strict=True):
        live = slice(0, int(sizes.sum())) if x.shape[:2] == h.shape[:2] else slice(None)
        np.testing.assert_array_equal(*(np.asarray(a[:, live], np.float32) for a in (x, y)))


def test_what_it_takes():
    taken = [Float8BlockScaling(), MXFP8BlockScaling()]
    refused = [None, Float8CurrentScaling(), DelayedScaling(), NVFP4BlockScaling()]
    assert all(activates_quantized(recipe, "silu") for recipe in taken)
    assert not any(activates_quantized(recipe, "silu") for recipe in refused)
    assert not activates_quantized(taken[0], Activation(function="relu", gated=False))
