"""MaxText's options: what they are to the block, and which of them it cannot honour."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from maxtext.common.common_types import Config, DecoderBlockType
from maxtext.layers import moe

from expertmesh.core import Activation

__all__ = ["activation_of", "check_config", "check_layer", "check_options"]

# Of MoEConfig, what says how the experts are computed, and not what.
OPTIONS = (
    "recipe",
    "quantize_backward_combine",
    "reduce_dtype",
    "num_chunks",
    "remat",
    "transport",
    "num_spare_experts",
    "capacity_factor",
    "alignment",
    "debug",
)


@dataclasses.dataclass(frozen=True)
class _Rule:
    field: str
    holds: Callable[[Any], bool]
    rule: str
    remedy: str


def _off(field: str, remedy: str) -> _Rule:
    return _Rule(field, lambda value: not value, "off", remedy)


def _at_most_0(field: str) -> _Rule:
    remedy = (
        "set it to -1: nothing is dropped here, and installed(num_chunks=n) makes buffers smaller"
    )
    return _Rule(field, lambda value: value <= 0, "at most 0", remedy)


_RECIPE = "leave it out and give the experts' format by installed(recipe=...)"
_PATH = "leave it out: the layer's own call is replaced, and this would go past it"
_RULES = (
    _at_most_0("capacity_factor"),
    _at_most_0("ragged_buffer_factor"),
    _at_most_0("eval_ragged_buffer_factor"),
    _off("quantization", _RECIPE),
    _off("moe_quantize_token_all_gather", _RECIPE),
    _off(
        "moe_quantize_combine_bwd_method",
        "leave it out; installed(recipe=..., quantize_backward_combine=True) does it in the recipe's format",
    ),
    _off("te_moe_block", _PATH),
    _off("use_batch_split_schedule", _PATH),
    _off("use_lineage", _PATH),
    _off("use_2d_fsdp_sharding", "use shard_exp_on_fsdp, or fsdp along D"),
    _off("using_pipeline_parallelism", "give stage one device"),
    _off("enable_diloco", "leave it out"),
    _off("log_required_ragged_buffer_factor", "leave it out: there is no such buffer"),
    _off("moe_log_max_load_ratio", "leave it out: there is no such buffer"),
    _Rule(
        "matmul_precision",
        lambda value: value == "default",
        "'default'",
        "leave it out, or set jax_default_matmul_precision",
    ),
    _Rule(
        "attention",
        lambda value: not value.startswith("vllm"),
        "one of training",
        "serve without expertmesh.maxtext",
    ),
)


def check_config(config: Config) -> None:
    """ValueError for the first field of a config that would change results and is not honoured."""
    for rule in _RULES:
        value = getattr(config, rule.field)
        if not rule.holds(value):
            raise ValueError(
                f"expertmesh.maxtext: {rule.field} must be {rule.rule}; got {rule.field}={value!r}; {rule.remedy}"
            )


def check_layer(layer: moe.RoutedMoE) -> None:
    """`check_config`, and ValueError for a layer whose weights are not plain arrays of 16 bits or more."""
    check_config(layer.config)
    if layer.quant is not None:
        raise ValueError(
            f"expertmesh.maxtext: a layer's quant must be None; got {type(layer.quant).__name__}; {_RECIPE}"
        )
    if layer.wo_scale is not None:
        raise ValueError(
            "expertmesh.maxtext: weight_dtype must be of 16 bits or more; got "
            f"weight_dtype={layer.weight_dtype}; keep float32 weights, and {_RECIPE}"
        )
    if layer.wi_0_sparsity_module is not None:
        raise ValueError(
            "expertmesh.maxtext: weight_sparsity_n must be 0; got "
            f"weight_sparsity_n={layer.config.weight_sparsity_n}; leave sparsity out"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """ValueError for an option of `installed` that is none."""
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"expertmesh.maxtext: options must be of {', '.join(OPTIONS)}; got {', '.join(unknown)}; what a block "
            "computes, its sizes and its router are fields of MaxText's config"
        )


_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}


def activation_of(config: Config) -> Activation:
    """What `apply_ffn_activation` computes, by `mlp_activations`, `mlp_activations_limit` and the decoder block.

    Raises:
      ValueError: an activation that the experts do not have.
    """
    name, limit = config.mlp_activations[0], config.mlp_activations_limit
    clamped = config.decoder_block in (DecoderBlockType.DEEPSEEK, DecoderBlockType.DEEPSEEK4)
    if config.decoder_block == DecoderBlockType.GPT_OSS and name == "sigmoid":
        return Activation(function="quick_gelu", limit=float(limit), up_offset=1.0)
    if config.decoder_block == DecoderBlockType.GPT_OSS or name not in _NAMES:
        raise ValueError(
            f"expertmesh.maxtext: mlp_activations must begin with one of {', '.join(_NAMES)}, or for gpt_oss with "
            f"sigmoid; got mlp_activations={config.mlp_activations}; use one of these"
        )
    return Activation(function=_NAMES[name], limit=float(limit) if clamped and limit > 0 else None)
