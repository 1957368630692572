"""The blocks of Hugging Face's models in float64 NumPy, by the names of their files; weights for them."""

import numpy as np

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 6,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "hidden_act": "silu",
}
QWEN3_EACH = QWEN3 | {"num_hidden_layers": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
}
QWEN2 = QWEN3 | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 20}
OLMOE = MIXTRAL | {"model_type": "olmoe", "num_experts": 8, "norm_topk_prob": False}
DEEPSEEK_V2 = DEEPSEEK | {
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
}
GLM4 = {k: v for k, v in DEEPSEEK.items() if k not in ("scoring_func", "topk_method")}
GLM4 |= {"model_type": "glm4_moe"}
LING = {
    "model_type": "bailing_hybrid",
    "hidden_size": 16,
    "moe_intermediate_size": 12,
    "num_experts": 16,
    "num_shared_experts": 1,
    "num_experts_per_token": 4,
    "num_hidden_layers": 5,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
}
EXAONE = {k: v for k, v in GLM4.items() if k not in ("n_routed_experts", "n_shared_experts")}
EXAONE |= {"model_type": "exaone_moe", "num_experts": 16, "num_shared_experts": 2}
LFM2 = {
    "model_type": "lfm2_moe",
    "hidden_size": 16,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
    "num_dense_layers": 2,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
GPT_OSS = MIXTRAL | {"model_type": "gpt_oss", "swiglu_alpha": 1.702, "swiglu_limit": 0.75}
GRANITE = MIXTRAL | {"model_type": "granitemoe"}
LLAMA4 = MIXTRAL | {
    "model_type": "llama4_text",
    "num_experts_per_tok": 1,
    "num_hidden_layers": 6,
    "interleave_moe_layer_step": 2,
}
JAMBA = MIXTRAL | {
    "model_type": "jamba",
    "num_experts": 8,
    "num_hidden_layers": 6,
    "expert_layer_period": 3,
    "expert_layer_offset": 1,
}
HUNYUAN = MIXTRAL | {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": 3}
ERNIE = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 16,
    "moe_intermediate_size": 12,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_k": 3,
    "moe_norm_min": 1e-12,
    "use_bias": False,
    "num_hidden_layers": 7,
    "moe_layer_start_index": 2,
    "moe_layer_end_index": 5,
    "moe_layer_interval": 2,
    "hidden_act": "silu",
}
PHI = MIXTRAL | {"model_type": "phimoe", "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
MODELS = {
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3-not-normalised": QWEN3 | {"norm_topk_prob": False},
    "qwen3-next": QWEN2 | {"model_type": "qwen3_next", "norm_topk_prob": False},
    "qwen3.5": QWEN2 | {"model_type": "qwen3_5_moe_text"},
    "olmoe": OLMOE,
    "flex-olmo": OLMOE | {"model_type": "flex_olmo"},
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v2-greedy": DEEPSEEK_V2 | {"topk_method": "greedy"},
    "deepseek": DEEPSEEK,
    "deepseek-not-normalised": DEEPSEEK | {"topk_group": 3, "norm_topk_prob": False},
    "deepseek-without-groups": DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 0},
    "deepseek-v3.2": GLM4 | {"model_type": "deepseek_v32"},
    "kimi-k2": DEEPSEEK | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
    "kimi-linear": LING | {"model_type": "kimi_linear"},
    "glm4": GLM4,
    "glm4-lite": GLM4 | {"model_type": "glm4_moe_lite"},
    "glm5": GLM4 | {"model_type": "glm_moe_dsa"},
    "dots1": GLM4 | {"model_type": "dots1"},
    "solar-open": GLM4 | {"model_type": "solar_open"},
    "exaone": EXAONE,
    "ling": LING,
    "gpt-oss": GPT_OSS,
    "minimax": MIXTRAL | {"model_type": "minimax"},
    "minimax-m2": MIXTRAL | {"model_type": "minimax_m2"},
    "granite": GRANITE,
    "lfm2": LFM2,
    "lfm2-without-a-bias": LFM2 | {"use_expert_bias": False},
    "llama4": LLAMA4,
    "jamba": JAMBA,
    "hunyuan": HUNYUAN,
    "ernie": ERNIE,
    "phi": PHI,
}

# Lines of names and sizes, as a listing of the files has them; # is an expert's number.
ROUTER = "gate.weight E D\n"
EACH = """
experts.#.gate_proj.weight F D
experts.#.up_proj.weight F D
experts.#.down_proj.weight D F
"""
EACH_W = """
experts.#.w1.weight F D
experts.#.w2.weight D F
experts.#.w3.weight F D
"""
TWO = """
experts.gate_up_proj E 2F D
experts.down_proj E D F
"""
TWO_STRAIGHT = """
experts.gate_up_proj E D 2F
experts.down_proj E F D
"""
SHARED = """
shared_experts.gate_proj.weight S D
shared_experts.up_proj.weight S D
shared_experts.down_proj.weight D S
"""
ONE_SHARED = SHARED.replace("experts", "expert")
GATED = ONE_SHARED + "shared_expert_gate.weight 1 D\n"
HUNYUAN_SHARED = "gate.wg.weight E D\n" + SHARED.replace("shared_experts", "shared_mlp")
BIAS = "gate.e_score_correction_bias E\n"
GPT_OSS_LINES = f"""
router.weight E D
router.bias E
experts.gate_up_proj_bias E 2F
experts.down_proj_bias E D
{TWO_STRAIGHT}
"""
LLAMA4_LINES = f"router.weight E D\n{TWO_STRAIGHT}{ONE_SHARED}"
GRANITE_FILES = """
router.layer.weight E D
input_linear.weight E 2F D
output_linear.weight E D F
"""
DEEPSEEK_LINES = ROUTER + SHARED + BIAS
# By model type: the block in files, its lines; the block in memory, its lines.
NAMES = {
    "mixtral": ("block_sparse_moe", ROUTER + EACH_W, "mlp", ROUTER + TWO),
    "qwen2_moe": ("mlp", ROUTER + EACH + GATED, "mlp", ROUTER + TWO + GATED),
    "qwen3_moe": ("mlp", ROUTER + EACH, "mlp", ROUTER + TWO),
    "deepseek_v2": ("mlp", ROUTER + EACH + SHARED, "mlp", ROUTER + TWO + SHARED),
    "deepseek_v3": ("mlp", DEEPSEEK_LINES + EACH, "mlp", DEEPSEEK_LINES + TWO),
    "bailing_hybrid": (
        "mlp",
        ROUTER + SHARED + "gate.expert_bias E\n" + EACH,
        "mlp",
        DEEPSEEK_LINES + TWO,
    ),
    "exaone_moe": (
        "mlp",
        ROUTER + SHARED + "e_score_correction_bias E\n" + EACH,
        "mlp",
        DEEPSEEK_LINES + TWO,
    ),
    "kimi_linear": ("block_sparse_moe", DEEPSEEK_LINES + EACH_W, "mlp", DEEPSEEK_LINES + TWO),
    "gpt_oss": ("mlp", GPT_OSS_LINES, "mlp", GPT_OSS_LINES),
    "minimax_m2": (
        "block_sparse_moe",
        ROUTER + EACH_W + "e_score_correction_bias E\n",
        "mlp",
        ROUTER + TWO + "e_score_correction_bias E\n",
    ),
    "granitemoe": (
        "block_sparse_moe",
        GRANITE_FILES,
        "block_sparse_moe",
        "router.weight E D" + TWO,
    ),
    "lfm2_moe": (
        "feed_forward",
        ROUTER + EACH_W + "expert_bias E\n",
        "feed_forward",
        ROUTER + TWO + "expert_bias E\n",
    ),
    "llama4_text": ("feed_forward", LLAMA4_LINES, "feed_forward", LLAMA4_LINES),
    "jamba": (
        "feed_forward",
        "router.weight E D" + EACH,
        "feed_forward",
        "router.weight E D" + TWO,
    ),
    "hunyuan_v1_moe": ("mlp", HUNYUAN_SHARED + EACH, "mlp", HUNYUAN_SHARED + TWO),
    "ernie4_5_moe": (
        "mlp",
        ROUTER + EACH + SHARED + "moe_statics.e_score_correction_bias 1 E\n",
        "mlp",
        ROUTER + TWO + SHARED + "gate.moe_statics.e_score_correction_bias 1 E\n",
    ),
    "phimoe": ("block_sparse_moe", ROUTER + EACH_W, "mlp", "router.weight E D" + TWO),
}
SAME = {
    "qwen2_moe": ["qwen3_next", "qwen3_5_moe_text"],
    "qwen3_moe": ["olmoe", "flex_olmo"],
    "mixtral": ["minimax"],
    "deepseek_v3": ["deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"]
    + ["dots1", "solar_open"],
}
NAMES |= {other: NAMES[name] for name, others in SAME.items() for other in others}
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def first(config, keys, default=None):
    return next((config[key] for key in keys if key in config), default)


def sizes(config):
    F = first(config, ("moe_intermediate_size", "intermediate_size"))
    S = config.get("shared_expert_intermediate_size", first(config, COUNTS, 1) * F)
    E = first(config, EXPERTS)
    return {"D": config["hidden_size"], "E": E, "F": F, "2F": 2 * F, "S": S, "1": 1}


def names_and_shapes(config, layer, *, memory=False):
    """As the models' checkpoints have them, or the models in memory."""
    block, lines = NAMES[config["model_type"]][2 * memory : 2 * memory + 2]
    size, shapes = sizes(config), {}
    for name, *dims in map(str.split, filter(None, lines.splitlines())):
        shape = tuple(size[dim] for dim in dims)
        biased = config.get("use_expert_bias", True) or name != "expert_bias"
        for e in range(size["E"]) if "#" in name else [""]:
            if biased and 0 not in shape:
                shapes[f"model.layers.{layer}.{block}.{name.replace('#', str(e))}"] = shape
    return shapes


def make_weights(config, layer, seed=0):
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.normal(size=shape) * shape[-1] ** -0.5
        for name, shape in names_and_shapes(config, layer).items()
    }
    return {name: array.astype(np.float32) for name, array in weights.items()}


