"""The model families that `hf` knows: one row each with names, places, router and layers. This module has data only.

A row's `files` are the arrays of a checkpoint, its `memory` those of a model of `transformers` >= 5. Both are made of
the groups of arrays below. A few laws of `family_laws.py` say how the config determines the block. A new family is a
row of FAMILIES, and a function there if it has its own law.

Dimension key: D model width, E experts, F expert width, S width of the shared experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from expertmesh.core.ops.activation import Activation
from expertmesh.flax_moe.models import family_laws as laws
from expertmesh.flax_moe.models.model_fields import Fields

__all__ = ["EXPERT_BIAS", "FAMILIES", "Array", "Family", "Half", "Names"]

EXPERT_BIAS = "expert_bias"
"""The `param` of the array that is `moe(expert_bias=)`."""


class Half(NamedTuple):
    """Which of the gate (0) and up (1) projections an array has.

    Attributes:
      of: one of their numbers, or both.
      by_turns: whether a column of the gate and one of the up projection take turns; else one lies behind the other.
    """

    of: tuple[int, ...]
    by_turns: bool = False


GATE, UP, BOTH, TURNS = Half((0,)), Half((1,)), Half((0, 1)), Half((0, 1), by_turns=True)


class Array(NamedTuple):
    """One array of a block; where the name has `{e}`, one for each expert.

    Attributes:
      name: what is behind the block's.
      param: the parameter, or EXPERT_BIAS. Where the config's block has no such parameter, the array is not there.
      half: of a parameter that has gate and up projections.
      transposed: whether it is [..., out, in].
      ones: how many dimensions of size one are before the others.
    """

    name: str
    param: str
    half: Half | None = None
    transposed: bool = True
    ones: int = 0


class Names(NamedTuple):
    """What a block and its arrays are called.

    Attributes:
      block: what is behind `layers.{i}.`.
      arrays: all of them.
      outside: those of a router that the block cannot be; nothing here reads them.
    """

    block: str
    arrays: tuple[Array, ...]
    outside: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How a model names and routes.

    Attributes:
      title: as people call it.
      files: the names in a checkpoint.
      memory: those of a model in memory.
      width: the config's key of F.
      options: laws of the other fields of MoEConfig.
      layers: whether a layer has a block, from the config and the layer's number.
      experts, top_k: the config's keys of E and K; the first that is there counts.
      activation: the law of the activation.
    """

    title: str
    files: Names
    memory: Names
    width: str
    options: tuple[Callable[[Fields], dict[str, Any]], ...]
    layers: Callable[[Fields, int], bool] = laws.all_layers
    experts: tuple[str, ...] = ("n_routed_experts", "num_experts", "num_local_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok", "num_experts_per_token")
    activation: Callable[[Fields], str | Activation] = laws.hidden_act


def _feed_forward(start: str, into: str, names: tuple[str, str, str]) -> tuple[Array, ...]:
    """Gate, up and down projections, a matrix each."""
    gate, up, down = (f"{start}{name}.weight" for name in names)
    wi, wo = f"{into}wi", f"{into}wo"
    return Array(gate, wi, GATE), Array(up, wi, UP), Array(down, wo)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ROUTER = (Array("gate.weight", "gate_kernel"),)
_PLAIN_ROUTER = (Array("router.weight", "gate_kernel"),)
_BIAS = (Array("gate.e_score_correction_bias", EXPERT_BIAS),)
_EXPERT_BIAS = (Array("expert_bias", EXPERT_BIAS),)
_BIAS_OF_BLOCK = (Array("e_score_correction_bias", EXPERT_BIAS),)
_EACH = _feed_forward("experts.{e}.", "", _PROJECTIONS)
_EACH_W = _feed_forward("experts.{e}.", "", ("w1", "w3", "w2"))
_STACKED = (Array("experts.gate_up_proj", "wi", BOTH), Array("experts.down_proj", "wo"))
_SHARED = _feed_forward("shared_experts.", "shared_", _PROJECTIONS)
_SHARED_ONE = _feed_forward("shared_expert.", "shared_", _PROJECTIONS)
_SHARED_GATED = (
    *_SHARED_ONE,
    Array("shared_expert_gate.weight", "shared_gate", transposed=False, ones=1),
)

_MIXTRAL_FILES = Names("block_sparse_moe", (*_ROUTER, *_EACH_W))
_EACH_FILES, _STACKED_MEMORY = Names("mlp", (*_ROUTER, *_EACH)), Names("mlp", (*_ROUTER, *_STACKED))


def _with(names: Names, *more: Array) -> Names:
    return names._replace(arrays=(*names.arrays, *more))


