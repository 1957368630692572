"""Weights of models under Hugging Face's names, to and from the tree of `init_params`.

`families.py` has a row for each model type: the name of each parameter after `model.layers.{i}.` in a checkpoint, its
name in a model in memory, and what the config says about the block. Most models have one array [out, in] per expert e:

| here | mixtral: block_sparse_moe. | others: mlp. |
|---|---|---|
| gate_kernel [D, E] | gate.weight [E, D] | gate.weight [E, D] |
| wi [E, D, 0, F] | experts.{e}.w1.weight [F, D] | experts.{e}.gate_proj.weight [F, D] |
| wi [E, D, 1, F] | experts.{e}.w3.weight [F, D] | experts.{e}.up_proj.weight [F, D] |
| wo [E, F, D] | experts.{e}.w2.weight [D, F] | experts.{e}.down_proj.weight [D, F] |
| shared_wi, shared_wo | | shared_experts.{gate,up,down}_proj.weight (deepseek) |
| expert_bias [E] | | gate.e_score_correction_bias [E] (deepseek) |

A model of `transformers` >= 5 holds all experts of a layer in two arrays, `experts.gate_up_proj` [E, 2 F, D] and
`experts.down_proj` [E, D, F]: here "stacked". Nothing of Hugging Face is imported.

Dimension key: D model width, E experts, F expert width, S width of the shared experts.
"""

from collections.abc import Mapping
from itertools import groupby, product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.models import fp4_blocks, fp8_blocks
from expertmesh.flax_moe.models.families import EXPERT_BIAS, FAMILIES, Array, Family, Half
from expertmesh.flax_moe.models.model_fields import Fields, name_of, number, of_text
from expertmesh.flax_moe.models.places import (
    Index,
    Layout,
    Place,
    Ranges,
    Slices,
    assemble,
    extract,
    matrices_of,
    whole,
)
from expertmesh.flax_moe.params import (
    Params,
    check_names,
    check_shapes,
    param_names,
    param_shapes,
)

