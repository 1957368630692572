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
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.params import BIASES, GATE_BIAS, Params, check_params

__all__ = ["HfLayer", "MODEL_TYPES", "export_layer", "load_layer", "moe_config", "moe_layers"]

Weights = Mapping[str, Any]
HfConfig = Mapping[str, Any]
_Read = Callable[..., np.ndarray]

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
        what the layer needs is read, once, one expert after the other: a mapping that reads from files will do.
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
    stacked = _names(hf_config, layer, prefix, True)
    names = stacked if stacked.experts[0] in weights else _names(hf_config, layer, prefix, False)
    shapes = names.shapes
    if missing := [name for name in shapes if name not in weights]:
        raise ValueError(
            f"hf.load_layer: weights must have the {len(shapes)} names of layer {layer}'s block; "
            f"missing {len(missing)}: {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}; "
            "see moe_layers for the layers that have one, and `prefix`"
        )

    def read(name: str, dtype: DTypeLike | None = dtype) -> np.ndarray:
        return _read(weights, name, shapes[name], hf_config, dtype)

    wi, wo = _stack_experts(read, names)
    params = {"gate_kernel": read(names.gate).T.copy(), "wi": wi, "wo": wo}
    if names.shared:
        gate, up, down = map(read, names.shared)
        params |= {"shared_wi": np.stack([gate.T, up.T], axis=1), "shared_wo": down.T.copy()}
    bias = None if names.bias is None else read(names.bias, np.float32)
    return HfLayer(params, bias)


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
    config, names = moe_config(hf_config), _names(hf_config, layer, prefix, stacked)
    check_params("hf.export_layer", params, names.D, config, names.E)
    if biases := [name for name in BIASES + GATE_BIAS if name in params]:
        raise ValueError(
            f"hf.export_layer: a {hf_config['model_type']} has no biases; got {', '.join(biases)}; train without them"
        )
    wanted = None if names.bias is None else names.shapes[names.bias]
    shape = None if expert_bias is None else np.shape(expert_bias)
    if shape != wanted:
        raise ValueError(
            f"hf.export_layer: expert_bias of a {hf_config['model_type']} must be of shape {wanted}; "
            f"got expert_bias of shape {shape}; pass HfLayer's, or the one that was trained"
        )
    arrays = {name: np.asarray(array) for name, array in params.items()}
    gates, ups = (arrays["wi"][:, :, half].mT for half in (0, 1))
    downs = arrays["wo"].mT
    experts = zip(gates, ups, downs, strict=True)
    made = [arrays["gate_kernel"].T]
    made += [np.concatenate([gates, ups], axis=1), downs] if stacked else itertools.chain(*experts)
    if names.shared:
        shared = arrays["shared_wi"]
        made += [shared[:, 0].T, shared[:, 1].T, arrays["shared_wo"].T]
    if names.bias is not None:
        made.append(np.asarray(expert_bias, np.float32))
    return {
        name: np.ascontiguousarray(array) for name, array in zip(names.shapes, made, strict=True)
    }


@dataclasses.dataclass(frozen=True)
class _Names:
    """What the arrays of one block are called, and their sizes; `experts` gate, up, down of the first, and so on."""

    gate: str
    experts: tuple[str, ...]
    shared: tuple[str, ...]
    bias: str | None
    stacked: bool
    E: int
    D: int
    F: int
    S: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each, in the order gate, experts, shared, bias."""
        E, D, F, S = self.E, self.D, self.F, self.S
        names = [self.gate, *self.experts, *self.shared]
        shapes: list[tuple[int, ...]] = [(E, D)]
        shapes += [(E, 2 * F, D), (E, D, F)] if self.stacked else [(F, D), (F, D), (D, F)] * E
        shapes += [(S, D), (S, D), (D, S)] if self.shared else []
        bias = {} if self.bias is None else {self.bias: (E,)}
        return dict(zip(names, shapes, strict=True)) | bias


def _names(hf_config: HfConfig, layer: int, prefix: str, stacked: bool) -> _Names:
    model, config = _model(hf_config), moe_config(hf_config)
    block = f"{prefix}layers.{layer}.{'mlp' if stacked else model.block}."
    each = itertools.product(range(config.num_experts), model.projections)
    experts = [f"experts.{e}.{name}.weight" for e, name in each]
    shared = [f"shared_experts.{name}.weight" for name in model.projections]
    return _Names(
        gate=f"{block}gate.weight",
        experts=tuple(block + name for name in (_STACKED if stacked else experts)),
        shared=tuple(block + name for name in shared if config.shared_expert_dim),
        bias=f"{block}gate.e_score_correction_bias" if config.use_expert_bias else None,
        stacked=stacked,
        E=config.num_experts,
        D=_get(hf_config, "hidden_size"),
        F=config.expert_dim,
        S=config.shared_expert_dim or 0,
    )


def _stack_experts(read: _Read, names: _Names) -> tuple[np.ndarray, np.ndarray]:
    """`wi` and `wo`, filled expert by expert: a layer may be most of the memory that there is."""
    each = _projections(read, names)
    gate, _, down = first = next(each)
    wi = np.empty((names.E, names.D, 2, names.F), gate.dtype)
    wo = np.empty((names.E, names.F, names.D), down.dtype)
    for e, (gate, up, down) in enumerate(itertools.chain([first], each)):
        wi[e, :, 0], wi[e, :, 1], wo[e] = gate.T, up.T, down.T
    return wi, wo


def _projections(read: _Read, names: _Names) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Gate, up and down of each expert."""
    if not names.stacked:
        for e in range(names.E):
            gate, up, down = map(read, names.experts[3 * e : 3 * e + 3])
            yield gate, up, down
        return
    gate_up, downs = map(read, names.experts)
    for rows, down in zip(gate_up, downs, strict=True):
        yield rows[: names.F], rows[names.F :], down


def _read(
    weights: Weights,
    name: str,
    shape: tuple[int, ...],
    hf_config: HfConfig,
    dtype: DTypeLike | None,
) -> np.ndarray:
    array = np.asarray(weights[name])
    _check_shape(name, array, shape)
    if array.dtype.itemsize == 1:
        array = _dequantized(weights, name, array, hf_config).astype(jnp.bfloat16)
    return array if dtype is None else array.astype(dtype)


def _dequantized(weights: Weights, name: str, array: np.ndarray, hf_config: HfConfig) -> np.ndarray:
    """float32: each block of the array times its scale."""
    block = (hf_config.get("quantization_config") or {}).get("weight_block_size")
    beside = f"{name}_scale_inv"
    if beside not in weights or block is None:
        raise ValueError(
            f"hf.load_layer: {name} has 8 bits and must have scales, {beside}, and the config's quantization_config a "
            f"weight_block_size; got weight_block_size={block}, scales {'' if beside in weights else 'not '}there; "
            "pass both, or weights of 16 bits"
        )
    scale = np.asarray(weights[beside]).astype(np.float32)
    _check_shape(beside, scale, tuple(-(-n // b) for n, b in zip(array.shape, block, strict=True)))
    for axis, (size, b) in enumerate(zip(array.shape, block, strict=True)):
        scale = scale.repeat(b, axis).take(range(size), axis)
    return array.astype(np.float32) * scale


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(
            f"hf.load_layer: {name} must be {shape}, by the config's sizes; got {name}.shape={array.shape}; "
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