_QWEN2 = Family(
    title="Qwen2-MoE",
    files=_with(_EACH_FILES, *_SHARED_GATED),
    memory=_with(_STACKED_MEMORY, *_SHARED_GATED),
    width="moe_intermediate_size",
    options=(
        laws.softmax_of_all,
        laws.shared_width("shared_expert_intermediate_size"),
        laws.shared_gate,
    ),
    layers=laws.every_step,
)
_DEEPSEEK_V3 = Family(
    title="DeepSeek-V3",
    files=_with(_EACH_FILES, *_SHARED, *_BIAS),
    memory=_with(_STACKED_MEMORY, *_SHARED, *_BIAS),
    width="moe_intermediate_size",
    options=(
        laws.deepseek,
        laws.shared_width("moe_intermediate_size", "n_shared_experts", "num_shared_experts"),
    ),
    layers=laws.after_dense,
)
_OLMOE = Family(
    title="OLMoE",
    files=_EACH_FILES,
    memory=_STACKED_MEMORY,
    width="intermediate_size",
    options=(laws.softmax_of_all,),
)
_GPT_OSS = Names(
    "mlp",
    (
        *_PLAIN_ROUTER,
        Array("experts.gate_up_proj", "wi", TURNS, transposed=False),
        Array("experts.down_proj", "wo", transposed=False),
        Array("experts.gate_up_proj_bias", "wi_bias", TURNS, transposed=False),
        Array("experts.down_proj_bias", "wo_bias", transposed=False),
        Array("router.bias", "gate_bias", transposed=False),
    ),
)
_LLAMA4 = Names(
    "feed_forward",
    (
        *_PLAIN_ROUTER,
        Array("experts.gate_up_proj", "wi", BOTH, transposed=False),
        Array("experts.down_proj", "wo", transposed=False),
        *_SHARED_ONE,
    ),
)
_HUNYUAN_GATE = (Array("gate.wg.weight", "gate_kernel"),)
_HUNYUAN_SHARED = _feed_forward("shared_mlp.", "shared_", _PROJECTIONS)
_ERNIE_BIAS = "moe_statics.e_score_correction_bias"

