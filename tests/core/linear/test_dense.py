"""dense against a float64 emulation of each recipe; what it keeps for the backward; cache, state, key; errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from cases.covering import covering
from core.linear import dense_oracle
from expertmesh.core import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    as_recipe,
    autocast,
    dense,
    gemm,
    init_dense_state,
    quantize,
    quantize_weight,
)
from expertmesh.core.testing import magnitudes, relative_error

RECIPES = {
    "tensors": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(fp8_format=Format.HYBRID, power_2_scale=False),
    "mx": MXFP8BlockScaling(),
    "four bits": NVFP4BlockScaling(),
}
KEY = jax.random.key(5)


@functools.cache
def data():
    """128 does not divide 160: the last blocks are partial."""
    rng = np.random.default_rng(0)
    x, weight = magnitudes(rng, (2, 160, 160)), magnitudes(rng, (160, 2, 160))
    bias, dy = rng.normal(size=(2, 160)), magnitudes(rng, (2, 160, 2, 160))
    return tuple(np.asarray(a, np.float32) for a in (x, weight, bias, dy))


def value_and_gradients(x, weight, bias, dy, **options):
    y, pull = jax.vjp(lambda *floats: dense(*floats, **options), x, weight, bias)
    return y, *pull(dy)


@covering("name", ["blocks", "four bits"], covers=[])
def test_equals_an_emulation_in_float64(name):
    """The other recipes: test_grouped_dense."""
    recipe, keys = RECIPES[name], jax.random.split(KEY)

    @jax.jit
    def both(x, weight, bias, dy):
        got = value_and_gradients(x, weight, bias, dy, recipe=recipe, key=KEY)
        return got, dense_oracle.dense_copies(x, weight, dy, recipe, keys)

    x, weight, bias, dy = data()
    got, copies = both(x, weight, bias, dy)
    for result, want in zip(got, dense_oracle.dense(copies, dy, bias), strict=True):
        assert relative_error(result, want) < 2e-6
    plain = gemm(x, weight, bias)
    assert 0.01 < relative_error(got[0], plain) < (0.3 if name == "four bits" else 0.06)


def test_delayed_scaling_quantizes_by_the_steps_before():
    """State in, state out; the cotangent has a scale of its own."""
    recipe = DelayedScaling(amax_history_len=3)
    x, weight, bias, dy = data()

    @jax.jit
    def step(state, scale):
        def layer(x, weight):
            return dense(x, weight, bias, recipe=recipe, state=state)

        (y, after), pull = jax.vjp(layer, x * scale, weight)
        return y, after, *pull((dy, jax.tree.map(jnp.zeros_like, after)))

    first, second = jnp.float32(1), jnp.float32(1 / 2)
    y, state, *_ = step(init_dense_state(recipe), first)
    multipliers = [448 / np.abs(a).max() for a in (x, weight)]
    np.testing.assert_allclose(
        [state.x.multiplier, state.weight.multiplier], multipliers, rtol=1e-6
    )
    y, after, dx, dkernel = step(state, second)
    forward, backward = recipe.formats().x, recipe.formats().grad_dgrad
    q_x, q_w = (
        dense_oracle.values(quantize(a, forward, multiplier=one.multiplier))
        for a, one in ((x / 2, state.x), (weight, state.weight))
    )
    q_dy = dense_oracle.values(quantize(dy, backward))
    assert relative_error(y, np.einsum("tsk,kcn->tscn", q_x, q_w) + bias) < 2e-6
    assert relative_error(dx, np.einsum("tscn,kcn->tsk", q_dy, q_w)) < 2e-6
    assert relative_error(dkernel, np.einsum("tsk,tscn->kcn", q_x, q_dy)) < 2e-6
    np.testing.assert_array_equal(after.x.multiplier, state.x.multiplier)  # the largest of both


@pytest.mark.parametrize("recipe", [None, "fp8_current"])
def test_contracting_dims(recipe):
    """Negative ones, several, one token; dtypes of results and gradients."""
    x, weight, *_ = data()
    x, weight = jnp.asarray(x[:, :32], jnp.bfloat16), weight[:, 0]
    split, dims = (x.reshape(2, 32, 5, 32), weight.reshape(5, 32, 160)), ((-2, -1), (0, 1))

    @jax.jit
    def layers(x, weight, split):
        return [
            dense(x, weight, recipe=recipe),
            dense(x, weight, recipe=recipe, contracting_dims=((2,), (-2,))),
            dense(*split, recipe=recipe, contracting_dims=dims),
        ]

    y, *others = layers(x, weight, split)
    for other in others:
        np.testing.assert_array_equal(other, y)
    layer = functools.partial(dense, recipe=recipe)
    assert jax.eval_shape(layer, x[0, 0], weight).shape == (160,)
    wide = jax.eval_shape(functools.partial(layer, out_dtype="float32"), x, weight)
    assert (y.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    gradients = jax.eval_shape(
        jax.grad(lambda *a: layer(*a, contracting_dims=dims).astype(jnp.float32).sum(), (0, 1)),
        *split,
    )
    assert [(g.shape, g.dtype) for g in gradients] == [(a.shape, a.dtype) for a in split]


def test_the_recipe_in_context_and_the_layers_own():
    x, weight, *_ = data()
    x, weight = x[0, :32], weight[:, 0]
    by_itself = {name: dense(x, weight, recipe=RECIPES[name]) for name in ("mx", "tensors")}
    with autocast(RECIPES["mx"]):
        np.testing.assert_array_equal(dense(x, weight), by_itself["mx"])
        own = dense(x, weight, recipe=RECIPES["tensors"])
        np.testing.assert_array_equal(own, by_itself["tensors"])
        with autocast(None):
            np.testing.assert_array_equal(dense(x, weight), gemm(x, weight))


def kept(layer, *operands):
    """(dtype, shape) of all that the backward of a layer reads."""
    residuals = jax.eval_shape(lambda *a: jax.vjp(layer, *a)[1], *operands)
    return [(x.dtype.name, x.shape) for x in jax.tree.leaves(residuals)]


@pytest.mark.parametrize("name", RECIPES)
def test_residuals_are_quantized(name):
    """Data and scales of x along the tokens and of the weight along N: nothing of 16 or 32 bits and their size.

    What Hopper's GEMMs read along the tokens has its features first.
    """
    x, weight, bias, _ = data()
    x = jnp.asarray(x, jnp.bfloat16)
    found = kept(lambda *a: dense(*a, recipe=RECIPES[name], key=KEY), x, weight, bias)
    large = sorted(entry for entry in found if np.prod(entry[1]) > 2 * 160 * 10)
    dtype = "float4_e2m1fn" if name == "four bits" else "float8_e4m3fn"
    of_x = x.shape if name in ("mx", "four bits") else (x.shape[-1], *x.shape[:-1])
    assert large == sorted([(dtype, of_x), (dtype, weight.shape)])


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from equations(sub)


def quantized(jaxpr, shape):
    """How often a jaxpr makes 8-bit data of a shape."""
    calls = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "custom_partitioning"]
    makes = [[v.aval.dtype.itemsize for v in eqn.outvars if v.aval.shape == shape] for eqn in calls]
    return sum(1 in sizes for sizes in makes)


def again(loss, x, weight):
    """How often the backward of a checkpointed loss quantizes something of the shape of x."""
    jaxpr = jax.make_jaxpr(jax.grad(loss, 1))(x, weight).jaxpr
    (backward,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("remat2", "checkpoint"))
    return quantized(backward.params["jaxpr"], x.shape)


def test_a_policy_that_keeps_eight_bits_and_drops_the_rest():
    """By name; the gradients are the same to the bit, and no x is quantized twice for the weight's gradient."""
    x, weight, *_ = data()
    x, weight = jnp.asarray(x, jnp.bfloat16), weight[:, 0]
    policies = {
        "all": jax.checkpoint_policies.everything_saveable,
        "names": jax.checkpoint_policies.save_only_these_names("quantized_x", "quantized_weight"),
        "none": jax.checkpoint_policies.nothing_saveable,
    }

    def loss(policy, x, weight):
        def two(x, weight):
            h = dense(x, weight, recipe=RECIPES["mx"])
            return dense(jax.nn.silu(h), weight, recipe=RECIPES["mx"])

        y = jax.checkpoint(two, policy=policies[policy])(x, weight)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, p), 1))(x, weight) for p in ("names", "all")
    )
    np.testing.assert_array_equal(got, want)
    # In the backward: each layer's dy along N and along the tokens; then, to have h again, x along K; then what was not
    # kept, x and h along the tokens.
    counts = {p: again(functools.partial(loss, p), x, weight) for p in ("names", "none")}
    assert counts == {"names": 5, "none": 7}
    found = kept(lambda *a: loss("names", *a), x, weight)
    assert [e for e in found if e[1] == x.shape and e[0] == "bfloat16"] == [("bfloat16", x.shape)]


