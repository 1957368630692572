"""Weights of Mixtral, Qwen3-MoE and DeepSeek-V3 under Hugging Face's names, to and from the tree of `init_params`.

What stands for each parameter after `model.layers.{i}.` in a checkpoint; a row per expert e, [out, in]:

    | ours                 | mixtral: block_sparse_moe.   | qwen3_moe, deepseek_v3: mlp.                         |
    | gate_kernel [D, E]   | gate.weight [E, D]           | gate.weight [E, D]                                   |
    | wi [E, D, 0, F]      | experts.{e}.w1.weight [F, D] | experts.{e}.gate_proj.weight [F, D]                  |
    | wi [E, D, 1, F]      | experts.{e}.w3.weight [F, D] | experts.{e}.up_proj.weight [F, D]                    |
    | wo [E, F, D]         | experts.{e}.w2.weight [D, F] | experts.{e}.down_proj.weight [D, F]                  |
    | shared_wi, shared_wo |                              | shared_experts.{gate,up,down}_proj.weight (deepseek) |
    | expert_bias [E]      |                              | gate.e_score_correction_bias [E] (deepseek)          |

A model of `transformers` >= 5 holds all experts of a layer in two arrays, `mlp.experts.gate_up_proj` [E, 2 F, D] and
`mlp.experts.down_proj` [E, D, F], for all three: here *stacked*. Nothing of Hugging Face is imported.

Dimension key: D model width, E experts, F expert width, S width of the shared experts.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from expertmesh.flax_moe import fp8_blocks
from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.params import BIASES, GATE_BIAS, Params, check_params, param_shapes
from expertmesh.flax_moe.places import (
    Layout,
    Place,
    Ranges,
    Slices,
    assemble,
    extract,
    matrices_of,
    whole,
)

__all__ = [
    "HfLayer",
    "MODEL_TYPES",
    "check_export",
    "check_shape",
    "check_there",
    "export_layer",
    "find_layout",
    "layer_layout",
    "load_layer",
    "moe_config",
    "moe_layers",
    "read_bias",
    "read_param",
    "read_scale",
]

Weights = Mapping[str, Any]
HfConfig = Mapping[str, Any]

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
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


class HfLayer(NamedTuple):
    """One block.

    Attributes:
      params: the tree of `init_params`, NumPy arrays.
      expert_bias: float32[E], for `moe(..., expert_bias=)`; None for a model without one.
    """

    params: dict[str, np.ndarray]
    expert_bias: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class _Model:
    """How a model names and routes.

    Attributes:
      block: the name of the block inside a layer.
      projections: of gate, up and down.
      width: the config's key of F.
      router: the router's part of a MoEConfig, from the config.
      is_moe: whether a layer has a block, from the config and the layer's number.
    """

    block: str
    projections: tuple[str, str, str]
    width: str
    router: Callable[[HfConfig], dict[str, Any]]
    is_moe: Callable[[HfConfig, int], bool]


def _qwen3_router(hf_config: HfConfig) -> dict[str, Any]:
    return {"use_pre_softmax": not _get(hf_config, "norm_topk_prob")}


def _qwen3_is_moe(hf_config: HfConfig, layer: int) -> bool:
    every = hf_config.get("decoder_sparse_step", 1)
    return layer not in (hf_config.get("mlp_only_layers") or ()) and (layer + 1) % every == 0


def _deepseek_router(hf_config: HfConfig) -> dict[str, Any]:
    groups, group_topk = (_get(hf_config, key) for key in ("n_group", "topk_group"))
    _must("scoring_func", hf_config.get("scoring_func", "sigmoid"), "sigmoid")
    _must("topk_method", hf_config.get("topk_method", "noaux_tc"), "noaux_tc")
    limited = group_topk < groups
    return {
        "score_function": "sigmoid",
        "num_groups": groups if limited else None,
        "group_topk": group_topk if limited else None,
        "group_best": 2 if limited else None,
        "normalize": bool(_get(hf_config, "norm_topk_prob")),
        "scaling_factor": float(_get(hf_config, "routed_scaling_factor")),
        "use_expert_bias": True,
        "shared_expert_dim": _shared_width(hf_config),
    }


def _shared_width(hf_config: HfConfig) -> int | None:
    count = hf_config.get("n_shared_experts") or 0
    return count * _get(hf_config, "moe_intermediate_size") or None


def _deepseek_is_moe(hf_config: HfConfig, layer: int) -> bool:
    first, every = _get(hf_config, "first_k_dense_replace"), hf_config.get("moe_layer_freq", 1)
    return bool(layer >= first and layer % every == 0)


_STACKED = ("experts.gate_up_proj", "experts.down_proj")
_SPELLED = ("gate_proj", "up_proj", "down_proj")
_MODELS = {
    "mixtral": _Model(
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        width="intermediate_size",
        router=lambda hf_config: {},
        is_moe=lambda hf_config, layer: True,
    ),
    "qwen3_moe": _Model("mlp", _SPELLED, "moe_intermediate_size", _qwen3_router, _qwen3_is_moe),
    "deepseek_v3": _Model(
        "mlp", _SPELLED, "moe_intermediate_size", _deepseek_router, _deepseek_is_moe
    ),
}

MODEL_TYPES = tuple(_MODELS)
"""The values of `model_type` that are known here."""


def moe_config(hf_config: HfConfig, **options: Any) -> MoEConfig:
    """The block of a model.

    Args:
      hf_config: the dict of `config.json`, or of a `transformers` config's `to_dict()`.
      options: fields of MoEConfig that a model file does not decide, such as `dtype`, `recipe`, `aux_loss_coeff`; they
        come before what it decides.

    Returns:
      MoEConfig with the router's semantics: Mixtral's softmax over the K chosen; Qwen3's too, or under
      `norm_topk_prob=False` the softmax over all experts, not normalised; DeepSeek-V3's sigmoid, with correction bias,
      groups, factor and shared experts. Losses are left out: `router_aux_loss_coef` is that of all layers together.

    Raises:
      ValueError: a model that is not known here, a key that is missing, or a router that MoEConfig cannot express.
    """
    model = _model(hf_config)
    act = _get(hf_config, "hidden_act")
    if act not in _ACTIVATIONS:
        raise ValueError(
            f"hf: hidden_act must be one of {', '.join(_ACTIVATIONS)}; got hidden_act={act!r}; "
            "replace it in the config by the nearest of these"
        )
    decided = {
        "num_experts": _get(hf_config, *_EXPERTS),
        "top_k": _get(hf_config, "num_experts_per_tok"),
        "expert_dim": _get(hf_config, model.width),
        "activation": _ACTIVATIONS[act],
        **model.router(hf_config),
    }
    return MoEConfig(**(decided | options))


def moe_layers(hf_config: HfConfig) -> tuple[int, ...]:
    """The numbers of the decoder layers that have a block; the others are dense."""
    model = _model(hf_config)
    return tuple(
        i for i in range(_get(hf_config, "num_hidden_layers")) if model.is_moe(hf_config, i)
    )


def load_layer(
    weights: Weights,
    hf_config: HfConfig,
    layer: int,
    *,
    dtype: Any = None,
    prefix: str = "model.",
) -> HfLayer:
    """The block of one decoder layer.

    Args:
      weights: name -> array of the whole model or of a part with this layer, as checkpoints name them or stacked. Only
        what the layer needs is read, one expert after the other: a mapping that reads from files will do.
      hf_config: see `moe_config`.
      layer: the decoder layer's number.
      dtype: of the parameters; None: each keeps its own, bfloat16 where it is stored in 8 bits.
      prefix: what stands before `layers.{layer}.`.

    Returns:
      HfLayer of NumPy arrays. 8-bit weights with a `..._scale_inv` beside them, as DeepSeek publishes them, are
      dequantized by the blocks of `quantization_config.weight_block_size`.

    Raises:
      ValueError: names that are missing (they are counted, and the first are named), an array of another shape than the
        config says, 8-bit weights without their scales.
    """
    layout = find_layout(weights, hf_config, layer, prefix=prefix)
    params = {
        param: read_param(weights, hf_config, layout, param, whole(shape), dtype=dtype)
        for param, shape in layout.params.items()
    }
    return HfLayer(params, read_bias(weights, layout))


def export_layer(
    params: Params,
    hf_config: HfConfig,
    layer: int,
    *,
    expert_bias: Any = None,
    stacked: bool = False,
    prefix: str = "model.",
) -> dict[str, np.ndarray]:
    """The inverse of `load_layer`: name -> contiguous array in the parameter's dtype.

    Args:
      params: the tree of `init_params`; arrays that this process holds as a whole.
      hf_config: see `moe_config`.
      layer: the decoder layer's number.
      expert_bias: float[E]; given if and only if the model has one.
      stacked: the names of a model in memory, for `load_state_dict`, instead of a checkpoint's.
      prefix: what stands before `layers.{layer}.`.

    Raises:
      ValueError: a parameter that is missing, unknown, or of another shape than the config says; biases, which none of
        these models has; an expert bias that is missing, of another shape, or that the model has no place for.
    """
    layout = layer_layout(hf_config, layer, stacked=stacked, prefix=prefix)
    check_export("hf.export_layer", params, hf_config, expert_bias)
    arrays = {name: np.asarray(array) for name, array in params.items()}
    made = {
        name: extract(places, lambda param, at: arrays[param][at])
        for name, places in layout.by_name.items()
    }
    return made | ({layout.bias: np.array(expert_bias, np.float32)} if layout.bias else {})


def check_export(
    function: str, params: Mapping[str, Any], hf_config: HfConfig, expert_bias: Any
) -> None:
    """Raises an error that names `function` unless the model has a place for all that is given, and no other."""
    config = moe_config(hf_config)
    check_params(function, params, _model_dim(hf_config), config, config.num_experts)
    if biases := [name for name in BIASES + GATE_BIAS if name in params]:
        raise ValueError(
            f"{function}: a {hf_config['model_type']} has no biases; got {', '.join(biases)}; train without them"
        )
    wanted = (config.num_experts,) if config.use_expert_bias else None
    shape = None if expert_bias is None else np.shape(expert_bias)
    if shape != wanted:
        raise ValueError(
            f"{function}: expert_bias of a {hf_config['model_type']} must be of shape {wanted}; "
            f"got expert_bias of shape {shape}; pass HfLayer's, or the one that was trained"
        )


def layer_layout(
    hf_config: HfConfig, layer: int, *, stacked: bool = False, prefix: str = "model."
) -> Layout:
    """What the arrays of a decoder layer's block are called and where they lie in the parameters.

    Args:
      hf_config, layer, stacked, prefix: see `export_layer`.
    """
    model, config = _model(hf_config), moe_config(hf_config)
    block = f"{prefix}layers.{layer}.{'mlp' if stacked else model.block}."
    every = slice(None)
    places = [Place(f"{block}gate.weight", "gate_kernel", (every, every))]
    places += (_stacked_places if stacked else _expert_places)(block, model, config)
    if config.shared_expert_dim:
        gate, up, down = (f"{block}shared_experts.{name}.weight" for name in model.projections)
        places += [Place(gate, "shared_wi", (every, 0, every))]
        places += [
            Place(up, "shared_wi", (every, 1, every)),
            Place(down, "shared_wo", (every,) * 2),
        ]
    return Layout(
        block=block,
        places=tuple(places),
        params=param_shapes(_model_dim(hf_config), config),
        matrices=matrices_of(places),
        bias=f"{block}gate.e_score_correction_bias" if config.use_expert_bias else None,
    )


def _expert_places(block: str, model: _Model, config: MoEConfig) -> list[Place]:
    """Gate, up and down of the first expert, and so on."""
    every, places = slice(None), []
    for e in range(config.num_experts):
        gate, up, down = (f"{block}experts.{e}.{name}.weight" for name in model.projections)
        places += [Place(gate, "wi", (e, every, 0, every)), Place(up, "wi", (e, every, 1, every))]
        places += [Place(down, "wo", (e, every, every))]
    return places


def _stacked_places(block: str, model: _Model, config: MoEConfig) -> list[Place]:
    every, F = slice(None), config.expert_dim
    gate_up, down = (block + name for name in _STACKED)
    halves = [(half, slice(half * F, half * F + F)) for half in (0, 1)]
    return [
        *(Place(gate_up, "wi", (every, every, half, every), rows) for half, rows in halves),
        Place(down, "wo", (every,) * 3),
    ]


def _model_dim(hf_config: HfConfig) -> int:
    return int(_get(hf_config, "hidden_size"))


def find_layout(
    weights: Weights, hf_config: HfConfig, layer: int, *, prefix: str = "model."
) -> Layout:
    """The layout that the weights have: that of checkpoints, or stacked.

    Raises:
      ValueError: names that are missing.
    """
    layout = layer_layout(hf_config, layer, stacked=True, prefix=prefix)
    if not any(f"{layout.block}{name}" in weights for name in _STACKED):
        layout = layer_layout(hf_config, layer, prefix=prefix)
    check_there(weights, layout, layer)
    return layout


def check_there(weights: Weights, layout: Layout, layer: int) -> None:
    """Raises ValueError unless the weights have all names of a layer's layout."""
    if missing := [name for name in layout.shapes if name not in weights]:
        raise ValueError(
            f"hf.load_layer: weights must have the {len(layout.shapes)} names of layer {layer}'s block; "
            f"missing {len(missing)}: {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}; "
            "see moe_layers for the layers that have one, and `prefix`"
        )