def feed_forward(x, gate, up, down):
    h = gate @ x
    return down @ (h / (1 + np.exp(-h)) * (up @ x))


def clamped(x, w, e, gate, up, down, limit):
    """Of gpt-oss."""
    bias = w["experts.gate_up_proj_bias"][e]
    g, u = np.minimum(gate @ x + bias[::2], limit), np.clip(up @ x + bias[1::2], -limit, limit)
    return down @ (g / (1 + np.exp(-1.702 * g)) * (u + 1)) + w["experts.down_proj_bias"][e]


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def best(scores, count):
    return np.argsort(-scores, kind="stable")[:count]


def softmax_choice(logits, config, bias=0.0):
    """Of all experts, then the best, then normalised where the model does."""
    p = softmax(logits)
    chosen = best(p + bias, first(config, ("moe_topk", "moe_k", "num_experts_per_tok")))
    w = p[chosen]
    # Of some it is always so, and their configs have no such field.
    fixed = {"qwen3_5_moe_text": True, "jamba": False}.get(config["model_type"])
    divided = config.get("norm_topk_prob", True) if fixed is None else fixed
    return chosen, w / w.sum() if divided else w


def sigmoid_choice(logits, config, bias):
    s = 1 / (1 + np.exp(-logits))
    groups = first(config, ("n_group", "num_expert_group"), 1)
    by = (s + bias).reshape(groups, -1)
    if groups > 1:
        totals = np.sort(by, axis=1)[:, -2:].sum(axis=1)
        by[best(-totals, groups - config["topk_group"])] = -np.inf
    chosen = best(by.ravel(), first(config, ("num_experts_per_tok", "num_experts_per_token")))
    divided = first(config, ("norm_topk_prob", "moe_renormalize"), True)
    factor = config.get("routed_scaling_factor", 1)
    return chosen, s[chosen] / (s[chosen].sum() if divided else 1) * factor


