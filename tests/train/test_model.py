"""The decoder against NumPy loops, on one device and on meshes of both axis types."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from cases import train
from expertmesh.flax_moe import MoEConfig, init_params
from expertmesh.train import model
from expertmesh.train.mesh import RESOURCE
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import TrainingOptions
from expertmesh.train.step import schedule

pytestmark = pytest.mark.default_jax

MOE = MoEConfig(
    num_experts=4,
    top_k=2,
    expert_dim=8,
    aux_loss_coeff=0.05,
    z_loss_coeff=1e-3,
    dtype=jnp.float32,
)
CONFIG = ModelConfig(layers=1, model_dim=16, heads=2, moe=MOE)
B, S = 8, 12


@pytest.fixture(scope="module")
def params():
    params = model.init(jax.random.key(0), CONFIG)
    head = jax.random.normal(jax.random.key(1), params["head"].shape)
    return params | {"head": head}


@pytest.fixture(scope="module")
def bytes_BS():
    return np.random.default_rng(0).integers(0, 256, (B, S)).astype(np.int32)


def forward(params, bytes_BS):
    return jax.jit(model.forward, static_argnums=2)(params, bytes_BS, CONFIG)


@pytest.mark.full
def test_an_untrained_model_knows_nothing(bytes_BS):
    output = forward(model.init(jax.random.key(0), CONFIG), bytes_BS)
    losses = model.cross_entropy(output.logits, jnp.asarray(bytes_BS))
    np.testing.assert_allclose(losses, math.log(256), rtol=1e-6)


def test_no_position_sees_a_later_byte(params, bytes_BS):
    before = forward(params, bytes_BS).logits
    for position in (1, 5, S - 1):
        changed = bytes_BS.copy()
        changed[:, position] ^= 0x55
        after = forward(params, changed).logits
        np.testing.assert_allclose(after[:, :position], before[:, :position], rtol=1e-5, atol=1e-5)
        assert np.abs(after[:, position] - before[:, position]).max() > 1e-2


def test_counts_cover_every_choice(params, bytes_BS):
    output = forward(params, bytes_BS)
    assert output.tokens_per_expert.sum(axis=1).tolist() == [B * S * MOE.top_k] * CONFIG.layers
    assert output.num_dropped == 0


def test_cross_entropy_is_the_log_of_the_target_probability():
    logits = np.random.default_rng(0).normal(size=(2, 3, 256)) * 5
    targets = np.array([[1, 0, 255], [7, 7, 100]])
    for b, s in np.ndindex(2, 3):
        p = [math.exp(v) for v in logits[b, s]]
        expected = -math.log(p[targets[b, s]] / math.fsum(p))
        got = model.cross_entropy(jnp.float32(logits), jnp.int32(targets))[b, s]
        assert got == pytest.approx(expected, rel=1e-5)


def test_embedding_adds_the_last_bytes(params, bytes_BS):
    table = np.asarray(params["embed"])
    got = model._embed(params["embed"], jnp.asarray(bytes_BS), jnp.float32)
    for b, s in np.ndindex(B, S):
        expected = sum(table[j, bytes_BS[b, s - j]] for j in range(model.WINDOW) if s >= j)
        np.testing.assert_allclose(got[b, s], expected, rtol=1e-5, atol=1e-6)


def test_attention_against_loops(params):
    layer = jax.tree.map(lambda w: np.asarray(w[0]), params["layers"])
    x = np.random.default_rng(1).normal(size=(2, S, 16)).astype(np.float32)
    H, d = CONFIG.heads, CONFIG.head_dim
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True)) * layer["attention_norm"]
    qkv = np.einsum("bsd,dce->bsce", normed, layer["qkv"]).reshape(2, S, 3, H, d)

    def rotated(v, position):
        """Pairs (v[i], v[i + d/2]) as complex numbers, turned by their angles."""
        v = v / np.linalg.norm(v)
        z = v[: d // 2] + 1j * v[d // 2 :]
        z = z * np.exp(1j * position * 10_000.0 ** (-np.arange(d // 2) / (d // 2)))
        return np.concatenate([z.real, z.imag])

    heads = np.zeros((2, S, H, d))
    for b, s, h in np.ndindex(2, S, H):
        q = rotated(qkv[b, s, 0, h], s)
        scores = [math.sqrt(d) * q @ rotated(qkv[b, t, 1, h], t) for t in range(s + 1)]
        weights = np.exp(scores) / np.exp(scores).sum()
        heads[b, s, h] = sum(w * qkv[b, t, 2, h] for t, w in enumerate(weights))
    expected = heads.reshape(2, S, 16) @ layer["out"]
    got = model._attention(layer, jnp.asarray(x), CONFIG)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.full
def test_auto_axes_keep_the_layout_of_the_state():
    """The compiler may choose layouts where axes are Auto: two steps compile once, nothing moves."""
    one = train.trainer(CONFIG, axis_type=AxisType.Auto)
    state, _ = train.run(one, (B, S + 1), last=2)
    assert one.step._cache_size() == 1
    for leaf, sharding in zip(*map(jax.tree.leaves, (state, one.shardings)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_parameters_do_not_depend_on_the_mesh():
    alone = model.init(jax.random.key(3), CONFIG)
    for sizes, axis_type in (((2, 4), AxisType.Explicit), ((8, 1), AxisType.Auto)):
        one = train.trainer(CONFIG, sizes=sizes, axis_type=axis_type, seed=3)
        with one.on_mesh():
            state = one.init()
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_each_layer_is_drawn_by_itself():
    """Bitwise the values of separate layers, whose keys are those after the embedding's."""
    config, D = dataclasses.replace(CONFIG, layers=3), CONFIG.model_dim

    def one(key):
        qkv_key, out_key, moe_key = jax.random.split(key, 3)
        return {
            "attention_norm": jnp.ones(D),
            "qkv": jax.random.normal(qkv_key, (D, 3, D)) * D**-0.5,
            "out": jax.random.normal(out_key, (D, D)) * (D * 2 * 3) ** -0.5,
            "moe_norm": jnp.ones(D),
            "moe": init_params(moe_key, D, MOE),
        }

    keys = jax.random.split(jax.random.key(5), 4)
    separate = jax.jit(lambda: [one(keys[i]) for i in (1, 2, 3)])()
    stacked = jax.jit(lambda: model.init(jax.random.key(5), config))()["layers"]
    assert jax.tree.structure(stacked) == jax.tree.structure(separate[0])
    for got, *want in zip(*map(jax.tree.leaves, (stacked, *separate)), strict=True):
        np.testing.assert_array_equal(got, np.stack(want))