def microbatches(x, weight, recipe, cached):
    def step(total, x):
        y = dense(x, weight, recipe=recipe, weight_quantized=cached)
        return total + jnp.sum(jnp.sin(y)), None

    return jax.lax.scan(step, jnp.float32(0), x)[0]


def test_a_weight_is_quantized_once_for_all_microbatches():
    """Outside the loop; the gradient goes to the weight, and is the same."""
    recipe = RECIPES["mx"]
    x, weight, *_ = data()
    x = x[:, :64]

    def loss(weight, cache):
        cached = quantize_weight(weight, recipe) if cache else None
        return microbatches(x, weight, recipe, cached)

    def inside(function):
        jaxpr = jax.make_jaxpr(function)(weight).jaxpr
        loops = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
        return len(loops), sum(quantized(eqn.params["jaxpr"].jaxpr, weight.shape) for eqn in loops)

    assert inside(jax.grad(lambda weight: loss(weight, True))) == (2, 0)
    assert inside(lambda weight: loss(weight, True)) == (1, 0)
    assert inside(lambda weight: loss(weight, False))[1] > 0
    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(weight, c) for c in (True, False))
    np.testing.assert_array_equal(got, want)


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def gradient(**options):
    def function(x, weight):
        out = jax.grad(lambda x: jnp.sum(dense(x, weight, **options)))(x)
        return out

    return function


