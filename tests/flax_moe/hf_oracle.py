"""The blocks of Mixtral, Qwen3-MoE and DeepSeek-V3 in float64 NumPy, by Hugging Face's names; weights for them."""

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
MODELS = {
    "mixtral": MIXTRAL,
    "qwen3": QWEN3,
    "qwen3-not-normalised": QWEN3 | {"norm_topk_prob": False},
    "deepseek": DEEPSEEK,
    "deepseek-not-normalised": DEEPSEEK | {"topk_group": 3, "norm_topk_prob": False},
    "deepseek-without-groups": DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 0},
}


def names_and_shapes(config, layer):
    """As the models' checkpoints have them."""
    D = config["hidden_size"]
    if config["model_type"] == "mixtral":
        block, F, E = "block_sparse_moe", config["intermediate_size"], config["num_local_experts"]
        projections = {"w1": (F, D), "w2": (D, F), "w3": (F, D)}
    else:
        block, F = "mlp", config["moe_intermediate_size"]
        E = config.get("num_experts") or config["n_routed_experts"]
        projections = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    start = f"model.layers.{layer}.{block}."
    shapes = {f"{start}gate.weight": (E, D)}
    for e in range(E):
        for name, shape in projections.items():
            shapes[f"{start}experts.{e}.{name}.weight"] = shape
    if config["model_type"] == "deepseek_v3":
        shapes[f"{start}gate.e_score_correction_bias"] = (E,)
        if S := config["n_shared_experts"] * F:
            for name, shape in (
                ("gate_proj", (S, D)),
                ("up_proj", (S, D)),
                ("down_proj", (D, S)),
            ):
                shapes[f"{start}shared_experts.{name}.weight"] = shape
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


def softmax_choice(logits, config):
    """Of all experts, then the best, then normalised where the model does."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    chosen = np.argsort(-p, kind="stable")[: config["num_experts_per_tok"]]
    w = p[chosen]
    return chosen, w / w.sum() if config.get("norm_topk_prob", True) else w


def sigmoid_choice(logits, bias, config):
    s = 1 / (1 + np.exp(-logits))
    by = (s + bias).reshape(config["n_group"], -1)
    if config["n_group"] > 1:
        totals = np.sort(by, axis=1)[:, -2:].sum(axis=1)
        out = np.argsort(-totals, kind="stable")[config["topk_group"] :]
        by[out] = -np.inf
    chosen = np.argsort(-by.ravel(), kind="stable")[: config["num_experts_per_tok"]]
    total = s[chosen].sum() if config["norm_topk_prob"] else 1
    return chosen, s[chosen] / total * config["routed_scaling_factor"]


def run(weights, config, layer, x):
    """The block on tokens [T, D]: the output, and the experts of each token in the order of their scores."""
    w = {
        name.split(".", 4)[4]: array.astype(np.float64)
        for name, array in weights.items()
        if name.startswith(f"model.layers.{layer}.")
    }
    mixtral = config["model_type"] == "mixtral"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    y, choices = np.zeros(x.shape), []
    for t, token in enumerate(x.astype(np.float64)):
        logits = w["gate.weight"] @ token
        if config["model_type"] == "deepseek_v3":
            bias = w["gate.e_score_correction_bias"]
            chosen, p = sigmoid_choice(logits, bias, config)
        else:
            chosen, p = softmax_choice(logits, config)
        for e, weight in zip(chosen, p, strict=True):
            y[t] += weight * feed_forward(token, *(w[f"experts.{e}.{n}.weight"] for n in names))
        if config.get("n_shared_experts"):
            y[t] += feed_forward(token, *(w[f"shared_experts.{n}.weight"] for n in names))
        choices.append(chosen)
    return y, np.array(choices)