def read_param(
    weights: Weights,
    hf_config: HfConfig,
    layout: Layout,
    param: str,
    ranges: Ranges,
    *,
    dtype: DTypeLike | None = None,
) -> np.ndarray:
    """Part of a parameter, dequantized where it has 8 bits; no more of the arrays is read.

    Args:
      weights, hf_config, dtype: see `load_layer`.
      layout: of the layer.
      param: the parameter.
      ranges: the part, as `assemble` takes it.
    """

    def read(name: str, index: Slices) -> np.ndarray:
        check_shape(name, np.shape(weights[name]), layout.shapes[name])
        part = np.asarray(weights[name][index])
        wanted = dtype
        if part.dtype.itemsize == 1:
            scale, blocks = read_scale(weights, hf_config, layout, name)
            part = fp8_blocks.widened(part, scale, blocks, index)
            wanted = jnp.bfloat16 if dtype is None else dtype
        return part if wanted is None else part.astype(wanted)

    return assemble(layout.places_of(param), ranges, read)


def read_scale(
    weights: Weights, hf_config: HfConfig, layout: Layout, name: str
) -> tuple[np.ndarray, tuple[int, ...]]:
    """(float32 scales of an array of 8 bits, elements of each of its dimensions that share one)."""
    block, beside = fp8_blocks.block_size(hf_config), fp8_blocks.scale_name(name)
    if beside not in weights or block is None:
        raise ValueError(
            f"hf.load_layer: {name} has 8 bits and must have scales, {beside}, and the config's quantization_config a "
            f"weight_block_size; got weight_block_size={block}, scales {'' if beside in weights else 'not '}there; "
            "pass both, or weights of 16 bits"
        )
    blocks, shape = layout.blocks(name, block), layout.shapes[name]
    scale = np.asarray(weights[beside]).astype(np.float32)
    check_shape(beside, scale.shape, fp8_blocks.scale_shape(shape, blocks))
    return scale, blocks


