"""What families' configs say of the block: its activation, its other options, and which layers have one.

Each law is a function of a config (`model_fields.py`). A law that a config cannot satisfy names the field, its value,
the rule and the remedy.
"""

from collections.abc import Callable, Sequence
from typing import Any

from expertmesh.core.ops.activation import Activation
from expertmesh.flax_moe.models.model_fields import (
    Fields,
    count,
    entries,
    get,
    must,
    name_of,
    number,
    real,
    step,
)

__all__ = [
    "after_dense",
    "after_few",
    "all_layers",
    "always_silu",
    "between",
    "biased_sigmoid",
    "biased_softmax",
    "clamped_swiglu",
    "deepseek",
    "every_step",
    "expert_biases",
    "fixed",
    "gate_bias",
    "grouped_softmax",
    "hidden_act",
    "listed",
    "optional_bias",
    "periodic",
    "router_outside",
    "shared_gate",
    "shared_width",
    "sigmoid_of_input",
    "softmax_of_all",
    "undivided_softmax",
]

# ---- activations

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "quick_gelu": "quick_gelu",
}


def hidden_act(fields: Fields) -> str:
    act = get(fields, "hidden_act")
    if act not in tuple(_ACTIVATIONS):  # what is not hashable, too
        raise ValueError(
            f"hf: hidden_act must be one of {', '.join(_ACTIVATIONS)}; got hidden_act={act!r}; "
            "replace it in the config by the nearest of these"
        )
    return _ACTIVATIONS[act]


def always_silu(fields: Fields) -> str:
    del fields
    return "silu"


def clamped_swiglu(fields: Fields) -> Activation:
    must(fields, "swiglu_alpha", 1.702, why="MoEConfig has no swish of another slope")
    return Activation(function="quick_gelu", limit=real(fields, "swiglu_limit"), up_offset=1.0)


# ---- options of the block


def softmax_of_all(fields: Fields) -> dict[str, Any]:
    """Divided by the sum of the chosen if `norm_topk_prob`."""
    return {"use_pre_softmax": not get(fields, "norm_topk_prob")}


def undivided_softmax(fields: Fields) -> dict[str, Any]:
    """Of all experts, as it is."""
    del fields
    return {"use_pre_softmax": True}


def grouped_softmax(fields: Fields) -> dict[str, Any]:
    """Of DeepSeek-V2: never divided, groups by their best expert."""
    must(fields, "scoring_func", "softmax")
    must(
        fields, "norm_topk_prob", False, why="the model of transformers does not divide the weights"
    )
    must(fields, "mlp_bias", False, why="the block's shared experts have no biases")
    method = fields.get("topk_method", "greedy")
    limited = method == "group_limited_greedy"
    if not limited:
        must(fields, "topk_method", "greedy")
    return {
        "use_pre_softmax": True,
        "scaling_factor": real(fields, "routed_scaling_factor"),
        **(_groups(fields, 1) if limited else {}),
    }


def biased_softmax(fields: Fields) -> dict[str, Any]:
    """Of Ernie: the bias is added to the softmax of all, weights are that of the chosen."""
    least = 0 if fields.get("moe_norm_min") is None else real(fields, "moe_norm_min")
    if least > 1e-12:
        raise ValueError(
            f"hf: moe_norm_min of a {name_of(fields)} must be at most 1e-12; got moe_norm_min={least}; "
            "MoEConfig divides by the sum of the chosen, whatever it is"
        )
    must(fields, "use_bias", False, why="the block's shared experts have no biases")
    return {"use_expert_bias": True}


def biased_sigmoid(fields: Fields) -> dict[str, Any]:
    """Always divided, without groups."""
    del fields
    return {"score_function": "sigmoid", "use_expert_bias": True, "normalize": True}


def optional_bias(fields: Fields) -> dict[str, Any]:
    """Of LFM2: a sigmoid without groups, with a bias if `use_expert_bias`."""
    return {
        "score_function": "sigmoid",
        "use_expert_bias": bool(get(fields, "use_expert_bias")),
        "normalize": bool(get(fields, "norm_topk_prob")),
        "scaling_factor": real(fields, "routed_scaling_factor"),
    }


