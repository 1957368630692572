"""grouped_dense against a float64 emulation of each recipe: empty groups, padding rows, two sets of experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from core.linear import dense_oracle
from expertmesh.core import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MeshResource,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    global_shard_guard,
    grouped_dense,
    grouped_gemm,
    init_dense_state,
    quantize,
    quantize_weight,
)
from expertmesh.core.testing import magnitudes, relative_error

RECIPES = {
    "tensors": Float8CurrentScaling(fp8_format=Format.E4M3),
    "mx": MXFP8BlockScaling(),
    "four bits": NVFP4BlockScaling(),
}
KEY = jax.random.key(5)
SIZES = np.array(
    [[128, 84], [0, 160]], np.int32
)  # of 224 rows; two participants, with experts of their own


@functools.cache
def data():
    rng = np.random.default_rng(1)
    x, weight = magnitudes(rng, (2, 224, 96)), magnitudes(rng, (4, 96, 2, 32))
    bias, dy = rng.normal(size=(4, 2, 32)), magnitudes(rng, (2, 224, 2, 32))
    weight *= 4.0 ** np.arange(4)[:, None, None, None]
    return tuple(np.asarray(a, np.float32) for a in (x, weight, bias, dy))


def poisoned(a):
    """NaN in the padding rows."""
    a = a.copy()
    for p, sizes in enumerate(SIZES):
        a[p, sizes.sum() :] = np.nan
    return a


def value_and_gradients(x, weight, bias, dy, **options):
    y, pull = jax.vjp(
        lambda x, weight, bias: grouped_dense(x, weight, SIZES, bias, **options), x, weight, bias
    )
    return y, *pull(dy)


@covering("name", RECIPES, covers=["mx"])
def test_equals_an_emulation_in_float64(name):
    """Padding rows may hold anything, in x and dy: no result, no scale and no bias' gradient knows of it."""
    recipe, keys = RECIPES[name], jax.random.split(KEY)

    @jax.jit
    def both(x, weight, bias, dy):
        got = value_and_gradients(x, weight, bias, dy, recipe=recipe, key=KEY)
        return got, dense_oracle.grouped_copies(x, weight, SIZES, dy, recipe, keys)

    x, weight, bias, dy = data()
    got, copies = both(poisoned(x), weight, bias, poisoned(dy))
    clean, _ = both(x, weight, bias, dy)
    wants = dense_oracle.grouped(copies, SIZES, dy, bias)
    for result, same, want in zip(got, clean, wants, strict=True):
        np.testing.assert_array_equal(result, same)
        for one, its in zip(
            result, want, strict=True
        ):  # the largest expert must not hide the others
            assert relative_error(one, its) < 2e-6
    np.testing.assert_array_equal(got[2][2], 0)  # the expert without rows
    assert 0.01 < relative_error(got[0], grouped_gemm(x, weight, SIZES, bias)) < 0.3


def test_delayed_scaling():
    """One multiplier for all rows, one per expert; padding rows enter no history."""
    recipe = DelayedScaling(amax_history_len=2)
    x, weight, bias, _ = data()
    x = poisoned(x)
    step = jax.jit(lambda state: grouped_dense(x, weight, SIZES, bias, recipe=recipe, state=state))
    _, state = step(init_dense_state(recipe, num_experts=4))
    live = np.nan_to_num(x)
    np.testing.assert_allclose(state.x.multiplier, 448 / np.abs(live).max(), rtol=1e-6)
    np.testing.assert_allclose(
        state.weight.multiplier, 448 / np.abs(weight).max((1, 2, 3)), rtol=1e-6
    )
    y, _ = step(state)
    format = recipe.formats().x
    q_x = quantize(live, format, multiplier=state.x.multiplier)
    q_w = quantize(weight, format, multiplier=state.weight.multiplier, batch_dims=1)
    values = [dense_oracle.values(q).astype(np.float32) for q in (q_x, q_w)]
    assert relative_error(y, grouped_gemm(*values, SIZES, bias)) < 2e-6


def test_a_weight_quantized_before_and_its_state():
    recipe = DelayedScaling(amax_history_len=2)
    x, weight, bias, _ = data()
    state = init_dense_state(recipe, num_experts=4)

    @jax.jit
    def both(x, weight):
        cached, after = quantize_weight(weight, recipe, batch_dims=1, state=state.weight)
        layer = functools.partial(grouped_dense, x, weight, SIZES, bias, recipe=recipe, state=state)
        return layer(), layer(weight_quantized=cached), after

    (y, alone), (again, beside), after = both(x, weight)
    np.testing.assert_array_equal(y, again)
    # Who quantizes the weight has its new state.
    np.testing.assert_array_equal(after.multiplier, alone.weight.multiplier)
    np.testing.assert_array_equal(beside.weight.multiplier, 1)