def read_bias(weights: Weights, layout: Layout) -> np.ndarray | None:
    """The expert bias, float32[E], of a layer whose model has one."""
    if layout.bias is None:
        return None
    bias = np.asarray(weights[layout.bias])
    check_shape(layout.bias, bias.shape, layout.shapes[layout.bias])
    return bias.astype(np.float32)


def check_shape(name: str, got: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises ValueError unless an array has the shape that the config gives it."""
    if got != shape:
        raise ValueError(
            f"hf.load_layer: {name} must be {shape}, by the config's sizes; got {name}.shape={got}; "
            "pass the config of these weights"
        )


def _model(hf_config: HfConfig) -> _Model:
    if hf_config.get("model_type") not in _MODELS:
        raise ValueError(
            f"hf: model_type must be one of {', '.join(_MODELS)}; got model_type={hf_config.get('model_type')!r}; "
            "pass the dict of config.json"
        )
    return _MODELS[hf_config["model_type"]]


def _get(hf_config: HfConfig, *keys: str) -> Any:
    """The value of the first of these keys that is there."""
    for key in keys:
        if hf_config.get(key) is not None:
            return hf_config[key]
    raise ValueError(
        f"hf: the config of a {hf_config['model_type']} must have {' or '.join(keys)}; got {', '.join(hf_config)}; "
        "pass the dict of config.json"
    )


def _must(what: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise ValueError(
            f"hf: {what} must be {wanted!r} for this router; got {what}={value!r}; MoEConfig has no such router"
        )