DELAYED = DelayedScaling(amax_history_len=4)
X, W = shape(4, 32), shape(32, 64)


@pytest.mark.parametrize(
    "options, x, weight, words",
    [
        ({}, X, shape(16, 64), ["(4, 32)", "(16, 64)", "transpose"]),
        (dict(contracting_dims=((0,), (0,))), shape(32, 4), W, ["contracting_dims", "transpose"]),
        (dict(contracting_dims=((1,), (1,))), X, shape(64, 32), ["contracting_dims", "transpose"]),
        (dict(recipe=DELAYED), X, W, ["state", "None", "init_dense_state"]),
        (
            dict(recipe=DELAYED, state=init_dense_state(DelayedScaling(amax_history_len=3))),
            X,
            W,
            ["amax_history_len", "4", "3"],
        ),
        (dict(state=init_dense_state(DELAYED)), X, W, ["state", "leave it out"]),
        (
            dict(recipe="mxfp8", state=init_dense_state(DELAYED)),
            X,
            W,
            ["MXFP8BlockScaling", "leave it out"],
        ),
        (dict(recipe="nvfp4"), shape(16, 32), W, ["key", "None", "jax.random.key"]),
        (dict(recipe="fp8_current"), shape(4, 40), shape(40, 64), ["multiple of 16", "40"]),
        (dict(recipe="fp8_current"), X, shape(32, 40), ["input gradient", "multiple of 16", "40"]),
        (dict(recipe="mxfp8"), shape(32, 48), shape(48, 64), ["multiple", "32", "48"]),
        (dict(recipe="mxfp8"), shape(48, 32), W, ["multiple", "32", "48"]),
        (dict(recipe="nvfp4", key=KEY), shape(16, 48), shape(48, 64), ["multiple of 32", "48"]),
        (dict(recipe="fp8_current", bias=shape(32)), X, W, ["bias", "(64,)", "(32,)"]),
    ],
)
def test_errors(options, x, weight, words):
    with pytest.raises(ValueError) as info:
        jax.eval_shape(gradient(**options), x, weight)
    assert all(word in str(info.value) for word in words), info.value


def test_a_cache_of_another_kernel_or_recipe():
    weight = jnp.ones((32, 64))
    cached = quantize_weight(weight, "mxfp8")
    for other, recipe in ((weight[:, :32], "mxfp8"), (weight, "fp8_block")):
        with pytest.raises(ValueError, match="weight_quantized must be of the weight"):
            dense(jnp.ones((32, 32)), other, recipe=recipe, weight_quantized=cached)
    with pytest.raises(ValueError, match="there must be a recipe"):
        quantize_weight(weight)


def test_state_and_cache_are_pytrees():
    """Of arrays only: what a loop carries, and a checkpoint holds."""
    state = init_dense_state(DELAYED, num_experts=3)
    assert [x.shape for x in jax.tree.leaves(state)] == [(), (4,), (3,), (3, 4)]
    cached = jax.jit(lambda w: quantize_weight(w, "mxfp8"))(jnp.ones((32, 64)))
    assert [x.dtype.itemsize for x in jax.tree.leaves(cached)] == [1] * 4
    assert dataclasses.replace(cached, dgrad=None).for_dgrad() is cached.forward


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_the_copies_of_a_weight(recipe, batch_dims):
    """Each is what `quantize` makes of it; where one would serve both, the forward's lies with K last."""
    rng, formats = np.random.default_rng(0), as_recipe(recipe).formats()
    weight = jnp.float32(magnitudes(rng, (*(3,) * batch_dims, 256, 2, 128)))
    cached = jax.jit(quantize_weight, static_argnums=1, static_argnames="batch_dims")(
        weight, recipe, batch_dims=batch_dims
    )
    assert cached.shape == weight.shape
    dims = batch_dims, weight.ndim - 1
    for copy, format, (axis, across) in (
        (cached.for_forward(), formats.weight, dims),
        (cached.for_dgrad(), formats.weight_dgrad, dims[::-1]),
    ):
        want = quantize(weight, format, axis=axis, across=across, batch_dims=batch_dims)
        assert jax.tree.structure(copy) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, copy, want)
    if recipe == "mxfp8":
        assert cached.forward.shape == weight.shape
        return
    assert cached.forward.shape == (*weight.shape[:batch_dims], 2, 128, 256)
    one = dataclasses.replace(cached, dgrad=None)
    jax.tree.map(np.testing.assert_array_equal, one.for_dgrad(), cached.for_forward())