def grouped_softmax_choice(logits, config):
    """Of DeepSeek-V2: groups by their best expert."""
    p = softmax(logits)
    by = p.reshape(config["n_group"], -1).copy()
    if config["topk_method"] == "group_limited_greedy":
        by[best(-by.max(axis=1), config["n_group"] - config["topk_group"])] = 0
    chosen = best(by.ravel(), config["num_experts_per_tok"])
    return chosen, p[chosen] * config["routed_scaling_factor"]


def sparse_mixer(logits, config):
    """Of Phi-3.5-MoE: one after the other, each weighed among those that are near."""
    chosen, weights, left = [], [], set(range(len(logits)))
    for _ in range(2):
        e = max(left, key=lambda i: logits[i])
        top = logits[e]
        near = [
            i
            for i in left
            if (top - logits[i]) / max(abs(logits[i]), top) <= 2 * config["router_jitter_noise"]
        ]
        weights.append(softmax(logits[near])[near.index(e)])
        chosen.append(e)
        left.remove(e)
    return np.array(chosen), np.array(weights)


def choice(logits, config, bias):
    kind = config["model_type"]
    if kind == "phimoe":
        return sparse_mixer(logits, config)
    if kind == "deepseek_v2":
        return grouped_softmax_choice(logits, config)
    if kind == "llama4_text":
        chosen = best(logits, 1)
        return chosen, 1 / (1 + np.exp(-logits[chosen]))
    if kind == "ernie4_5_moe":
        return softmax_choice(logits, config, bias)
    if kind == "lfm2_moe":
        return sigmoid_choice(logits, config, 0 if bias is None else bias)
    return softmax_choice(logits, config) if bias is None else sigmoid_choice(logits, config, bias)


