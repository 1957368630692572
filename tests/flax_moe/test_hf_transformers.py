"""Random models of `transformers`, of tiny size: our blocks, loaded from what they save, compute what theirs do.

Nothing is downloaded. Runs in the CI cell `transformers`, which installs it and torch.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.convert import main
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import hf, moe
from expertmesh.flax_moe.checkpoint import Checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.transformers, pytest.mark.default_jax]

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 4,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MODELS = {
    "mixtral": (transformers.MixtralConfig, {"num_hidden_layers": 1, "num_local_experts": 8}),
    "qwen3": (
        transformers.Qwen3MoeConfig,
        {"num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16}
        | {"norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3-not-normalised": (
        transformers.Qwen3MoeConfig,
        {"num_hidden_layers": 1, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16}
        | {"norm_topk_prob": False},
    ),
    "deepseek": (
        transformers.DeepseekV3Config,
        {"num_hidden_layers": 2, "n_routed_experts": 16, "moe_intermediate_size": 24}
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"v_head_dim": 16, **LATENT},
    ),
}


def random_model(name):
    """Experts and routers with numbers of order 1 / sqrt(fan-in), so that choices are not close."""
    make, options = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**SMALL, **options)).float().eval()
    for key, value in model.state_dict().items():
        if value.is_floating_point() and ".mlp." in key:
            value.copy_(torch.randn(value.shape) * value.shape[-1] ** -0.5)
    return model


def numpy_of(state):
    return {name: value.numpy() for name, value in state.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_saved_model_computes_the_same_here(name, tmp_path):
    """From the files of save_pretrained and from the state dict; and back into both."""
    model = random_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    weights = Checkpoint(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        for key, array in safetensors.load_file(path).items():
            np.testing.assert_array_equal(weights[key], array)
    hf_config = model.config.to_dict()
    (layer,) = hf.moe_layers(hf_config)
    loaded = hf.load_layer(weights, hf_config, layer)
    in_memory = hf.load_layer(numpy_of(model.state_dict()), hf_config, layer)
    for key, array in loaded.params.items():
        np.testing.assert_array_equal(in_memory.params[key], array)

    x = np.random.default_rng(0).normal(size=(2, 12, 32)).astype(np.float32)
    with torch.no_grad():
        want = model.model.layers[layer].mlp(torch.from_numpy(x)).numpy()
    config = hf.moe_config(hf_config, dtype=jnp.float32)
    block = jax.jit(lambda params, x: moe(params, x, config, expert_bias=loaded.expert_bias))
    assert relative_error(block(loaded.params, x).y, want) < 1e-5

    files = hf.export_layer(loaded.params, hf_config, layer, expert_bias=loaded.expert_bias)
    for key, array in files.items():
        np.testing.assert_array_equal(weights[key], array)
    state = hf.export_layer(
        loaded.params, hf_config, layer, expert_bias=loaded.expert_bias, stacked=True
    )
    mlp = f"model.layers.{layer}.mlp."
    assert set(state) == {key for key in model.state_dict() if key.startswith(mlp)}
    missing = model.load_state_dict(
        {k: torch.from_numpy(v) for k, v in state.items()}, strict=False
    )
    assert not missing.unexpected_keys


def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12) % 32).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_folder_is_the_model(name, tmp_path):
    """By our names and back: the same logits. In 8-bit blocks, which it widens here: those of the widened folder."""
    model = random_model(name)
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    names = ("ours", "expertmesh"), ("back", "huggingface")
    source = tmp_path / "source"
    for target, to in names:
        assert main([str(source), str(tmp_path / target), "--to", to, "--quiet"]) == 0
        source = tmp_path / target
    np.testing.assert_array_equal(logits(tmp_path / "back"), logits(tmp_path / "source"))
    for path in (tmp_path / "back").glob("*.safetensors"):
        library = safetensors.load_file(path)
        assert library and all(w.dtype == np.float32 for w in library.values())


@pytest.mark.parametrize("name", MODELS)
def test_8_bit_blocks_load(name, tmp_path):
    """As FP8Experts' numbers: `transformers` widens them on a machine without a GPU, to those that we widen."""
    make, options = MODELS[name]
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    sizes = {key: size for key, size in wide.items() if key in SMALL | options}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**(SMALL | options | sizes)))
    model.float().save_pretrained(tmp_path / "source")
    for source, target, more in (
        ("source", "fp8", ["--fp8"]),
        ("fp8", "wide", ["--dtype=float32"]),
    ):
        command = [str(tmp_path / source), str(tmp_path / target), "--to", "huggingface", "--quiet"]
        assert main([*command, *more]) == 0
    said = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "fp8"
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").state_dict()
    fp8 = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8").state_dict()
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source").state_dict()
    assert fp8.keys() == want.keys()
    for key, w in want.items():
        np.testing.assert_allclose(fp8[key].float(), w.float(), rtol=2**-7, atol=0, err_msg=key)
    changed = [key for key in want if not torch.equal(want[key], exact[key])]
    assert changed and all("experts" in key for key in changed)
