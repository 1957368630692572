"""The recipes run, compute what the frameworks' own blocks compute, and docs/recipes.md shows what runs."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.safetensors import read_folder, write_folder
from cases.scripts import load_script
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import MoEConfig, hf, init_params, moe
from flax_moe import moe_oracle
from flax_moe.hf_oracle import DEEPSEEK, QWEN3, make_weights, sparse_mixer

pytestmark = pytest.mark.default_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/recipes.md"


@pytest.fixture(scope="module")
def recipes():
    return load_script(ROOT / "examples/recipes.py")


def test_nnx(recipes):
    """Laid out by rules, the loss is that of the oracle's block, and the bias moves by the rate."""
    block, x, value, grads = recipes.nnx_example()
    params = {name: np.asarray(p[...]) for name, p in nnx.state(block, nnx.Param).items()}
    config = moe_oracle.make_config(
        score_function="sigmoid", use_expert_bias=True, use_bias=False, expert_dim=8
    )
    data = moe_oracle.Data(params, np.asarray(x), np.zeros_like(x))
    want = moe_oracle.run(data, config)
    balance = float(value) - np.mean((want.y - 1) ** 2)
    assert 0.005 < balance < 0.02  # the coefficient, where all experts get as many tokens
    counts = want.tokens_per_expert
    moved = 1e-3 * np.sign(counts.mean() - counts)
    np.testing.assert_allclose(block.expert_bias[...], moved, rtol=1e-6)
    assert set(grads) == {"gate_kernel", "wi", "wo"}
    for name, spec in (
        ("wi", PartitionSpec("expert", "fsdp", None, "tensor")),
        ("wo", PartitionSpec("expert", "tensor", "fsdp")),
    ):
        for array in (getattr(block, name)[...], grads[name][...]):
            layout = jax.NamedSharding(array.sharding.mesh, spec)
            assert array.sharding.is_equivalent_to(layout, array.ndim), name


def test_sparse_mixer(recipes):
    """Choices and weights by a loop, where some experts are near the best and some are not."""
    logits = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    made = recipes.sparse_mixer(jnp.asarray(logits).reshape(4, 10, 8), 0.2)
    want = [sparse_mixer(x.astype(np.float64), {"router_jitter_noise": 0.2}) for x in logits]
    np.testing.assert_array_equal(made["topk_idx"].reshape(40, 2), [idx for idx, _ in want])
    weights = np.array([w for _, w in want])
    np.testing.assert_allclose(made["topk_weights"].reshape(40, 2), weights, rtol=1e-5)
    assert 0.1 < (weights < 0.99).mean() < 0.9


def test_maxtext_names(recipes):
    """There and back, for one layer, for scanned ones, as many as experts, and for prefused weights."""
    config = MoEConfig(num_experts=2, top_k=1, expert_dim=12, shared_expert_dim=24)
    layers = [init_params(jax.random.key(i), 16, config) for i in range(2)]
    params = jax.tree.map(lambda *arrays: np.stack(arrays), *layers)
    bias = np.arange(4.0).reshape(2, 2)  # [L, E], and L is E
    tree = recipes.to_maxtext(layers[0], bias[0])
    F = config.expert_dim
    assert tree["MoeBlock_0"]["wi_0"].shape == (2, 16, F)
    assert set(tree["shared_experts"]) == {"wi_0", "wi_1", "wo"}
    np.testing.assert_array_equal(tree["MoeBlock_0"]["wi_1"], layers[0]["wi"][:, :, 1])
    scanned = recipes.to_maxtext_layers(params, bias)
    block = scanned["MoeBlock_0"]
    assert block["wo"].shape == (2, 2, F, 16) and block["gate"]["kernel"].shape == (16, 2, 2)
    np.testing.assert_array_equal(block["wo"][:, 1], layers[1]["wo"])
    np.testing.assert_array_equal(block["gate"]["bias"], bias)
    halves = {name: block.pop(name) for name in ("wi_0", "wi_1")}
    fused = {"wi": jnp.concatenate([*halves.values()], axis=-1)}
    for weights in (halves, fused):
        again, again_bias = recipes.from_maxtext_layers(scanned | {"MoeBlock_0": block | weights})
        assert set(again) == set(params)
        for name, w in params.items():
            np.testing.assert_array_equal(again[name], w)
        np.testing.assert_array_equal(again_bias, bias)
    plain = {k: w for k, w in layers[0].items() if "shared" not in k}
    assert set(recipes.to_maxtext(plain)) == {"MoeBlock_0"}
    assert recipes.from_maxtext(recipes.to_maxtext(plain))[1] is None