def expert(w, e, config):
    """Gate, up and down projections of one, [out, in], wherever they lie."""
    for names in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        if f"experts.{e}.{names[0]}.weight" in w:
            return tuple(w[f"experts.{e}.{name}.weight"] for name in names)
    both = first(w, ("experts.gate_up_proj", "input_linear.weight"))[e]
    down = first(w, ("experts.down_proj", "output_linear.weight"))[e]
    if config["model_type"] in ("gpt_oss", "llama4_text"):
        both, down = both.T, down.T
    if config["model_type"] == "gpt_oss":
        return both[::2], both[1::2], down
    return (*np.split(both, 2), down)


def shared(w, x):
    for start in ("shared_experts", "shared_expert", "shared_mlp"):
        if f"{start}.up_proj.weight" in w:
            projections = ("gate_proj", "up_proj", "down_proj")
            y = feed_forward(x, *(w[f"{start}.{name}.weight"] for name in projections))
            gate = w.get("shared_expert_gate.weight")
            return y if gate is None else y / (1 + np.exp(-(gate[0] @ x)))
    return 0


def router(w):
    return first(w, ("gate.weight", "router.weight", "router.layer.weight", "gate.wg.weight"))


def run(weights, config, layer, x):
    """The block on tokens [T, D]: the output, and the experts of each token in the order of their scores."""
    return run_weighted(weights, config, layer, x)[:2]


def run_weighted(weights, config, layer, x):
    """The same, and the weights of the experts."""
    w = {
        name.split(".", 4)[4]: array.astype(np.float64)
        for name, array in weights.items()
        if name.startswith(f"model.layers.{layer}.")
    }
    bias = next((w[n].ravel() for n in w if n.endswith(("correction_bias", "expert_bias"))), None)
    y, choices, shares = np.zeros(x.shape), [], []
    for t, token in enumerate(x.astype(np.float64)):
        logits = router(w) @ token + w.get("router.bias", 0)
        chosen, p = choice(logits, config, bias)
        for e, weight in zip(chosen, p, strict=True):
            if config["model_type"] == "gpt_oss":
                y[t] += weight * clamped(token, w, e, *expert(w, e, config), config["swiglu_limit"])
            elif config["model_type"] == "llama4_text":
                y[t] += feed_forward(weight * token, *expert(w, e, config))
            else:
                y[t] += weight * feed_forward(token, *expert(w, e, config))
        y[t] += shared(w, token)
        choices.append(chosen)
        shares.append(p)
    return y, np.array(choices), np.array(shares)
