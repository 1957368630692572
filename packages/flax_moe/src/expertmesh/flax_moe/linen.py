"""The MoE block as a Flax Linen module: parameters and their logical axes, nothing else."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from expertmesh.flax_moe.config import MoEConfig, MoEOutput
from expertmesh.flax_moe.lora import (
    LoRA,
    lora_axes,
    lora_initializers,
    lora_shapes,
    with_lora,
)
from expertmesh.flax_moe.moe import moe
from expertmesh.flax_moe.params import LogicalAxes, initializers, param_shapes
from expertmesh.flax_moe.quantization import init_quant_state

__all__ = ["EXPERT_BIAS", "LORA", "QUANT_STATE", "MoEBlock"]

EXPERT_BIAS = "expert_bias"
"""The collection of the biases that steer the choice of experts."""

LORA = "lora"
"""The collection of adapters."""

QUANT_STATE = "quant_state"
"""The collection of what delayed scaling remembers."""


class MoEBlock(nn.Module):
    """`expertmesh.flax_moe.moe` with its parameters in the collection "params", under the names of `init_params`.

    With `config.use_expert_bias` there is also "expert_bias" [E], float32 zeros at first, replicated, in the collection
    `EXPERT_BIAS`, which no optimizer of the parameters sees. The block only reads it; balance it between steps:

        bias = update_expert_bias(variables[EXPERT_BIAS]["expert_bias"], out.tokens_per_expert, rate)

    Under DelayedScaling there is "quant_state", the tree of `init_quant_state`, in the collection `QUANT_STATE`. It is
    read only, too: the next step's is `{"quant_state": out.quant_state}`.

    With `lora` the weights are frozen, and the collection `LORA` has the arrays of `init_lora`, such as "wi_a" and
    "wi_b": differentiate and optimize that collection alone. Its A are drawn from the key of "params".

    Attributes:
      config: see MoEConfig.
      logical_axes: names for `flax.linen.LogicallyPartitioned`; None: plain arrays.
      kernel_init: of the weights; see `init_params`.
      lora: of the adapters; None: there are none.

    The call returns the whole MoEOutput: add its losses to yours. Nothing is sown; `capture_intermediates` finds it.
    """

    config: MoEConfig
    logical_axes: LogicalAxes | None = LogicalAxes()
    kernel_init: Initializer | None = None
    lora: LoRA | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        topk_idx: jax.Array | None = None,
        topk_weights: jax.Array | None = None,
        logits: jax.Array | None = None,
        aux_loss_coeff: float | jax.Array | None = None,
        z_loss_coeff: float | jax.Array | None = None,
        weights_quantized: Any = None,
        key: jax.Array | None = None,
    ) -> MoEOutput:
        """See `moe`; x is float[..., D]."""
        MoEConfig.check("MoEBlock", config=self.config)
        shapes = param_shapes(x.shape[-1], self.config)
        params = {
            name: self.param(name, self._init(name), shape, self.config.param_dtype)
            for name, shape in shapes.items()
        }
        if self.lora is not None:
            params = with_lora(params, self._adapters(x.shape[-1], self.lora), self.lora)
        return moe(
            params,
            x,
            self.config,
            expert_bias=self._expert_bias(),
            token_mask=token_mask,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            logits=logits,
            aux_loss_coeff=aux_loss_coeff,
            z_loss_coeff=z_loss_coeff,
            quant_state=self._quant_state(),
            weights_quantized=weights_quantized,
            key=key,
        )

    def _init(self, name: str) -> Callable[..., Any]:
        init = initializers(self.config, self.kernel_init)[name]
        if self.logical_axes is None:
            return init
        names = self.logical_axes.of(name, gated=self.config.act.gated)
        return nn.with_logical_partitioning(init, names)

    def _adapters(self, model_dim: int, lora: LoRA) -> dict[str, dict[str, jax.Array]]:
        shapes = lora_shapes(model_dim, self.config, lora)
        return {
            name: {part: self._adapter(name, part, shape) for part, shape in parts.items()}
            for name, parts in shapes.items()
        }

    def _adapter(self, name: str, part: str, shape: tuple[int, ...]) -> jax.Array:
        assert self.lora is not None
        lora, init = self.lora, lora_initializers(name, self.lora)[part]
        if self.logical_axes is not None:
            axes = lora_axes(name, self.logical_axes, gated=self.config.act.gated)
            init = nn.with_logical_partitioning(init, axes[part])

        def drawn() -> Any:
            return init(self.make_rng("params"), shape, lora.dtype)

        made: jax.Array = self.variable(LORA, f"{name}_{part}", drawn).value
        return made

    def _expert_bias(self) -> jax.Array | None:
        if not self.config.use_expert_bias:
            return None
        shape = (self.config.num_candidates,)
        return self.variable(EXPERT_BIAS, "expert_bias", jnp.zeros, shape, jnp.float32).value

    def _quant_state(self) -> Any:
        # Variables that were made under another recipe have none, which `moe` refuses.
        made = self.is_initializing() or self.has_variable(QUANT_STATE, "quant_state")
        if init_quant_state(self.config) is None or not made:
            return None
        return self.variable(QUANT_STATE, "quant_state", init_quant_state, self.config).value
