"""Model FLOP/s utilization (MFU): FLOP/s of the model's formula over the peak of the devices.

    MFU = tokens per second * FLOPs per token / (devices * peak of one)

FLOPs per token as in appendix B of PaLM (Chowdhery et al., 2022, arXiv:2204.02311): 6 for each weight that multiplies a
token, 2 of them forward and 4 backward, and 12 S D a layer for scores and values. The causal mask does not lower it,
and rematerialization does not raise it. A token counts its K experts. Bytes are looked up, not multiplied.

Dimension key: S positions, D model width, V bytes, L layers, E experts, K of them for a token, F expert width.
"""

from __future__ import annotations

import dataclasses
from math import prod

import jax
import jax.numpy as jnp

from expertmesh.flax_moe.params import param_shapes
from expertmesh.train.model import VOCAB, ModelConfig

# TFLOP/s of dense bfloat16 GEMMs, without sparsity, by NVIDIA's data sheets; the first name that fits counts.
_PEAKS = (
    ("NVIDIA GB200", 2500.0),
    ("NVIDIA B200", 2250.0),
    ("NVIDIA H200 NVL", 835.5),
    ("NVIDIA H200", 989.4),
    ("NVIDIA GH200", 989.4),
    ("NVIDIA H100 PCIe", 756.5),
    ("NVIDIA H100 NVL", 835.5),
    ("NVIDIA H100", 989.4),
    ("NVIDIA A100", 312.0),
)


@dataclasses.dataclass(frozen=True)
class Meter:
    """What a speed is worth.

    Attributes:
      flops_per_token: of a training step.
      devices: how many share the work.
      device_kind: what they are.
      peak: FLOP/s of one, None where it is not known.
    """

    flops_per_token: float
    devices: int
    device_kind: str
    peak: float | None

    def mfu(self, tokens_per_second: float) -> float | None:
        """1 is the peak of all devices; None where that is not known."""
        if self.peak is None:
            return None
        return tokens_per_second * self.flops_per_token / (self.devices * self.peak)

    def describe(self, tokens_per_second: float) -> str:
        """In words, with the numbers behind the figure."""
        rate, mfu = tokens_per_second * self.flops_per_token, self.mfu(tokens_per_second)
        if mfu is None or self.peak is None:
            why = f"no peak of bfloat16 GEMMs is known of {self.device_kind}"
            return f"{tokens_per_second:.0f} tokens/s; no MFU, since {why}"
        return (
            f"{tokens_per_second:.0f} tokens/s, MFU {100 * mfu:.1f} %: {rate / self.devices / 1e12:.1f} of "
            f"{self.peak / 1e12:.0f} TFLOP/s a device, at {self.flops_per_token / 1e9:.3g} GFLOP a token"
        )


def meter(config: ModelConfig, seq_len: int) -> Meter:
    """Of a model trained on all devices. Only bfloat16 has a peak."""
    kind = jax.devices()[0].device_kind
    peak = peak_flops(kind) if config.moe.dtype == jnp.bfloat16 else None
    return Meter(flops_per_token(config, seq_len), jax.device_count(), kind, peak)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Of a training step, forward and backward."""
    D, moe = config.model_dim, config.moe
    block = sum(
        moe.top_k * prod(shape[1:]) if name in ("wi", "wo") else prod(shape)
        for name, shape in param_shapes(D, moe).items()
        if not name.endswith("bias")
    )
    qkv, out = 3 * D * D, D * D
    weights = config.layers * (qkv + out + block) + D * VOCAB
    return 6.0 * weights + 12.0 * config.layers * seq_len * D


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of a device in bfloat16, by `jax.Device.device_kind`; None where it is not known, as of a CPU."""
    known = (peak for name, peak in _PEAKS if device_kind.startswith(name))
    peak = next(known, None)
    return None if peak is None else 1e12 * peak
