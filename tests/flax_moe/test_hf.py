"""Hugging Face's weights: loaded blocks compute the models' formulas, and go back bit for bit."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from expertmesh.core import Activation
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import MoEConfig, hf, moe, param_shapes
from flax_moe.hf_oracle import (
    DEEPSEEK,
    DEEPSEEK_V2,
    ERNIE,
    GPT_OSS,
    HUNYUAN,
    JAMBA,
    LING,
    LLAMA4,
    MIXTRAL,
    MODELS,
    PHI,
    QWEN2,
    QWEN3,
    make_weights,
    names_and_shapes,
    run_weighted,
)

pytestmark = pytest.mark.default_jax

LAYER = 4
# One of each law; the others are of the same ones, and go on CI's nights.
SOME = ("qwen2", "olmoe", "deepseek-v2", "deepseek", "ling", "gpt-oss", "minimax-m2", "granite")
SOME += ("llama4", "hunyuan", "ernie", "phi")


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=[] if m in SOME else pytest.mark.full) for m in MODELS],
)
def test_a_loaded_block_is_the_model(model):
    """Its output and choices, on tokens of different magnitudes, from weights that also hold other layers."""
    hf_config = MODELS[model]
    weights = make_weights(hf_config, LAYER)
    others = make_weights(hf_config, LAYER + 1, seed=1)
    rng = np.random.default_rng(2)
    x = rng.normal(size=(24, 16)) * 2.0 ** rng.integers(-2, 3, size=(24, 1))
    want, chosen, shares = run_weighted(weights, hf_config, LAYER, x)
    params, bias = hf.load_layer(others | weights, hf_config, LAYER)
    config = hf.moe_config(hf_config, dtype=jnp.float32)
    outside = {} if config.use_gate else {"topk_idx": chosen, "topk_weights": jnp.float32(shares)}
    block = jax.jit(lambda bias: moe(params, jnp.float32(x), config, expert_bias=bias, **outside))
    out = block(bias)
    assert relative_error(out.y, want) < 1e-5
    np.testing.assert_array_equal(out.topk_idx, chosen)
    if bias is not None:
        assert relative_error(block(np.zeros_like(bias)).y, want) > 0.05


@pytest.mark.parametrize("model", MODELS)
def test_a_model_in_memory(model):
    """Its names and shapes, and under them the same formula."""
    hf_config = MODELS[model]
    weights = make_weights(hf_config, LAYER)
    layer = hf.load_layer(weights, hf_config, LAYER)
    stacked = hf.export_layer(
        layer.params, hf_config, LAYER, expert_bias=layer.expert_bias, stacked=True
    )
    layouts = [hf.layer_layout(hf_config, LAYER, stacked=kind) for kind in (False, True)]
    for theirs, mine in zip(*(layout.outside for layout in layouts), strict=True):
        stacked[mine] = weights[theirs]
    shapes = names_and_shapes(hf_config, LAYER, memory=True)
    assert {name: w.shape for name, w in stacked.items()} == shapes
    x = np.random.default_rng(0).normal(size=(3, 16))
    for want, got in zip(
        *(run_weighted(w, hf_config, LAYER, x) for w in (weights, stacked)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_there_and_back(model, dtype):
    """Exported weights are the loaded ones, under either kind of names, and a tree is that of init_params."""
    hf_config = MODELS[model]
    weights = {name: w.astype(dtype) for name, w in make_weights(hf_config, LAYER).items()}
    layer = hf.load_layer(weights, hf_config, LAYER)
    outside = {n: weights.pop(n) for n in hf.layer_layout(hf_config, LAYER).outside}
    assert len(outside) == (model == "phi")
    shapes = param_shapes(16, hf.moe_config(hf_config))
    assert {name: w.shape for name, w in layer.params.items()} == shapes
    assert {w.dtype for w in layer.params.values()} == {np.dtype(dtype)}
    stacked = hf.export_layer(
        layer.params, hf_config, LAYER, expert_bias=layer.expert_bias, stacked=True
    )
    again = hf.load_layer(stacked, hf_config, LAYER)
    back = hf.export_layer(again.params, hf_config, LAYER, expert_bias=again.expert_bias)
    assert set(back) == set(weights) and len(stacked) < 10
    for name, w in weights.items():
        bias = name.endswith(("correction_bias", "expert_bias"))
        assert back[name].dtype == (np.float32 if bias else dtype), name
        assert back[name].flags["C_CONTIGUOUS"]
        np.testing.assert_array_equal(back[name], w)
    other = hf.load_layer(weights, hf_config, LAYER, dtype=np.float16)
    assert {w.dtype for w in other.params.values()} == {np.dtype(np.float16)}
    np.testing.assert_array_equal(other.expert_bias, layer.expert_bias)


def test_stacked_names_are_those_of_a_model_in_memory():
    weights = make_weights(MIXTRAL, 1)
    params, _ = hf.load_layer(weights, MIXTRAL, 1)
    stacked = hf.export_layer(params, MIXTRAL, 1, stacked=True, prefix="")
    E, F, D = 8, 24, 16
    assert {name: w.shape for name, w in stacked.items()} == {
        "layers.1.mlp.gate.weight": (E, D),
        "layers.1.mlp.experts.gate_up_proj": (E, 2 * F, D),
        "layers.1.mlp.experts.down_proj": (E, D, F),
    }
    block = "model.layers.1.block_sparse_moe.experts"
    fused = stacked["layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(fused[5, :F], weights[f"{block}.5.w1.weight"])
    np.testing.assert_array_equal(fused[5, F:], weights[f"{block}.5.w3.weight"])


def test_weights_of_8_bits_are_dequantized_by_blocks():
    """Scales of blocks of 8 x 5 on [12, 16] and [16, 12]: neither divides."""
    weights, scales, want = make_weights(DEEPSEEK, LAYER), {}, {}
    rng = np.random.default_rng(0)
    for name, w in weights.items():
        want[name] = w
        if ".experts." in name:
            scale = 2.0 ** rng.integers(-3, 3, size=(-(-w.shape[0] // 8), -(-w.shape[1] // 5)))
            scales[f"{name}_scale_inv"] = scale.astype(np.float32)
            weights[name] = w.astype(ml_dtypes.float8_e4m3fn)
            row, column = np.indices(w.shape)
            want[name] = weights[name].astype(np.float32) * scale[row // 8, column // 5]
    hf_config = DEEPSEEK | {"quantization_config": {"weight_block_size": [8, 5]}}
    got = hf.load_layer(weights | scales, hf_config, LAYER).params
    expected = hf.load_layer(want, DEEPSEEK, LAYER).params
    assert got["wi"].dtype == got["wo"].dtype == ml_dtypes.bfloat16
    assert got["shared_wi"].dtype == got["gate_kernel"].dtype == np.float32
    for name, w in expected.items():
        np.testing.assert_array_equal(got[name].astype(np.float32), w)
    with pytest.raises(ValueError, match="weight_scale_inv.*weight_block_size=None"):
        hf.load_layer(weights | scales, DEEPSEEK, LAYER)
    name = f"model.layers.{LAYER}.mlp.experts.3.up_proj.weight_scale_inv"
    with pytest.raises(ValueError, match=r"experts.3.up_proj.weight_scale_inv must be \(2, 4\)"):
        hf.load_layer(weights | scales | {name: scales[name][:1]}, hf_config, LAYER)


SIGMOID = {"score_function": "sigmoid", "use_expert_bias": True, "normalize": True}
V3 = SIGMOID | {"num_groups": 4, "group_topk": 2, "group_best": 2, "scaling_factor": 2.5}
V3 |= {"shared_expert_dim": 24}
GATED = {"shared_expert_dim": 20, "shared_expert_gate": True}
V2 = {"use_pre_softmax": True, "scaling_factor": 16.0, "shared_expert_dim": 24}
CLAMPED = Activation(function="quick_gelu", limit=0.75, up_offset=1.0)
# Sizes (E, K, F), and the other options.
CONFIGS = {
    "mixtral": ((8, 3, 24), {}),
    "qwen2": ((8, 3, 12), GATED),
    "qwen3": ((8, 3, 12), {}),
    "qwen3-not-normalised": ((8, 3, 12), {"use_pre_softmax": True}),
    "qwen3-next": ((8, 3, 12), GATED | {"use_pre_softmax": True}),
    "qwen3.5": ((8, 3, 12), GATED),
    "olmoe": ((8, 3, 24), {"use_pre_softmax": True}),
    "flex-olmo": ((8, 3, 24), {"use_pre_softmax": True}),
    "deepseek-v2": ((16, 4, 12), V2 | {"num_groups": 4, "group_topk": 2, "group_best": 1}),
    "deepseek-v2-greedy": ((16, 4, 12), V2),
    "deepseek": ((16, 4, 12), V3),
    "deepseek-not-normalised": ((16, 4, 12), V3 | {"group_topk": 3, "normalize": False}),
    "deepseek-without-groups": ((16, 4, 12), SIGMOID | {"scaling_factor": 2.5}),
    "deepseek-v3.2": ((16, 4, 12), V3),
    "kimi-k2": ((16, 4, 12), SIGMOID | {"scaling_factor": 2.5, "shared_expert_dim": 24}),
    "kimi-linear": ((16, 4, 12), V3 | {"shared_expert_dim": 12}),
    "glm4": ((16, 4, 12), V3),
    "glm4-lite": ((16, 4, 12), V3),
    "glm5": ((16, 4, 12), V3),
    "dots1": ((16, 4, 12), V3),
    "solar-open": ((16, 4, 12), V3),
    "exaone": ((16, 4, 12), V3),
    "ling": ((16, 4, 12), V3 | {"shared_expert_dim": 12}),
    "gpt-oss": (
        (8, 3, 24),
        {"use_bias": True, "use_gate_bias": True, "activation": CLAMPED},
    ),
    "minimax": ((8, 3, 24), {}),
    "minimax-m2": ((8, 3, 24), SIGMOID),
    "granite": ((8, 3, 24), {}),
    "lfm2": ((8, 3, 12), SIGMOID | {"scaling_factor": 1.5}),
    "lfm2-without-a-bias": (
        (8, 3, 12),
        SIGMOID | {"scaling_factor": 1.5, "use_expert_bias": False},
    ),
    "llama4": (
        (8, 1, 24),
        {"score_function": "sigmoid", "normalize": False, "weigh_inputs": True}
        | {"shared_expert_dim": 24},
    ),
    "jamba": ((8, 3, 24), {"use_pre_softmax": True}),
    "hunyuan": ((8, 3, 24), {"shared_expert_dim": 24}),
    "ernie": ((8, 3, 12), {"use_expert_bias": True, "shared_expert_dim": 24}),
    "phi": ((8, 2, 24), {"use_gate": False}),
}


def test_configs():
    assert set(CONFIGS) == set(MODELS)
    for model, ((E, K, F), options) in CONFIGS.items():
        wanted = MoEConfig(num_experts=E, top_k=K, expert_dim=F, **options)
        assert hf.moe_config(MODELS[model]) == wanted, model
    chosen = hf.moe_config(MIXTRAL, dtype=jnp.float32, aux_loss_coeff=0.5, capacity_factor=2.0)
    assert (chosen.dtype, chosen.aux_loss_coeff, chosen.capacity_factor) == (jnp.float32, 0.5, 2.0)
    renamed = {k: v for k, v in QWEN3.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert hf.moe_config(renamed) == hf.moe_config(QWEN3)
    assert hf.moe_config(HUNYUAN | {"moe_topk": [3, 3]}) == hf.moe_config(HUNYUAN)
    assert hf.moe_config(MIXTRAL | {"hidden_act": "gelu"}).activation == "gelu_exact"
    assert set(hf.MODEL_TYPES) == {config["model_type"] for config in MODELS.values()}


def test_layers_with_a_block():
    assert hf.moe_layers(MIXTRAL) == (0, 1)
    assert hf.moe_layers(QWEN3) == hf.moe_layers(QWEN2) == (1, 5)
    assert hf.moe_layers(DEEPSEEK) == hf.moe_layers(DEEPSEEK_V2) == (3, 4)
    assert hf.moe_layers(DEEPSEEK | {"moe_layer_freq": 2}) == (4,)
    assert hf.moe_layers(JAMBA) == (1, 4)
    assert hf.moe_layers(LING) == (1, 3, 4)
    assert hf.moe_layers(MODELS["lfm2"]) == (2, 3, 4)
    assert hf.moe_layers(LLAMA4) == (1, 3, 5)
    assert hf.moe_layers(LLAMA4 | {"moe_layers": [0, 2]}) == (0, 2)
    assert hf.moe_layers(ERNIE) == (3, 5)
    assert hf.moe_layers(ERNIE | {"moe_layer_interval": 1, "moe_layer_end_index": -1}) == (
        2,
        3,
        4,
        5,
        6,
    )


def test_a_router_outside():
    """Its weight is not loaded, nor is one exported."""
    params, _ = hf.load_layer(make_weights(PHI, 1), PHI, 1)
    assert set(params) == {"wi", "wo"}
    with pytest.raises(ValueError, match="of a phimoe must have the names wi, wo; got also gate_k"):
        hf.export_layer(params | {"gate_kernel": np.zeros((16, 8), np.float32)}, PHI, 1)
    with pytest.raises(ValueError, match="gate_kernel.*or pass `logits` of a router outside"):
        moe(params, jnp.zeros((4, 16)), hf.moe_config(PHI))


def test_a_model_of_several_parts_is_read_by_its_text():
    """Its layers are where `prefix` says."""
    several = {"model_type": "llama4", "text_config": LLAMA4, "vision_config": {"hidden_size": 9}}
    assert hf.moe_config(several) == hf.moe_config(LLAMA4)
    assert hf.moe_layers(several) == hf.moe_layers(LLAMA4)
    weights = {f"language_model.{n}": w for n, w in make_weights(LLAMA4, 3).items()}
    prefix = "language_model.model."
    params, _ = hf.load_layer(weights, several, 3, prefix=prefix)
    back = hf.export_layer(params, several, 3, prefix=prefix)
    assert set(back) == set(weights)
    for name, w in weights.items():
        np.testing.assert_array_equal(back[name], w)
    with pytest.raises(ValueError, match="got model_type='llava'"):
        hf.moe_config({"model_type": "llava", "text_config": {"model_type": "llama"}})


def without(mapping, key):
    return {k: v for k, v in mapping.items() if k != key}


@pytest.mark.parametrize(
    "changed, words",
    [
        (MIXTRAL | {"model_type": "gpt2"}, ["model_type must be one of mixtral", "'gpt2'"]),
        (without(MIXTRAL, "num_local_experts"), ["mixtral must have", "or num_local_experts"]),
        (without(QWEN3, "norm_topk_prob"), ["qwen3_moe must have norm_topk_prob"]),
        (MIXTRAL | {"hidden_act": "tanh"}, ["hidden_act='tanh'", "silu"]),
        (DEEPSEEK | {"n_group": 16, "topk_group": 8}, ["group_best=2", "16 experts"]),
        (
            DEEPSEEK | {"n_group": 2, "topk_group": 3},
            ["topk_group of", "at most n_group; got", "=3"],
        ),
        (
            MIXTRAL | {"num_local_experts": "8"},
            ["num_local_experts of a mixtral must be an int", "'8'"],
        ),
        (
            DEEPSEEK | {"scoring_func": "softmax"},
            ["scoring_func of a deepseek_v3 must be 'sigmoid'"],
        ),
        (DEEPSEEK | {"topk_method": "greedy"}, ["topk_method of", "'noaux_tc'; got", "'greedy'"]),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, ["topk_method of a deepseek_v2", "'greedy'"]),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, ["norm_topk_prob of", "False; got", "=True"]),
        (DEEPSEEK_V2 | {"mlp_bias": True}, ["mlp_bias of a deepseek_v2", "no biases"]),
        (GPT_OSS | {"swiglu_alpha": 1.5}, ["swiglu_alpha of a gpt_oss must be 1.702", "1.5"]),
        (LLAMA4 | {"num_experts_per_tok": 2}, ["num_experts_per_tok of", "must be 1", "=2"]),
        (HUNYUAN | {"moe_topk": [3, 4]}, ["moe_topk or", "the same in all layers", "[3, 4]"]),
        (ERNIE | {"moe_norm_min": 1e-3}, ["moe_norm_min of", "at most 1e-12", "0.001"]),
        (MODELS["minimax"] | {"shared_intermediate_size": 9}, ["shared_intermediate_size=9"]),
        (MODELS["minimax-m2"] | {"use_routing_bias": False}, ["use_routing_bias of", "True; got"]),
        (LING | {"score_function": "softmax"}, ["score_function of", "'sigmoid'; got"]),
        (ERNIE | {"moe_norm_min": "0"}, ["moe_norm_min of", "must be a number; got '0'"]),
        (DEEPSEEK | {"n_shared_experts": 1.0}, ["n_shared_experts or", "must be an int; got 1.0"]),
        (ERNIE | {"use_bias": True}, ["use_bias of a ernie4_5_moe", "no biases"]),
    ],
    ids=lambda value: value[0][:24] if isinstance(value, list) else "",
)
def test_configs_that_are_refused(changed, words):
    with pytest.raises(ValueError) as info:
        hf.moe_config(changed)
    assert all(word in str(info.value) for word in words), str(info.value)


def test_layers_that_no_model_has():
    for changed, words in (
        ({"num_hidden_layers": "2"}, "num_hidden_layers of a deepseek_v3 must be an int; got '2'"),
        ({"moe_layer_freq": 0}, "moe_layer_freq of a deepseek_v3 must be at least 1; got 0"),
        (
            {"mlp_layer_types": ["dense"]},
            "must have an entry for each layer; got 1, none of layer 1",
        ),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types of .* must be a list of str; got 'dense'"),
    ):
        with pytest.raises(ValueError, match=words):
            hf.moe_layers(DEEPSEEK | changed)
    with pytest.raises(TypeError, match="hf: the config must be a mapping; got a str"):
        hf.moe_config("mixtral")


# What a config may have beside what the examples have.
MORE = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"] * 9,
    "moe_layers": [1],
    "moe_layer_freq": 1,
    "moe_norm_min": 1e-12,
    "num_shared_experts": 1,
    "text_config": None,
    "quantization_config": None,
}


@pytest.mark.parametrize("model", MODELS)
def test_a_value_of_another_type_is_a_value_error(model):
    """Or no error; whatever the field."""
    for config in (MODELS[model], MORE | MODELS[model]):
        for key, value in itertools.product(config, (None, "x", 0, -1, 1.5, [], {})):
            for read in (hf.moe_config, hf.moe_layers, lambda fields: hf.layer_layout(fields, 1)):
                with contextlib.suppress(ValueError):
                    read(config | {key: value})


def test_weights_of_integers_are_refused():
    weights = {name: w.astype(np.int32) for name, w in make_weights(QWEN3, LAYER).items()}
    with pytest.raises(ValueError, match="weight must be floating point; got dtype=int32"):
        hf.load_layer(weights, QWEN3, LAYER)
    weights = make_weights(DEEPSEEK, LAYER)
    bias = f"model.layers.{LAYER}.mlp.gate.e_score_correction_bias"
    with pytest.raises(ValueError, match="_bias must be floating point; got dtype=int64"):
        hf.load_layer(weights | {bias: weights[bias].astype(int)}, DEEPSEEK, LAYER)


def test_errors_name_what_is_missing_or_of_another_shape():
    weights = make_weights(QWEN3, LAYER)
    start = f"model.layers.{LAYER}.mlp."
    few = {k: w for k, w in weights.items() if ".experts.7." not in k and "s.2.up" not in k}
    with pytest.raises(ValueError) as info:
        hf.load_layer(few, QWEN3, LAYER)
    assert f"missing 4: {start}experts.2.up_proj.weight, {start}experts.7.gate_proj" in str(
        info.value
    )
    assert str(info.value).count("experts.") == 3 and ", ...;" in str(info.value)
    name = f"{start}experts.1.down_proj.weight"
    with pytest.raises(ValueError) as info:
        hf.load_layer(weights | {name: weights[name].T}, QWEN3, LAYER)
    assert f"{name} must be (16, 12)" in str(info.value) and "(12, 16)" in str(info.value)
    with pytest.raises(ValueError, match="missing 25"):
        hf.load_layer(weights, QWEN3, LAYER, prefix="language_model.")
    assert len(names_and_shapes(QWEN3, LAYER)) == 25
    params, _ = hf.load_layer(weights, QWEN3, LAYER)
    with pytest.raises(ValueError, match=r"of a qwen3_moe must be of shape None; got .* \(8,\)"):
        hf.export_layer(params, QWEN3, LAYER, expert_bias=np.zeros(8))
    with pytest.raises(ValueError, match="export_layer: wo must be"):
        hf.export_layer(params | {"wo": params["wo"][:, :-1]}, QWEN3, LAYER)
    biased = params | {"wi_bias": np.zeros((8, 2, 12)), "wo_bias": np.zeros((8, 16))}
    with pytest.raises(ValueError, match="of a qwen3_moe must have .*got also wi_bias, wo_bias"):
        hf.export_layer(biased, QWEN3, LAYER)
    with pytest.raises(ValueError, match="of a qwen3_moe must have .*got also gate_bias"):
        hf.export_layer(params | {"gate_bias": np.zeros(8)}, QWEN3, LAYER)
    deep, _ = hf.load_layer(make_weights(DEEPSEEK, LAYER), DEEPSEEK, LAYER)
    for bias, said in ((None, "None"), (np.zeros(8), r"\(8,\)")):
        with pytest.raises(ValueError, match=rf"shape \(16,\); got expert_bias of shape {said};"):
            hf.export_layer(deep, DEEPSEEK, LAYER, expert_bias=bias)
