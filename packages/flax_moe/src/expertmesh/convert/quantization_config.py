"""`quantization_config` of `config.json`: which weights have 8 bits, as `transformers` is told."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from expertmesh.flax_moe.models import fp4_blocks, fp8_blocks
from expertmesh.flax_moe.models.model_fields import inner

__all__ = ["Plan", "check_quantization", "with_quantization"]

KEY = "quantization_config"
_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(fp8_blocks.BLOCK),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a target has.

    Attributes:
      others: name -> array of what is not of a MoE layer.
      modules: of each MoE layer, by Hugging Face's names: its modules, and whether they have 8 bits under fp8.
      is_fp8: whether their experts have 8 bits in the target.
      unchanged: whether each layer's have them in the source, or not, as in the target.
    """

    others: Mapping[str, Any]
    modules: tuple[Mapping[str, bool], ...]
    is_fp8: bool
    unchanged: bool


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raises ValueError where weights are quantized otherwise than in 8-bit blocks, or in 4-bit ones of 32."""
    method = inner(config, KEY).get("quant_method", "fp8")
    if method not in ("fp8", fp4_blocks.METHOD):
        raise ValueError(
            f"convert: {KEY}.quant_method must be 'fp8', with weight_block_size, {fp4_blocks.METHOD!r}, or absent; got "
            f"{method!r}; "
            "pass the weights of 16 bits"
        )
    fp8_blocks.block_size(config)  # raises, whether there are such weights or not


def with_quantization(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The config of the target: unchanged where the same weights have 8 bits."""
    if fp4_blocks.is_packed(config):  # they were widened
        config = {key: value for key, value in config.items() if key != KEY}
    known = config.get(KEY)
    if plan.unchanged:
        return dict(config)
    others = any(array.dtype.itemsize == 1 for array in plan.others.values())
    if not plan.is_fp8 and not others:
        return {key: value for key, value in config.items() if key != KEY}
    return {**config, KEY: {**(known or _FP8), "modules_to_not_convert": _widened(plan)}}


def _widened(plan: Plan) -> list[str]:
    """The modules whose weights are matrices of 16 bits and more; `lm_head` may have that of another."""
    matrices = [
        name.removesuffix(".weight")
        for name, array in plan.others.items()
        if name.endswith(".weight") and array.ndim == 2 and array.dtype.itemsize > 1
    ]
    kept = {
        name
        for modules in plan.modules
        for name, quantizable in modules.items()
        if not (quantizable and plan.is_fp8)
    }
    return sorted({"lm_head", *matrices, *kept})