def test_depth_changes_no_program():
    """Lines of the step's program; of a loop over layers each layer would add its own."""

    def lines(layers):
        one = train.trainer(dataclasses.replace(CONFIG, layers=layers))
        with one.on_mesh():
            lowered = one.step.lower(one.abstract(), train.abstract_batch(one, (B, S + 1)), 0)
        return len(lowered.as_text().splitlines())

    assert lines(2) == lines(7)


def test_only_matrices_decay(params):
    decays = {
        jax.tree_util.keystr(path, simple=True, separator="."): value
        for path, value in jax.tree.leaves_with_path(model.is_matrix(params))
    }
    assert {name for name, value in decays.items() if not value} == {
        "norm",
        "layers.attention_norm",
        "layers.moe_norm",
    }


def test_dense_weights_rest_in_shards():
    specs = model.specs(CONFIG, RESOURCE)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), CONFIG))
    assert jax.tree.structure(specs) == jax.tree.structure(shapes)
    for (path, _), spec in zip(
        jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(specs), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if "norm" not in name and "gate" not in name:
            assert "fsdp" in str(spec), name


@pytest.mark.parametrize("steps", [1, 2, 3, 50, 1000])
def test_learning_rate_rises_and_falls(steps):
    rates = [float(schedule(TrainingOptions(steps=steps))(i)) for i in range(steps)]
    assert all(np.isfinite(rates)) and max(rates) <= 3e-3 * 1.0001
    if steps >= 50:
        assert rates[0] == 0 and max(rates) == pytest.approx(3e-3) and rates[-1] < 3e-4
