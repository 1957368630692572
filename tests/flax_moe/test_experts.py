"""The experts' function and its gradients against loops over experts in float64; what padding rows may hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.covering import covering, full
from expertmesh.core import (
    Activation,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from expertmesh.core.testing import relative_error
from expertmesh.ep import combine, dispatch, dispatch_weights, prepare
from expertmesh.flax_moe import (
    MoEConfig,
    experts,
    init_params,
    init_quant_state,
    moe,
    native_moe,
    quantize_weights,
)
from expertmesh.flax_moe.config import dispatches_quantized
from expertmesh.flax_moe.experts import Dispatched, adds_rows, feed_forward, reads_tokens
from expertmesh.flax_moe.quantization import Quantization
from expertmesh.flax_moe.quantized_dispatch import dispatch_quantized, quantize_tokens
from flax_moe import quantized_oracle
from flax_moe.moe_oracle import GPT_OSS, make_config, make_data

T, K, E, D = 24, 2, 4, 256
PLAIN = Activation(function="gelu", gated=False)
FOUR = NVFP4BlockScaling(disable_stochastic_rounding=True)
NAMES = "wi", "wo", "wi_bias", "wo_bias"
KEPT = dict(remat="save_8_bits")
# No number of 8 bits is the limit, where a slope jumps.
CLAMPED = dict(activation=dataclasses.replace(GPT_OSS, limit=0.77))
CASES = {
    "copied": (None, dict(expert_dim=136)),
    "copied, biases": (None, dict(expert_dim=136, use_bias=True, activation=GPT_OSS)),
    "in place": (None, {}),
    "in place, biases": (None, dict(use_bias=True, activation=PLAIN)),
    "tensor": (Float8CurrentScaling(), {}),
    "tensor, biases": (Float8CurrentScaling(), dict(use_bias=True, activation=PLAIN)),
    "delayed": (DelayedScaling(), {}),
    "delayed, biases": (DelayedScaling(), dict(use_bias=True, activation=PLAIN)),
    "blocks": (Float8BlockScaling(), dict(activation=GPT_OSS)),
    "blocks, biases": (Float8BlockScaling(), dict(use_bias=True)),
    "blocks, no gate": (Float8BlockScaling(), dict(activation=PLAIN)),
    "mx": (MXFP8BlockScaling(), {}),
    "mx, biases": (MXFP8BlockScaling(), dict(use_bias=True, activation=PLAIN)),
    "sent, blocks": (Float8BlockScaling(), dict(quantize_backward_combine=True, use_bias=True)),
    "sent, blocks, gate alone": (Float8BlockScaling(), dict(quantize_backward_combine=True)),
    "sent, mx": (MXFP8BlockScaling(), dict(quantize_backward_combine=True)),
    "copied, 8 bits": (None, dict(expert_dim=136) | CLAMPED | KEPT),
    "in place, biases, 8 bits": (None, dict(use_bias=True, activation=PLAIN) | KEPT),
    "tensor, 8 bits": (Float8CurrentScaling(), KEPT),
    "delayed, 8 bits": (DelayedScaling(), KEPT),
    "blocks, 8 bits": (Float8BlockScaling(), CLAMPED | KEPT),
    "blocks, biases, 8 bits": (Float8BlockScaling(), dict(use_bias=True) | KEPT),
    "blocks, no gate, 8 bits": (Float8BlockScaling(), dict(activation=PLAIN) | KEPT),
    "mx, 8 bits": (MXFP8BlockScaling(), KEPT),
    "sent, blocks, 8 bits": (Float8BlockScaling(), dict(quantize_backward_combine=True) | KEPT),
    "four bits, 8 bits": (FOUR, KEPT),
    "four bits": (FOUR, {}),
    "four bits, biases": (FOUR, dict(use_bias=True)),
}
# Of each recipe one, of biases and of rows sent in fewer bits some.
ALWAYS = [
    *("copied, biases", "in place", "tensor, biases", "delayed"),
    *("blocks", "mx, biases", "sent, blocks", "four bits"),
    *("copied, 8 bits", "tensor, 8 bits", "blocks, 8 bits"),
]


class Exact:
    """A Layer of quantized_oracle whose formats are the identity."""

    def __init__(self, w):
        self.w = w

    def forward(self, x):
        return x, np.tensordot(x, self.w, 1)

    def backward(self, x, dy):
        of_n = list(range(1, dy.ndim)), list(range(1, self.w.ndim))
        return np.tensordot(dy, self.w, of_n), np.tensordot(x, dy, ([0], [0]))


def setup(recipe, changes):
    """A config, parameters, choices of which one has no expert, and a last expert without rows."""
    config = make_config(
        **dict(recipe=recipe, num_experts=E, expert_dim=128, use_bias=False) | changes
    )
    data = make_data(config, (T, D))
    params = {name: data.params[name] for name in NAMES if name in data.params}
    rng = np.random.default_rng(1)
    idx = np.argsort(rng.random((T, E - 1)), axis=1)[:, :K].astype(np.int32)
    idx[3, 1] = -1
    weights = rng.normal(size=(T, K)).astype(np.float32)
    weights[5, 0] = 0
    return config, params, data.x, data.dy, idx, weights


def poisoned(rows, live):
    """NaN in the padding rows."""

    def fill(leaf):
        after = jax.lax.broadcasted_iota(jnp.int32, leaf.shape, 1) >= live
        return jnp.where(after, jnp.asarray(np.nan, leaf.dtype), leaf)

    return jax.tree.map(fill, rows)


def run(config, handle, given, params, x, weights):
    """y of tokens, and the next state."""
    live, quantized = jnp.sum(handle.group_sizes), None
    if reads_tokens(params["wi"], handle, config):
        rows = x[None]
        if dispatches_quantized(config.recipe):
            quantized = quantize_tokens(rows, config.recipe)
    elif dispatches_quantized(config.recipe):
        rows, quantized = dispatch_quantized(handle, x, recipe=config.recipe)
        rows, quantized = poisoned((rows, quantized), live)
    else:
        rows = poisoned(dispatch(handle, x), live)
    weights = poisoned(dispatch_weights(handle, weights), live)
    dispatched = Dispatched(handle, weights, rows, quantized, None, None)
    y, state = feed_forward(params, dispatched, config, given=given, specs={})
    y = y.reshape(x.shape) if adds_rows(params, handle, config) else combine(handle, y)
    return y, state


def oracle(config, params, x, dy, idx, weights, multipliers):
    """y, the gradients of params, x and weights, and the largest activation of a row."""
    params = {name: w.astype(np.float64) for name, w in params.items()}
    biases = [params.get(name, np.zeros(w.shape[:1] + w.shape[2:])) for name, w in
              (("wi_bias", params["wi"]), ("wo_bias", params["wo"]))]  # fmt: skip
    d = {name: np.zeros_like(w) for name, w in params.items()}
    of_x, of_dy = multipliers_of_tokens(config, x, dy, np.any(idx >= 0, axis=1))
    multipliers = multipliers | {"wi": (multipliers["wi"][0] or of_x, multipliers["wi"][1])}
    of_dy = {"wi": None, "wo": of_dy}
    y, d_x, d_weights = np.zeros(x.shape), np.zeros(x.shape), np.zeros(weights.shape)
    for e in range(E):
        tokens, ks = np.nonzero(idx == e)
        if not tokens.size:
            continue
        if config.recipe is None:
            layers = [Exact(params[name][e]) for name in NAMES[:2]]
        else:
            layers = [
                quantized_oracle.Layer(
                    params[name][e], config.recipe.formats(), multipliers[name], of_dy[name]
                )
                for name in NAMES[:2]
            ]
        rows, of_weights, (d_rows, *of_params) = quantized_oracle.feed_forward(
            x[tokens].astype(np.float64),
            dy[tokens].astype(np.float64),
            weights[tokens, ks],
            layers,
            biases[0][e],
            biases[1][e],
            config,
            sent_only=dispatches_quantized(config.recipe),
        )
        np.add.at(y, tokens, rows)
        np.add.at(d_x, tokens, d_rows)
        d_weights[tokens, ks] = of_weights
        for name, gradient in zip(NAMES, of_params, strict=True):
            if name in d:
                d[name][e] = gradient
    return y, d, d_x, d_weights


def multipliers_of_tokens(config, x, dy, has_row):
    """Of x and of dy under a recipe without blocks; with biases, cotangents are moved before they are quantized."""
    if config.recipe is None:
        return None, None
    of, formats = quantized_oracle.multiplier_of_tokens, config.recipe.formats()
    of_dy = None if config.use_bias else of(dy, has_row, formats.grad_dgrad)
    return of(x, has_row, formats.x), of_dy


def given_for(config):
    """A state whose multipliers are no ones, and the multipliers of x and of a weight in each layer."""
    state = init_quant_state(config)
    multipliers = dict.fromkeys(NAMES[:2], (None, None))
    if state is None:
        return Quantization(), multipliers
    state = jax.tree.map(
        lambda leaf: leaf + 3 if leaf.ndim < 2 and leaf.size in (1, E) else leaf, state
    )
    return Quantization(state=state), dict.fromkeys(multipliers, (4.0, 4.0))


@pytest.mark.default_jax
@covering("name", CASES, covers=ALWAYS)
def test_value_and_gradients(name):
    """A choice without an expert, a weight of 0, an expert without rows, NaN in padding rows."""
    config, params, x, dy, idx, weights = setup(*CASES[name])
    handle = prepare(jnp.asarray(idx), config.exchange(axis=()))
    assert int(handle.group_sizes.sum()) < handle.source.shape[1]
    in_place = name.startswith(("in place", "tensor", "delayed", "blocks", "mx"))
    assert reads_tokens(params["wi"], handle, config) == in_place
    given, multipliers = given_for(config)

    def both(*operands):
        y, pull, state = jax.vjp(
            lambda *of: run(config, handle, given, *of), *operands, has_aux=True
        )
        # Without derivatives another rule runs.
        return y, pull(jnp.asarray(dy)), run(config, handle, given, *operands), state

    y, gradients, (value, _), state = jax.jit(both)(params, x, weights)
    want, *wanted = oracle(config, params, x, dy, idx, weights, multipliers)
    assert relative_error(y, want) < 1e-5 and relative_error(value, want) < 1e-5
    for got, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert np.any(expected) and relative_error(got, expected) < 1e-5
    if state is not None:
        amax = np.abs(x[np.any(idx >= 0, axis=1)]).max()
        assert float(state["wi"].x.amax_history[-1]) == amax
        assert set(state) == {"wi", "wo"} and np.all(state["wo"].weight.amax_history[:, -1] > 0)


@pytest.mark.parametrize("name", ["copied", "tensor", "mx", "blocks", "blocks, biases"])
def test_what_is_kept_in_8_bits(name):
    """No hidden layer in more, and in blocks no activation; without the option both."""
    for suffix in ("", ", 8 bits"):
        config, params, x, _, idx, weights = setup(*CASES[name + suffix])
        handle, (given, _) = prepare(jnp.asarray(idx), config.exchange(axis=())), given_for(config)

        def pull(*operands, config=config, handle=handle, given=given):
            return jax.vjp(lambda *of: run(config, handle, given, *of)[0], *operands)[1]

        kept = jax.tree.leaves(jax.eval_shape(pull, params, x, weights))
        rows, F = handle.source.shape[1], config.expert_dim
        hidden = [leaf for leaf in kept if leaf.ndim == 4 and leaf.shape[1:] == (rows, 2, F)]
        assert [leaf.dtype.itemsize for leaf in hidden] == [1 if suffix else 4]
        of_a = {(1, rows, F), (F, 1, rows)}  # the latter as Hopper reads it
        activations = [leaf for leaf in kept if leaf.shape in of_a and leaf.dtype.itemsize == 1]
        assert len(activations) == (name == "tensor" or name != "copied" and not suffix)


@pytest.mark.parametrize("name", ["tensor", "tensor, biases", "blocks", "mx"])
def test_tokens_and_not_their_rows_are_kept(name):
    """In 8 bits: the backward reads them where they are, or makes rows of them."""
    config, params, x, _, idx, weights = setup(*CASES[name])
    handle, (given, _) = prepare(jnp.asarray(idx), config.exchange(axis=())), given_for(config)

    def pull(*operands):
        return jax.vjp(lambda *of: run(config, handle, given, *of)[0], *operands)[1]

    kept = jax.tree.leaves(jax.eval_shape(pull, params, x, weights))
    narrow, rows = [leaf.shape for leaf in kept if leaf.dtype.itemsize == 1], handle.source.shape[1]
    assert narrow.count((1, T, D)) == 1
    assert not {(1, rows, D), (D, 1, rows)} & {*narrow}


EXACT = Float8BlockScaling(), dict(activation=Activation(function="gelu_exact"))
IN_BLOCKS = {
    name: case
    for name, case in CASES.items()
    if ("blocks" in name or name == "mx") and "8 bits" not in name
}


@pytest.mark.parametrize("name", [*IN_BLOCKS, "exact"])
def test_which_activation_is_quantized_where_it_is_made(name, monkeypatch):
    """With a gate and without biases, for a backward; of what kernels have no function for not."""
    config, params, x, _, idx, weights = setup(*IN_BLOCKS.get(name, EXACT))
    handle, made = prepare(jnp.asarray(idx), config.exchange(axis=())), []
    original = experts.quantized_activation

    def record(*operands, **options):
        made.append(options)
        return original(*operands, **options)

    jax.clear_caches()  # of what other tests have traced
    monkeypatch.setattr(experts, "quantized_activation", record)
    given, _ = given_for(config)

    def value(*operands):
        return run(config, handle, given, *operands)[0]

    jax.eval_shape(value, params, x, weights)
    assert not made, "nothing reads rows along their length"
    jax.eval_shape(lambda *operands: jax.vjp(value, *operands)[0], params, x, weights)
    assert len(made) == (name in ("blocks", "sent, blocks, gate alone"))


def test_cotangents_of_rows_that_are_written(monkeypatch):
    """Where only the tokens' rows are read in place, and not those of the output's gradient."""
    monkeypatch.setattr(experts, "NARROW", 0)
    config, params, _, _, idx, _ = setup(*CASES["in place"])
    assert not adds_rows(params, prepare(jnp.asarray(idx), config.exchange(axis=())), config)
    test_value_and_gradients("in place")


@pytest.mark.parametrize(
    "width, expert_dim, tokens, cotangents",
    [
        (768, 512, True, True),
        (768, 1024, True, True),
        (1536, 1024, True, True),
        (2048, 1024, True, True),
        (2048, 8192, False, False),
        (4096, 2048, True, False),
        (4096, 4096, False, False),
    ],
)
def test_which_rows_are_read_in_place(width, expert_dim, tokens, cotangents):
    """By what was measured, see docs/dev/kernels.md: of 4 experts with 512 rows each."""
    config = make_config(num_experts=4, expert_dim=expert_dim, use_bias=False)
    handle = prepare(jnp.zeros((1024, 2), jnp.int32), config.exchange(axis=()))
    shapes = dict(wi=(4, width, 2, expert_dim), wo=(4, expert_dim, width))
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    assert reads_tokens(params["wi"], handle, config) == tokens
    assert adds_rows(params, handle, config) == cotangents


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), full(MXFP8BlockScaling())])
def test_quantized_weights(recipe):
    """To the bit what the function makes of the weights itself; their gradients are the weights'."""
    config, params, x, dy, idx, weights = setup(recipe, {})
    handle = prepare(jnp.asarray(idx), config.exchange(axis=()))
    given = Quantization(weights=quantize_weights(params, config))
    lost = jax.tree.map(lambda w: w * np.nan, params)

    def both(given, params):
        y, pull = jax.vjp(lambda *of: run(config, handle, given, *of)[0], params, x, weights)
        return y, pull(jnp.asarray(dy))

    results = jax.jit(both)(given, lost), jax.jit(both)(Quantization(), params)
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# D and F that Hopper has other kernels for: rows and cotangents read where tokens are, rows alone, both activated
# behind GEMMs or on their own.
ON_HOPPER = [(512, 256), (512, 1024), (2112, 256), (1024, 2048)]
BLOCK_ERROR = {None: 2e-2, "fp8_block": 0.12, "fp8_current": 0.12}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe, remat",
    [*((recipe, "save_all") for recipe in BLOCK_ERROR), ("fp8_block", "save_8_bits")],
)
@pytest.mark.parametrize("width, expert_dim", ON_HOPPER)
def test_gradients_where_tokens_have_several_places(width, expert_dim, recipe, remat):
    """Of the whole block on one device, against the one in plain JAX; groups fill the kernels' tiles."""
    config = MoEConfig(num_experts=2, top_k=2, expert_dim=expert_dim, dtype="bfloat16")
    params = init_params(jax.random.key(0), width, config)
    x, dy = (jax.random.normal(key, (1, 520, width)) for key in jax.random.split(jax.random.key(1)))

    def both(block, config):
        def run(params, x):
            y, pull = jax.vjp(lambda *given: block(*given, config).y, params, x)
            return y, *pull(dy.astype(y.dtype))

        return jax.jit(run)(params, x)

    ours = dataclasses.replace(config, recipe=recipe, remat=remat)
    got, want = both(moe, ours), both(native_moe, config)
    for mine, reference in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(mine, reference) < BLOCK_ERROR[recipe]