def deepseek(fields: Fields) -> dict[str, Any]:
    """Of DeepSeek-V3: a biased sigmoid, groups by their two best experts."""
    must(fields, "scoring_func", "sigmoid", "noaux_tc")  # some name it by the method
    must(fields, "topk_method", "noaux_tc")
    return {
        "score_function": "sigmoid",
        "use_expert_bias": True,
        "normalize": bool(get(fields, "norm_topk_prob", "moe_renormalize")),
        "scaling_factor": real(fields, "routed_scaling_factor"),
        **_groups(fields, 2),
    }


def _groups(fields: Fields, best: int) -> dict[str, Any]:
    groups, group_topk = number(fields, "n_group", "num_expert_group"), number(fields, "topk_group")
    if group_topk > groups:
        raise ValueError(
            f"hf: topk_group of a {name_of(fields)} must be at most n_group; got topk_group={group_topk} of {groups} "
            "groups; pass the dict of config.json"
        )
    if group_topk == groups:
        return {}
    return {"num_groups": groups, "group_topk": group_topk, "group_best": best}


def sigmoid_of_input(fields: Fields) -> dict[str, Any]:
    """Of Llama-4: what an expert is given is weighted."""
    must(fields, "num_experts_per_tok", 1, why="MoEConfig(weigh_inputs=True) is of one expert")
    return {"score_function": "sigmoid", "normalize": False, "weigh_inputs": True}


def fixed(**wanted: Any) -> Callable[[Fields], dict[str, Any]]:
    """The law that these fields, where they are there, have the values by which the other laws hold."""

    def of(fields: Fields) -> dict[str, Any]:
        for key, value in wanted.items():
            must(fields, key, value)
        return {}

    return of


def router_outside(fields: Fields) -> dict[str, Any]:
    """A router that MoEConfig cannot express: `moe` is given choices and weights."""
    del fields
    return {"use_gate": False}


def gate_bias(fields: Fields) -> dict[str, Any]:
    del fields
    return {"use_gate_bias": True}


def expert_biases(fields: Fields) -> dict[str, Any]:
    del fields
    return {"use_bias": True}


def shared_width(key: str, *counts: str) -> Callable[[Fields], dict[str, Any]]:
    """The law of S: the field `key`, times the number of shared experts by the first of `counts`; 0 is none."""

    def of(fields: Fields) -> dict[str, Any]:
        width = number(fields, key)
        if counts:
            there = any(fields.get(name) is not None for name in counts)
            width *= number(fields, *counts) if there else 0
        return {"shared_expert_dim": width or None}

    return of


def shared_gate(fields: Fields) -> dict[str, Any]:
    del fields
    return {"shared_expert_gate": True}


# ---- layers


def all_layers(fields: Fields, layer: int) -> bool:
    del fields, layer
    return True


def every_step(fields: Fields, layer: int) -> bool:
    every = step(fields, "decoder_sparse_step")
    return layer not in entries(fields, "mlp_only_layers", int) and (layer + 1) % every == 0


def after_dense(fields: Fields, layer: int) -> bool:
    """By `mlp_layer_types` where it is there, else behind the first dense ones."""
    if kinds := entries(fields, "mlp_layer_types", str):
        return _kind(fields, kinds, layer) == "sparse"
    first, every = number(fields, "first_k_dense_replace"), step(fields, "moe_layer_freq")
    return layer >= first and layer % every == 0


def _kind(fields: Fields, kinds: Sequence[str], layer: int) -> str:
    if layer >= len(kinds):
        raise ValueError(
            f"hf: mlp_layer_types of a {name_of(fields)} must have an entry for each layer; got {len(kinds)}, none of "
            f"layer {layer}; pass the dict of config.json"
        )
    return kinds[layer]


def after_few(fields: Fields, layer: int) -> bool:
    return layer >= number(fields, "num_dense_layers")


def listed(fields: Fields, layer: int) -> bool:
    """By `moe_layers` where it is there, else the last of every few."""
    if fields.get("moe_layers") is not None:
        return layer in entries(fields, "moe_layers", int)
    return (layer + 1) % count(fields, "interleave_moe_layer_step") == 0


def periodic(fields: Fields, layer: int) -> bool:
    period, offset = count(fields, "expert_layer_period"), number(fields, "expert_layer_offset")
    return layer % period == offset


def between(fields: Fields, layer: int) -> bool:
    first, last = number(fields, "moe_layer_start_index"), number(fields, "moe_layer_end_index")
    inside = first <= layer and (layer <= last or last == -1)
    return inside and (layer + 1) % count(fields, "moe_layer_interval") == 0