__all__ = [
    "HfLayer",
    "MODEL_TYPES",
    "bias_array",
    "check_export",
    "check_float",
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
HfConfig = Fields


class HfLayer(NamedTuple):
    """One block.

    Attributes:
      params: the tree of `init_params`, NumPy arrays.
      expert_bias: float32[E], for `moe(..., expert_bias=)`; None for a model without one.
    """

    params: dict[str, np.ndarray]
    expert_bias: np.ndarray | None


MODEL_TYPES = tuple(FAMILIES)
"""The values of `model_type` that are known here."""


def moe_config(hf_config: HfConfig, **options: Any) -> MoEConfig:
    """The block of a model.

    Args:
      hf_config: the dict of `config.json`, or of a `transformers` config's `to_dict()`.
      options: fields of MoEConfig that a model file does not decide, such as `dtype`, `recipe`, `aux_loss_coeff`. They
        take precedence over the fields that it decides.

    Returns:
      MoEConfig with the router's semantics, by the laws of the model's row. Losses are left out: `router_aux_loss_coef`
      is that of all layers together. A model of several parts is read by its `text_config`.

    Raises:
      ValueError: a model that is not known here, a key that is missing, or what MoEConfig cannot express: the
        field, its value and the rule.
    """
    fields, family = _text(hf_config)
    decided: dict[str, Any] = {
        "num_experts": number(fields, *family.experts),
        "top_k": number(fields, *family.top_k),
        "expert_dim": number(fields, family.width),
        "activation": family.activation(fields),
    }
    for law in family.options:
        decided |= law(fields)
    return MoEConfig(**(decided | options))


def moe_layers(hf_config: HfConfig) -> tuple[int, ...]:
    """The numbers of the decoder layers that have a block; the others are dense."""
    fields, family = _text(hf_config)
    return tuple(i for i in range(number(fields, "num_hidden_layers")) if family.layers(fields, i))


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
        the layer's arrays are read, one expert after the other, so a mapping that reads from files will do.
      hf_config: see `moe_config`.
      layer: the decoder layer's number.
      dtype: of the parameters; None: each keeps its own, bfloat16 where it is stored in 8 bits.
      prefix: what stands before `layers.{layer}.`.

    Returns:
      HfLayer of NumPy arrays. 8-bit weights with a `..._scale_inv` beside them, as DeepSeek publishes them, are
      dequantized by the blocks of `quantization_config.weight_block_size`; 4-bit experts with `..._scales`, as gpt-oss
      is published, where its `quant_method` is "mxfp4".

    Raises:
      ValueError: names that are missing (they are counted, and the first are named), an array of another shape than the
        config says or of integers, 8-bit weights without their scales.
    """
    weights = fp4_blocks.widened(weights, hf_config)
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
      ValueError: a parameter that is missing, unknown, or of another shape than the config says; biases that
        the model has not; an expert bias that is missing, of another shape, or that the model has no place for.
    """
    layout = layer_layout(hf_config, layer, stacked=stacked, prefix=prefix)
    check_export("hf.export_layer", params, hf_config, expert_bias)
    arrays = {name: np.asarray(array) for name, array in params.items()}
    made = {
        name: extract(places, lambda param, at: arrays[param][at])
        for name, places in layout.by_name.items()
    }
    return made | bias_array(layout, expert_bias)


def check_export(
    function: str, params: Mapping[str, Any], hf_config: HfConfig, expert_bias: Any
) -> None:
    """Raises an error that names `function` unless the model has a place for all that is given, and no other."""
    config = moe_config(hf_config)
    check_names(function, params, config, needs_gate=config.use_gate)
    check_shapes(function, params, _model_dim(hf_config), config, config.num_experts)
    if more := [name for name in params if name not in param_names(config)]:
        raise ValueError(
            f"{function}: params of a {name_of(hf_config)} must have the names {', '.join(param_names(config))}; got "
            f"also {', '.join(more)}; train without them"
        )
    wanted = (config.num_experts,) if config.use_expert_bias else None
    shape = None if expert_bias is None else np.shape(expert_bias)
    if shape != wanted:
        raise ValueError(
            f"{function}: expert_bias of a {name_of(hf_config)} must be of shape {wanted}; "
            f"got expert_bias of shape {shape}; pass HfLayer's, or the one that was trained"
        )


def layer_layout(
    hf_config: HfConfig, layer: int, *, stacked: bool = False, prefix: str = "model."
) -> Layout:
    """What the arrays of a decoder layer's block are called and where they lie in the parameters.

    Args:
      hf_config, layer, stacked, prefix: see `export_layer`.
    """
    _, family = _text(hf_config)
    names, config = family.memory if stacked else family.files, moe_config(hf_config)
    shapes = param_shapes(_model_dim(hf_config), config)
    block = f"{prefix}layers.{layer}.{names.block}."
    arrays = [array for array in names.arrays if array.param in shapes]
    places = tuple(
        place
        for several, group in groupby(arrays, lambda array: "{e}" in array.name)
        for e, array in product(range(config.num_experts) if several else (None,), tuple(group))
        for place in _places(array, block, shapes[array.param], e)
    )
    biases = [array for array in names.arrays if array.param == EXPERT_BIAS]
    return Layout(
        block=block,
        places=places,
        params=shapes,
        matrices=matrices_of(places),
        bias=_bias(biases[0], block) if biases and config.use_expert_bias else None,
        outside=tuple(block + name for name in names.outside),
    )


def _places(array: Array, block: str, shape: tuple[int, ...], expert: int | None) -> list[Place]:
    """Where an array of a row, of one expert or of all, lies in its parameter."""
    return [
        Place(
            name=block + array.name.format(e=expert),
            param=array.param,
            at=_index(len(shape), expert, half),
            columns=columns,
            transposed=array.transposed,
            ones=array.ones,
        )
        for half, columns in _halves(array.half, shape[-1])
    ]


def _halves(half: Half | None, width: int) -> list[tuple[int | None, slice]]:
    """Which projections an array has, and in which of its columns."""
    if half is None:
        return [(None, slice(None))]
    if len(half.of) == 1:
        return [(half.of[0], slice(None))]
    if half.by_turns:
        return [(i, slice(i, None, 2)) for i in half.of]
    return [(i, slice(i * width, i * width + width)) for i in half.of]


def _index(ndim: int, expert: int | None, half: int | None) -> Index:
    """Of a parameter: all of it, of one expert, of one projection. Experts are the first dimension."""
    at: list[int | slice] = [slice(None)] * ndim
    if expert is not None:
        at[0] = expert
    if half is not None:
        at[-2] = half
    return tuple(at)


def _bias(array: Array, block: str) -> Place:
    return Place(block + array.name, array.param, (slice(None),), transposed=False, ones=array.ones)


def _model_dim(hf_config: HfConfig) -> int:
    return number(_text(hf_config)[0], "hidden_size")


def find_layout(
    weights: Weights, hf_config: HfConfig, layer: int, *, prefix: str = "model."
) -> Layout:
    """The layout that the weights have: that of checkpoints, or stacked.

    Raises:
      ValueError: names that are missing.
    """
    layout = layer_layout(hf_config, layer, stacked=True, prefix=prefix)
    if not any(place.name in weights for place in layout.places_of("wi")):
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
        check_float(name, part.dtype)
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
    name = layout.bias.name
    bias = np.asarray(weights[name])
    check_shape(name, bias.shape, layout.shapes[name])
    check_float(name, bias.dtype)
    return bias.astype(np.float32).reshape(-1)


def bias_array(layout: Layout, expert_bias: Any) -> dict[str, np.ndarray]:
    """The expert bias under its name, float32 as the checkpoint has it; {} where there is none."""
    if layout.bias is None:
        return {}
    name = layout.bias.name
    return {name: np.array(expert_bias, np.float32).reshape(layout.shapes[name])}


def check_shape(name: str, got: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises ValueError unless an array has the shape that the config gives it."""
    if got != shape:
        raise ValueError(
            f"hf.load_layer: {name} must be {shape}, by the config's sizes; got {name}.shape={got}; "
            "pass the config of these weights"
        )


def check_float(name: str, dtype: DTypeLike) -> None:
    """Raises ValueError unless an array is of floating point."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"hf.load_layer: {name} must be floating point; got dtype={np.dtype(dtype)}; pass the model's weights"
        )


def _text(hf_config: Any) -> tuple[HfConfig, Family]:
    """The config of the text model, and its row."""
    if not isinstance(hf_config, Mapping):
        got = type(hf_config).__name__
        raise TypeError(
            f"hf: the config must be a mapping; got a {got}; pass the dict of config.json"
        )
    for fields in (hf_config, of_text(hf_config)):
        if fields.get("model_type") in MODEL_TYPES:
            return fields, FAMILIES[fields["model_type"]]
    raise ValueError(
        f"hf: model_type must be one of {', '.join(FAMILIES)}; got model_type={hf_config.get('model_type')!r}; "
        "pass the dict of config.json"
    )
