"""Random models of `transformers`, of tiny size: our blocks, loaded from what they save, compute what theirs do.

Nothing is downloaded. Runs in the CI cell `transformers`, which installs it and torch. With EXPERTMESH_FAMILIES=<file>
the measured errors are written there, for docs/families.py.
"""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.scripts import load_script
from expertmesh.convert import main
from expertmesh.core import MeshResource, dense
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import hf, moe, param_specs
from expertmesh.flax_moe.checkpoint import Checkpoint, load_sharded
from flax_moe import moe_oracle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.transformers, pytest.mark.default_jax]

ROOT = pathlib.Path(__file__).resolve().parents[2]
WRITTEN = os.environ.get("EXPERTMESH_FAMILIES")
JITTER = 0.1
# What `transformers` reads with another's class, of the same config.
SAME_CLASS = {"kimi_k2": "deepseek_v3"}
SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "head_dim": 8}
INDEXED = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 4}
QWEN = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"linear_num_heads": 2, "linear_head_dim": 16}
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
GROUPS |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1}
GROUPS |= {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
RENAMED = {k: v for k, v in GROUPS.items() if k != "n_routed_experts"} | {"num_experts": 16}
EXAONE = {k: v for k, v in RENAMED.items() if k != "n_shared_experts"} | {"num_shared_experts": 2}
LFM2 = QWEN | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
MODELS = {
    "mixtral": ("mixtral", LOCAL),
    "qwen2": ("qwen2_moe", QWEN | SHARED | {"norm_topk_prob": False}),
    "qwen2-normalised": ("qwen2_moe", QWEN | SHARED | {"norm_topk_prob": True}),
    "qwen3": ("qwen3_moe", QWEN | {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3-not-normalised": ("qwen3_moe", QWEN | {"norm_topk_prob": False}),
    "qwen3-next": ("qwen3_next", QWEN | SHARED | LINEAR),
    "qwen3.5": ("qwen3_5_moe_text", QWEN | SHARED | LINEAR),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 4}),
    "olmoe-normalised": (
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    "flex-olmo": ("flex_olmo", {"num_experts": 8, "num_experts_per_tok": 4}),
    "deepseek-v2": (
        "deepseek_v2",
        GROUPS | LATENT | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        GROUPS | LATENT | {"topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek-v3": ("deepseek_v3", GROUPS | LATENT),
    "deepseek-v3.2": ("deepseek_v32", GROUPS | LATENT | INDEXED),
    "kimi-k2": ("kimi_k2", GROUPS | LATENT | {"n_group": 1, "topk_group": 1}),
    "glm4": ("glm4_moe", GROUPS),
    "glm4-not-normalised": ("glm4_moe", GROUPS | {"norm_topk_prob": False}),
    "glm4-lite": ("glm4_moe_lite", GROUPS | LATENT),
    "glm5": ("glm_moe_dsa", GROUPS | LATENT | INDEXED),
    "dots1": ("dots1", GROUPS),
    "solar-open": ("solar_open", GROUPS),
    "exaone": ("exaone_moe", EXAONE),
    "bailing": ("bailing_hybrid", RENAMED | LATENT | LINEAR),
    "kimi-linear": ("kimi_linear", RENAMED | LATENT | LINEAR),
    "gpt-oss": ("gpt_oss", LOCAL | {"swiglu_limit": 1.0}),
    "minimax": ("minimax", LOCAL),
    "minimax-m2": ("minimax_m2", LOCAL),
    "granite": ("granitemoe", LOCAL | {"residual_multiplier": 0.5}),
    "lfm2": ("lfm2_moe", LFM2),
    "lfm2-without-a-bias": ("lfm2_moe", LFM2 | {"use_expert_bias": False}),
    "llama4": (
        "llama4_text",
        LOCAL
        | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40},
    ),
    "jamba": ("jamba", {"num_experts": 8, "num_experts_per_tok": 2}),
    "hunyuan": ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 3}),
    "ernie": ("ernie4_5_moe", ERNIE),
    "phi": ("phimoe", LOCAL | {"num_experts_per_tok": 2, "router_jitter_noise": JITTER}),
}
sparse_mixer = load_script(ROOT / "examples/recipes.py").sparse_mixer
TOKENS = PartitionSpec(("fsdp", "ep"))


def random_model(name, **changes):
    """Experts and routers with numbers of order 1 / sqrt(fan-in), so that choices are not close."""
    model_type, options = MODELS[name]
    torch.manual_seed(0)
    known = SAME_CLASS.get(model_type, model_type)
    config = transformers.AutoConfig.for_model(known, **(SMALL | options | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for key, value in block_of(model).state_dict().items():
        value.copy_(
            torch.randn(value.shape) * (0.1 if key.endswith("bias") else value.shape[-1] ** -0.5)
        )
    return model


def config_of(model, name):
    return model.config.to_dict() | {"model_type": MODELS[name][0]}


def block_of(model):
    config = model.config.to_dict()
    layer = hf.moe_layers(config)[-1]
    return model.get_submodule(hf.layer_layout(config, layer, stacked=True).block[:-1])


def numpy_of(state):
    return {name: value.numpy() for name, value in state.items()}


def shardings(config):
    mesh = moe_oracle.make_mesh((2, 4), AxisType.Explicit)
    resource = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
    specs = param_specs(config, resource)
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}, NamedSharding(
        mesh, TOKENS
    )


def theirs(block, x, dy):
    """Their y, and the gradients of sum(y * dy) by x and by name."""
    x = torch.from_numpy(x).requires_grad_()
    y = block(x)
    y = (y[0] if isinstance(y, tuple) else y).reshape(x.shape)
    (y * torch.from_numpy(dy)).sum().backward()
    named = {name: w for name, w in block.named_parameters() if w.requires_grad}
    return y.detach().numpy(), x.grad.numpy(), {name: w.grad.numpy() for name, w in named.items()}


def ours(loaded, config, x, dy, router):
    """Our y, and the gradients by x, parameters and the router outside, if there is one."""

    def loss(params, x, router):
        outside = {} if router is None else sparse_mixer(dense(x, router.T), JITTER)
        y = moe(params, x, config, expert_bias=loaded.expert_bias, **outside).y
        return jnp.sum(y * dy), y

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, y), (grads, dx, d_router) = run(loaded.params, x, router)
    return np.asarray(y), np.asarray(dx), jax.tree.map(np.asarray, grads), d_router


@pytest.fixture(scope="module")
def record():
    """Keeps the worst errors of each model type, and writes them where the environment says so."""
    kept = {}
    yield lambda model_type, **errors: kept.update(
        {model_type: {k: max(v, kept.get(model_type, {}).get(k, 0)) for k, v in errors.items()}}
    )
    if WRITTEN is not None:
        pathlib.Path(WRITTEN).write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")


@pytest.mark.parametrize("mesh", [False, True], ids=["one-device", "2x4"])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name, mesh, record):
    """Of x and of every weight, by their names; on one device and over two of fsdp and four of ep."""
    model = random_model(name)
    hf_config, block = config_of(model, name), block_of(model)
    layer, rng = hf.moe_layers(hf_config)[-1], np.random.default_rng(0)
    x = rng.normal(size=(8, 6, 32)) * 2.0 ** rng.integers(-1, 2, size=(8, 6, 1))
    x, dy = x.astype(np.float32), rng.normal(size=x.shape).astype(np.float32)
    want, want_dx, want_grads = theirs(block, x, dy)
    config, state = hf.moe_config(hf_config, dtype=jnp.float32), numpy_of(model.state_dict())
    if mesh:
        placed, tokens = shardings(config)
        loaded = load_sharded(state, hf_config, layer, placed)
        x, dy = jax.device_put(x, tokens), jax.device_put(dy, tokens)
    else:
        loaded = hf.load_layer(state, hf_config, layer)
    layout = hf.layer_layout(hf_config, layer, stacked=True)
    router = state[layout.outside[0]] if layout.outside else None
    y, dx, grads, d_router = ours(loaded, config, x, dy, router)
    named = hf.export_layer(grads, hf_config, layer, expert_bias=loaded.expert_bias, stacked=True)
    named |= dict.fromkeys(layout.outside, d_router)
    start = layout.block
    assert set(want_grads) <= {key.removeprefix(start) for key in named}
    errors = {key: relative_error(named[start + key], w) for key, w in want_grads.items()}
    errors |= {"y": relative_error(y, want), "dx": relative_error(dx, want_dx)}
    assert max(errors.values()) < 1e-5, errors
    kind, measured = hf_config["model_type"], {"y": errors.pop("y")}
    measured["gradients"] = max(errors.values())
    record(kind, **measured)
    if WRITTEN is None:
        documented = json.loads((ROOT / "docs/families.json").read_text())[kind]
        assert all(measured[k] < 10 * documented[k] for k in measured), "see docs/families.py"


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, tmp_path):
    """From the files of save_pretrained and from the state dict; and back into both."""
    model = random_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    weights = Checkpoint(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        for key, array in safetensors.load_file(path).items():
            np.testing.assert_array_equal(weights[key], array)
    hf_config = weights.config
    assert hf.moe_config(hf_config) == hf.moe_config(model.config.to_dict())
    layer = hf.moe_layers(hf_config)[-1]
    loaded = hf.load_layer(weights, hf_config, layer)
    in_memory = hf.load_layer(numpy_of(model.state_dict()), hf_config, layer)
    for key, array in loaded.params.items():
        np.testing.assert_array_equal(in_memory.params[key], array)

    files = hf.export_layer(loaded.params, hf_config, layer, expert_bias=loaded.expert_bias)
    start = hf.layer_layout(hf_config, layer).block
    outside = hf.layer_layout(hf_config, layer).outside
    assert set(files) | set(outside) == {key for key in weights if key.startswith(start)}
    for key, array in files.items():
        np.testing.assert_array_equal(weights[key], array)
    state = hf.export_layer(
        loaded.params, hf_config, layer, expert_bias=loaded.expert_bias, stacked=True
    )
    there = hf.layer_layout(hf_config, layer, stacked=True)
    in_block = {key for key in model.state_dict() if key.startswith(there.block)}
    assert set(state) | set(there.outside) == in_block
    for key, array in state.items():
        np.testing.assert_array_equal(model.state_dict()[key], array)
    missing = model.load_state_dict(
        {k: torch.from_numpy(v) for k, v in state.items()}, strict=False
    )
    assert not missing.unexpected_keys


def test_4_bit_experts():
    """gpt-oss as it is published: the numbers that `transformers` widens."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng, start = np.random.default_rng(0), "model.layers.1.mlp.experts."
    hf_config = random_model("gpt-oss").config.to_dict()
    hf_config |= {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 64}
    state = numpy_of(random_model("gpt-oss", intermediate_size=64).state_dict())
    for name, (out, groups) in {"gate_up_proj": (128, 1), "down_proj": (32, 2)}.items():
        state[f"{start}{name}_blocks"] = rng.integers(0, 256, (8, out, groups, 16), np.uint8)
        state[f"{start}{name}_scales"] = rng.integers(100, 140, (8, out, groups), np.uint8)
        del state[start + name]
    got = hf.load_layer(state, hf_config, 1).params
    both, down = (
        convert_moe_packed_tensors(
            *(torch.from_numpy(state[f"{start}{name}{end}"]) for end in ("_blocks", "_scales"))
        )
        .float()
        .numpy()
        for name in ("gate_up_proj", "down_proj")
    )
    np.testing.assert_array_equal(
        got["wi"].astype(np.float32), np.stack([both[..., ::2], both[..., 1::2]], 2)
    )
    np.testing.assert_array_equal(got["wo"].astype(np.float32), down)


def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12) % 32, use_cache=False).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_folder_is_the_model(name, tmp_path):
    """By our names and back: the same logits."""
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


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "qwen3", "deepseek-v3", "minimax-m2"])
def test_8_bit_blocks_load(name, tmp_path):
    """As FP8Experts' numbers: `transformers` widens them on a machine without a GPU, to those that we widen."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    wide |= {"shared_expert_intermediate_size": 128}
    sizes = {key: size for key, size in wide.items() if key in SMALL | MODELS[name][1]}
    random_model(name, **sizes).save_pretrained(tmp_path / "source")
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
    assert changed and all("expert" in key for key in changed)