FAMILIES = {
    "mixtral": Family(
        title="Mixtral",
        files=_MIXTRAL_FILES,
        memory=_STACKED_MEMORY,
        width="intermediate_size",
        options=(),
    ),
    "qwen2_moe": _QWEN2,
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        files=_EACH_FILES,
        memory=_STACKED_MEMORY,
        width="moe_intermediate_size",
        options=(laws.softmax_of_all,),
        layers=laws.every_step,
    ),
    "qwen3_next": dataclasses.replace(_QWEN2, title="Qwen3-Next"),
    "qwen3_5_moe_text": dataclasses.replace(
        _QWEN2, title="Qwen3.5-MoE", options=_QWEN2.options[1:], layers=laws.all_layers
    ),
    "olmoe": _OLMOE,
    "flex_olmo": dataclasses.replace(_OLMOE, title="FlexOlmo"),
    "deepseek_v2": Family(
        title="DeepSeek-V2",
        files=_with(_EACH_FILES, *_SHARED),
        memory=_with(_STACKED_MEMORY, *_SHARED),
        width="moe_intermediate_size",
        options=(laws.grouped_softmax, *_DEEPSEEK_V3.options[1:]),
        layers=laws.after_dense,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": dataclasses.replace(_DEEPSEEK_V3, title="DeepSeek-V3.2"),
    "kimi_k2": dataclasses.replace(_DEEPSEEK_V3, title="Kimi-K2"),
    "glm4_moe": dataclasses.replace(_DEEPSEEK_V3, title="GLM-4.5, GLM-4.6"),
    "glm4_moe_lite": dataclasses.replace(_DEEPSEEK_V3, title="GLM-4.7-Flash"),
    "glm_moe_dsa": dataclasses.replace(_DEEPSEEK_V3, title="GLM-5"),
    "dots1": dataclasses.replace(_DEEPSEEK_V3, title="dots.llm1"),
    "solar_open": dataclasses.replace(_DEEPSEEK_V3, title="Solar-Open", layers=laws.all_layers),
    "exaone_moe": dataclasses.replace(
        _DEEPSEEK_V3,
        title="EXAONE-MoE",
        files=_with(_EACH_FILES, *_SHARED, *_BIAS_OF_BLOCK),
    ),
    "bailing_hybrid": dataclasses.replace(
        _DEEPSEEK_V3,
        title="Ling 2.5 (Bailing)",
        files=_with(_EACH_FILES, *_SHARED, Array("gate.expert_bias", EXPERT_BIAS)),
        options=(
            *_DEEPSEEK_V3.options,
            laws.fixed(score_function="sigmoid", moe_router_enable_expert_bias=True),
        ),
        experts=("num_experts", "num_local_experts"),
    ),
    "kimi_linear": dataclasses.replace(
        _DEEPSEEK_V3,
        title="Kimi-Linear",
        files=_with(_MIXTRAL_FILES, *_SHARED, *_BIAS),
        options=(*_DEEPSEEK_V3.options, laws.fixed(moe_router_activation_func="sigmoid")),
        experts=("num_experts", "num_local_experts"),
    ),
    "gpt_oss": Family(
        title="gpt-oss",
        files=_GPT_OSS,
        memory=_GPT_OSS,
        width="intermediate_size",
        options=(laws.expert_biases, laws.gate_bias),
        activation=laws.clamped_swiglu,
    ),
    "minimax": Family(
        title="MiniMax-01",
        files=_MIXTRAL_FILES,
        memory=_STACKED_MEMORY,
        width="intermediate_size",
        options=(laws.fixed(shared_intermediate_size=0),),
    ),
    "minimax_m2": Family(
        title="MiniMax-M2",
        files=_with(_MIXTRAL_FILES, *_BIAS_OF_BLOCK),
        memory=_with(_STACKED_MEMORY, *_BIAS_OF_BLOCK),
        width="intermediate_size",
        options=(
            laws.biased_sigmoid,
            laws.fixed(scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0),
        ),
    ),
    "granitemoe": Family(
        title="Granite-MoE",
        files=Names(
            "block_sparse_moe",
            (
                Array("router.layer.weight", "gate_kernel"),
                Array("input_linear.weight", "wi", BOTH),
                Array("output_linear.weight", "wo"),
            ),
        ),
        memory=Names("block_sparse_moe", (*_PLAIN_ROUTER, *_STACKED)),
        width="intermediate_size",
        options=(),
    ),
    "lfm2_moe": Family(
        title="LFM2-MoE",
        files=Names("feed_forward", (*_ROUTER, *_EACH_W, *_EXPERT_BIAS)),
        memory=Names("feed_forward", (*_ROUTER, *_STACKED, *_EXPERT_BIAS)),
        width="moe_intermediate_size",
        options=(laws.optional_bias,),
        layers=laws.after_few,
        activation=laws.always_silu,
    ),
    "llama4_text": Family(
        title="Llama-4",
        files=_LLAMA4,
        memory=_LLAMA4,
        width="intermediate_size",
        options=(laws.sigmoid_of_input, laws.shared_width("intermediate_size")),
        layers=laws.listed,
    ),
    "jamba": Family(
        title="Jamba",
        files=Names("feed_forward", (*_PLAIN_ROUTER, *_EACH)),
        memory=Names("feed_forward", (*_PLAIN_ROUTER, *_STACKED)),
        width="intermediate_size",
        options=(laws.undivided_softmax,),
        layers=laws.periodic,
    ),
    "hunyuan_v1_moe": Family(
        title="Hunyuan-MoE",
        files=Names("mlp", (*_HUNYUAN_GATE, *_EACH, *_HUNYUAN_SHARED)),
        memory=Names("mlp", (*_HUNYUAN_GATE, *_STACKED, *_HUNYUAN_SHARED)),
        width="intermediate_size",
        options=(laws.shared_width("intermediate_size"),),
        top_k=("moe_topk", "num_experts_per_tok"),
    ),
    "ernie4_5_moe": Family(
        title="Ernie-4.5-MoE",
        files=_with(_EACH_FILES, *_SHARED, Array(_ERNIE_BIAS, EXPERT_BIAS, ones=1)),
        memory=_with(_STACKED_MEMORY, *_SHARED, Array(f"gate.{_ERNIE_BIAS}", EXPERT_BIAS, ones=1)),
        width="moe_intermediate_size",
        options=(
            laws.biased_softmax,
            laws.shared_width("moe_intermediate_size", "moe_num_shared_experts"),
        ),
        layers=laws.between,
        experts=("moe_num_experts", "num_experts"),
        top_k=("moe_k", "num_experts_per_tok"),
    ),
    "phimoe": Family(
        title="Phi-3.5-MoE",
        files=Names("block_sparse_moe", _EACH_W, outside=("gate.weight",)),
        memory=Names("mlp", _STACKED, outside=("router.weight",)),
        width="intermediate_size",
        options=(laws.router_outside,),
    ),
}
"""By `model_type`."""
