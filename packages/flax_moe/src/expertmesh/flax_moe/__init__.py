"""The MoE block for Flax (function, Linen, NNX), and the native baseline."""

__version__ = "0.1.0"

from expertmesh.flax_moe import checkpoint, hf, linen, nnx, peft, stages
from expertmesh.flax_moe.config import MoEConfig, MoEOutput
from expertmesh.flax_moe.exchange_bytes import exchange_bytes
from expertmesh.flax_moe.lora import (
    LoRA,
    init_lora,
    lora_shapes,
    lora_specs,
    merge_lora,
    with_lora,
)
from expertmesh.flax_moe.moe import moe
from expertmesh.flax_moe.native import NativeMoEBlock, native_moe
from expertmesh.flax_moe.params import (
    LogicalAxes,
    init_params,
    merge_wi,
    param_shapes,
    param_specs,
    split_wi,
)
from expertmesh.flax_moe.place_experts import permute_experts, place_experts
from expertmesh.flax_moe.quantization import init_quant_state, quantize_weights
from expertmesh.flax_moe.remat import CHECKPOINT_NAMES, REMAT_POLICIES
from expertmesh.flax_moe.support import is_supported
from expertmesh.flax_moe.upcycle import upcycle

__all__ = [
    "CHECKPOINT_NAMES",
    "LoRA",
    "LogicalAxes",
    "MoEConfig",
    "MoEOutput",
    "NativeMoEBlock",
    "REMAT_POLICIES",
    "checkpoint",
    "exchange_bytes",
    "hf",
    "init_lora",
    "init_params",
    "init_quant_state",
    "is_supported",
    "linen",
    "lora_shapes",
    "lora_specs",
    "merge_lora",
    "merge_wi",
    "moe",
    "native_moe",
    "nnx",
    "param_shapes",
    "param_specs",
    "peft",
    "permute_experts",
    "place_experts",
    "quantize_weights",
    "split_wi",
    "stages",
    "upcycle",
    "with_lora",
]