def every_expert(x, chosen, weights, w_gate_up, w_down):
    """Every expert computed for every token, then weighted."""
    gate, up = jnp.split(jnp.einsum("td,edf->tef", x, w_gate_up), 2, axis=-1)
    each = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, w_down)
    share = jnp.sum(jax.nn.one_hot(chosen, len(w_down)) * weights[..., None], axis=1)
    return jnp.einsum("te,ted->td", share, each)


def test_levanter(recipes):
    arrays, placed = recipes.levanter_example()
    y, dropped = jax.jit(recipes.moe_mlp)(*placed)
    assert relative_error(y, every_expert(*arrays)) < 1e-5 and int(dropped) == 0
    w_gate_up, w_down = arrays[3:]
    params = recipes.from_levanter(jnp.zeros((16, 4)), *jnp.split(w_gate_up, 2, axis=-1), w_down)
    np.testing.assert_array_equal(params["wi"].reshape(w_gate_up.shape), w_gate_up)


@pytest.mark.full
def test_levanter_gradients(recipes):
    arrays, placed = recipes.levanter_example()

    def gradients(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.square(function(*a))), argnums=(0, 2, 3, 4)))

    got = gradients(lambda *a: recipes.moe_mlp(*a)[0])(*placed)
    for mine, want in zip(got, gradients(every_expert)(*arrays), strict=True):
        assert relative_error(mine, want) < 1e-5


def test_a_layer_from_files_onto_a_mesh(recipes, tmp_path):
    """Two files, numbers of 8 and 16 bits; parameters on the mesh are those loaded from memory."""
    weights = {}
    for name, w in make_weights(DEEPSEEK, 4).items():
        weights[name] = w if name.endswith("bias") else w.astype(ml_dtypes.bfloat16)
    name = "model.layers.4.mlp.experts.3.up_proj.weight"
    weights[name] = weights[name].astype(ml_dtypes.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = np.float32([[0.5]])
    items = list(weights.items())
    hf_config = DEEPSEEK | {"quantization_config": {"weight_block_size": [128, 128]}}
    write_folder(tmp_path, hf_config, dict(items[:7]), dict(items[7:]))
    mesh = moe_oracle.make_mesh((2, 4), AxisType.Explicit)
    ((config, params, bias),) = recipes.load_model(tmp_path, mesh, [4])
    want = hf.load_layer(weights, hf_config, 4)
    assert config == hf.moe_config(DEEPSEEK)
    for key, w in want.params.items():
        np.testing.assert_array_equal(params[key], w)
    np.testing.assert_array_equal(bias, want.expert_bias)
    assert params["wi"].sharding.spec == PartitionSpec("ep", "fsdp", None, None)


def test_weights_that_are_kept_in_8_bits(recipes, tmp_path, capsys):
    """Loaded, called and saved again: y is near that of the same numbers in 16 bits, and the files are the same."""
    hf_config = QWEN3 | {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    weights = make_weights(hf_config, 1)
    config, mesh = hf.moe_config(hf_config), moe_oracle.make_mesh((1, 2), AxisType.Explicit)
    params, bias = hf.load_layer(weights, hf_config, 1)
    recipes.save_model(tmp_path / "fp8", hf_config, {1: (params, bias)}, fp8=True)
    hf_config |= {"quantization_config": {"weight_block_size": [128, 128]}}
    (tmp_path / "fp8/config.json").write_text(json.dumps(hf_config))
    ((config, kept, bias),) = recipes.load_model(tmp_path / "fp8", mesh, keep_fp8=True)
    ((_, wide, _),) = recipes.load_model(tmp_path / "fp8", mesh)
    assert "layer 1: wo" in capsys.readouterr().out and kept["wi"].data.dtype.itemsize == 1
    x = jax.random.normal(jax.random.key(0), (16, 128), jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("fsdp", "ep"))))
    y = jax.jit(recipes.in_fp8, static_argnums=0)(config, kept, x).y
    assert relative_error(y, moe(wide, x, config).y) < 0.06
    recipes.save_model(tmp_path / "again", hf_config, {1: (kept, bias)}, fp8=True)
    first, again = (read_folder(tmp_path / name)[0] for name in ("fp8", "again"))
    assert all(first[name].tobytes() == again[name].tobytes() for name in first | again)


def test_the_page_shows_the_program(recipes):
    text = PAGE.read_text() + (ROOT / "docs/checkpoints.md").read_text()
    shown = re.findall(r"recipes.py\n:pyobject: (\w+)", text)
    assert all(hasattr(recipes, name) for name in shown)
    wanted = "nnx_step to_maxtext from_maxtext from_maxtext_layers moe_mlp from_levanter load_model in_fp8 save_model"
    assert set(wanted.split()) <= set(shown)