def test_without_participants_and_without_a_recipe():
    x, weight, bias, _ = data()
    one = grouped_dense(x[0], weight[:2], SIZES[0], bias[:2], contracting_dims=((1,), (-3,)))
    np.testing.assert_array_equal(one, grouped_gemm(x[0], weight[:2], SIZES[0], bias[:2]))
    layer = functools.partial(grouped_dense, recipe="mxfp8", contracting_dims=((-1,), (1,)))
    got = layer(x[0], weight[:2], SIZES[0], bias[:2])
    want = layer(x[:1], weight[:2], SIZES[:1], bias[:2])
    np.testing.assert_array_equal(got, want[0])
    state = init_dense_state(DelayedScaling(), num_experts=2)
    y, _ = jax.eval_shape(
        lambda x: grouped_dense(x, weight[:2], SIZES[0], recipe=DelayedScaling(), state=state), x[0]
    )
    assert y.shape == (224, 2, 32)


@pytest.mark.parametrize(
    "sizes, words", [([128, 97], ["add up", "225"]), ([120, 64], ["multiples", "32", "120"])]
)
def test_debug_checks_the_sizes(sizes, words):
    x, weight, *_ = data()
    checked = checkify.checkify(
        lambda sizes: grouped_dense(x, weight, sizes, recipe="mxfp8", debug=True)
    )
    error, _ = jax.jit(checked)(jnp.array([sizes, [0, 160]]))
    assert all(word in error.get() for word in ["grouped_dense: group", *words]), error.get()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("lead", [(), (None,)], ids=["[C, K]", "[P, C, K]"])
def test_a_spec_is_of_the_operand_as_given(lead, debug):
    """Whether it has P or not, and with debug as without: sums over tp are scattered to where they are wanted."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    x, weight, *_ = data()
    x, sizes = (x[:1], SIZES[:1]) if lead else (x[0], SIZES[0])
    spec = PartitionSpec(*lead, None, None, "tp")
    specs = dict(
        x_spec=PartitionSpec(*lead, None, "tp"), w_spec=PartitionSpec(None, "tp"), out_spec=spec
    )

    def layer(x, weight):
        return grouped_dense(x, weight, sizes, recipe="fp8_current", debug=debug, **specs)

    with global_shard_guard(MeshResource(tp_resource="tp")):
        _, y = jax.jit(checkify.checkify(layer))(*place(mesh, (x, weight[:2])))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim), y.sharding
    want = grouped_dense(x, weight[:2], sizes, recipe="fp8_current")
    assert relative_error(y, want) < 2e-6


def place(mesh, operands):
    return jax.device_put(operands, NamedSharding(mesh, PartitionSpec()))


def struct(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    "options, shapes, words",
    [
        ({}, ((2, 64, 32), (4, 16, 64), (2, 2)), ["grouped_dense", "(2, 64, 32)", "transpose"]),
        ({}, ((2, 64, 32), (4, 32), (2, 2)), ["grouped_dense", "[E, K, *N]"]),
        (dict(recipe="mxfp8"), ((2, 64, 32), (5, 32, 64), (2, 2)), ["multiple of the number of"]),
        (dict(contracting_dims=((-1,), (2,))), ((2, 64, 32), (4, 64, 32), (2, 2)), ["transpose"]),
        (
            dict(contracting_dims=((1, 2), (1, 2))),
            ((2, 64, 32), (4, 64, 32, 16), (2, 2)),
            ["one dimension"],
        ),
        (dict(recipe=DelayedScaling()), ((2, 64, 32), (4, 32, 64), (2, 2)), ["init_dense_state"]),
        (
            dict(recipe="fp8_current"),
            ((2, 64, 24), (4, 24, 64), (2, 2)),
            ["multiple of 16", "24", "(2, 64, 24)"],
        ),
        (dict(recipe="mxfp8"), ((2, 48, 32), (4, 32, 64), (2, 2)), ["multiple", "32", "48"]),
        (dict(recipe="nvfp4"), ((2, 64, 32), (4, 32, 64), (2, 2)), ["key=None", "jax.random.key"]),
    ],
)
def test_errors(options, shapes, words):
    x, weight, sizes = shapes
    operands = struct(*x), struct(*weight), struct(*sizes, dtype="int32")

    def gradient(x, weight, sizes):
        return jax.grad(lambda x: jnp.sum(grouped_dense(x, weight, sizes, **options)))(x)

    with pytest.raises(ValueError) as info:
        jax.eval_shape(gradient, *operands)
    assert all(word in str(info.value) for word in words), info.value
