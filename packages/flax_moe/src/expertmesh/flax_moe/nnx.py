"""The MoE block as a Flax NNX module: parameters and their logical axes, nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.nn.initializers import Initializer

from expertmesh.core.operands import check_type
from expertmesh.core.specs import spec_axes
from expertmesh.flax_moe.config import MoEConfig, MoEOutput
from expertmesh.flax_moe.lora import (
    LoRA,
    lora_axes,
    lora_initializers,
    lora_shapes,
    with_lora,
)
from expertmesh.flax_moe.moe import moe
from expertmesh.flax_moe.params import LogicalAxes, initializers, param_names, param_shapes
from expertmesh.flax_moe.quantization import init_quant_state

__all__ = ["ExpertBias", "MoEBlock", "QuantState"]


class ExpertBias(nnx.Variable[jax.Array]):
    """The bias [E] that steers the choice of experts: no `nnx.Param`, so no optimizer of the parameters sees it."""


class QuantState(nnx.Variable[Any]):
    """What delayed scaling remembers: no `nnx.Param`, so no optimizer of the parameters sees it."""


class MoEBlock(nnx.Module):
    """`expertmesh.flax_moe.moe` with one `nnx.Param` for each parameter of `init_params`, under its name.

    With `config.use_expert_bias` there is also `expert_bias`, an ExpertBias [E] of float32 zeros, replicated. The block
    only reads it; balance it between steps:

        block.expert_bias[...] = update_expert_bias(block.expert_bias[...], out.tokens_per_expert, rate)

    Under DelayedScaling there is `quant_state`, a QuantState of the tree of `init_quant_state`. It is read only, too:

        block.quant_state.set_value(out.quant_state)

    With `lora` the weights are frozen, and beside each there are `{name}_lora_a` and `{name}_lora_b`, of the tree of
    `init_lora`, as `flax.nnx.LoRAParam`s: differentiate and optimize by `wrt=nnx.LoRAParam`.
    """

    def __init__(
        self,
        model_dim: int,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs,
        logical_axes: LogicalAxes | None = LogicalAxes(),  # noqa: B008  a frozen value
        kernel_init: Initializer | None = None,
        lora: LoRA | None = None,
    ) -> None:
        """Draws the parameters from `rngs.params()`.

        Args:
          model_dim: D.
          config: see MoEConfig.
          rngs: source of keys.
          logical_axes: names for each parameter's `out_sharding`; None: no such metadata. The parameter is laid out at
            once where all its names are, or by `flax.core.spmd.logical_axis_rules` map to, axes of the mesh in context.
          kernel_init: of the weights; see `init_params`.
          lora: of the adapters; None: there are none.
        """
        MoEConfig.check("MoEBlock", config=config)
        check_type("MoEBlock", nnx.Rngs, "pass nnx.Rngs(0)", rngs=rngs)
        self.config, self.lora = config, lora
        init = initializers(config, kernel_init)
        for name, shape in param_shapes(model_dim, config).items():
            metadata = {}
            if logical_axes is not None:
                metadata = _metadata(logical_axes.of(name, gated=config.act.gated))
            value = init[name](rngs.params(), shape, config.param_dtype)
            setattr(self, name, nnx.Param(value, **metadata))
        if lora is not None:
            self._add_adapters(model_dim, lora, rngs, logical_axes)
        if config.use_expert_bias:
            self.expert_bias = ExpertBias(jnp.zeros(config.num_candidates, jnp.float32))
        state = init_quant_state(config)
        if state is not None:
            self.quant_state = QuantState(state)

    def _add_adapters(
        self, model_dim: int, lora: LoRA, rngs: nnx.Rngs, logical_axes: LogicalAxes | None
    ) -> None:
        for name, parts in lora_shapes(model_dim, self.config, lora).items():
            for part, shape in parts.items():
                metadata = {}
                if logical_axes is not None:
                    axes = lora_axes(name, logical_axes, gated=self.config.act.gated)
                    metadata = _metadata(axes[part])
                value = lora_initializers(name, lora)[part](rngs.params(), shape, lora.dtype)
                setattr(self, f"{name}_lora_{part}", nnx.LoRAParam(value, **metadata))

    def _params(self) -> dict[str, Any]:
        """What `moe` takes."""
        params = {name: getattr(self, name)[...] for name in param_names(self.config)}
        if self.lora is None:
            return params
        adapters = {
            name: {part: getattr(self, f"{name}_lora_{part}")[...] for part in "ab"}
            for name in self.lora.of(self.config)
        }
        return with_lora(params, adapters, self.lora)

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
        """See `moe`; x is float[..., D]. Add the losses of the result to yours."""
        # A block that was made under another recipe has none, which `moe` refuses.
        delayed = init_quant_state(self.config) is not None and hasattr(self, "quant_state")
        state = self.quant_state.get_value() if delayed else None
        return moe(
            self._params(),
            x,
            self.config,
            expert_bias=self.expert_bias[...] if self.config.use_expert_bias else None,
            token_mask=token_mask,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            logits=logits,
            aux_loss_coeff=aux_loss_coeff,
            z_loss_coeff=z_loss_coeff,
            quant_state=state,
            weights_quantized=weights_quantized,
            key=key,
        )


def _metadata(names: tuple[str | None, ...]) -> dict[str, Any]:
    # Flax would raise where a name is not an axis of the mesh, or where there is no mesh.
    rules: dict[Any, Any] = dict(get_logical_axis_rules())
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    known = bool(mesh_axes) and all(
        axis in mesh_axes for axis in spec_axes([rules.get(name, name) for name in names])
    )
    return {"out_sharding": names, "eager_sharding": known}
