"""MaxText's routed layers, whose experts are `expertmesh.flax_moe.moe`.

Dimension key: B batch, S sequence, D model width, E experts, K choices, F expert width.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from maxtext.common.common_types import DecoderBlockType, ShardMode
from maxtext.layers import moe as maxtext_moe
from maxtext.utils.sharding import maybe_shard_with_logical

from expertmesh.core import global_shard_guard
from expertmesh.core.specs import pad_spec
from expertmesh.flax_moe import MoEConfig, moe
from expertmesh.maxtext.mesh import layout_of
from expertmesh.maxtext.options import activation_of, check_config, check_layer, check_options

__all__ = ["RoutedAndSharedMoE", "RoutedMoE", "installed"]

# y [B, S, D], the balance loss, and of a routing bias the update or, under gradient accumulation, counts [E].
Result = tuple[jax.Array, jax.Array | None, jax.Array | None]


class RoutedMoE(maxtext_moe.RoutedMoE):
    """MaxText's `RoutedMoE`, constructed and called as that one is, with the experts of this library.

    Parameters, their names, shapes, shardings and initial values are inherited, and so are the gate, `get_topk`, the
    balance loss and the update of the routing bias, by `load_balance_updates_from_counts`, or raw counts where
    `gradient_accumulation_steps` is above 1. No choice is dropped.

    Attributes:
      expert_options: those of `installed`, for a subclass to set.

    Raises:
      ValueError: a field of the config that would change results and is not honoured, when it is constructed; a mesh
        whose rules the block cannot follow, when it is called.
    """

    expert_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        check_config(config)
        super().__init__(config, *args, **kwargs)

    def __call__(self, inputs: jax.Array, *args: Any, **kwargs: Any) -> Result:
        """As MaxText's: inputs [B, S, D], then `input_ids`, `gate_inputs`, `out_sharding`, `forced_routed_experts`."""
        return _call(self, self.expert_options, inputs, *args, **kwargs)


class RoutedAndSharedMoE(maxtext_moe.RoutedAndSharedMoE):
    """MaxText's `RoutedAndSharedMoE` with the routed experts of this library; shared experts stay its `MlpBlock`.

    Attributes:
      expert_options: as of `RoutedMoE`.

    Raises:
      ValueError: as `RoutedMoE`.
    """

    expert_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        check_config(config)
        super().__init__(config, *args, **kwargs)

    def __call__(
        self,
        inputs: jax.Array,
        original_inputs: jax.Array | None = None,
        gate_inputs: jax.Array | None = None,
        intermediate_sharding: NamedSharding | None = None,
        out_sharding: NamedSharding | None = None,
        **routing: Any,
    ) -> Result:
        """As MaxText's: inputs [B, S, D]; `routing` is `input_ids` and `forced_routed_experts`."""
        routing |= {"gate_inputs": gate_inputs, "out_sharding": out_sharding}
        routed, lb_loss, updates = _call(self.routed_moe, self.expert_options, inputs, **routing)
        shared = self.shared_experts(
            inputs, intermediate_sharding=intermediate_sharding, out_sharding=out_sharding
        )
        return routed + shared, lb_loss, updates


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[None]:
    """Within it every `RoutedMoE` of MaxText is constructed and called as `expertmesh.maxtext.RoutedMoE`.

    It assigns `maxtext.layers.moe.RoutedMoE.__init__` and `.__call__`, and puts back what was there on exit; programs
    that were traced within it stay as they are. For a whole process, enter it and never leave it:
    `contextlib.ExitStack().enter_context(installed())`.

    Args:
      options: how the experts compute, by the names of `expertmesh.flax_moe.MoEConfig`: `recipe`,
        `quantize_backward_combine`, `reduce_dtype`, `num_chunks`, `remat`, `transport`, `num_spare_experts`,
        `capacity_factor`, `alignment`, `debug`. Recipes with a state or a key (DelayedScaling, NVFP4BlockScaling) have
        no place in MaxText's train state: the call says so.

    Raises:
      ValueError: another option.
    """
    check_options(options)
    layer = maxtext_moe.RoutedMoE
    init, call = layer.__init__, layer.__call__
    layer.__init__ = _checked(init)
    layer.__call__ = functools.wraps(call)(
        lambda self, *args, **kwargs: _call(self, options, *args, **kwargs)
    )
    try:
        yield
    finally:
        layer.__init__, layer.__call__ = init, call


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, after `check_config`."""

    @functools.wraps(init)
    def checked(self: nnx.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        check_config(config)
        init(self, config, *args, **kwargs)

    return checked


def _call(
    layer: maxtext_moe.RoutedMoE,
    options: Mapping[str, Any],
    inputs: jax.Array,
    input_ids: jax.Array | None = None,
    gate_inputs: jax.Array | None = None,
    out_sharding: NamedSharding | None = None,
    forced_routed_experts: jax.Array | None = None,
) -> Result:
    check_options(options)
    check_layer(layer)
    x_BSD = inputs.astype(layer.config.dtype)
    scores_BSE, unbiased_BSE = _scores(layer, x_BSD if gate_inputs is None else gate_inputs)
    weights_BSK, idx_BSK = layer.get_topk(
        scores_BSE,
        unbiased_BSE,
        layer.rngs,
        input_ids=input_ids,
        forced_routed_experts=forced_routed_experts,
    )
    lb_loss = _balance_loss(layer, scores_BSE, unbiased_BSE, idx_BSK)
    explicit = layer.config.shard_mode == ShardMode.EXPLICIT
    if explicit:  # tokens are sent whole, whatever activation_embed says
        x_BSD = _with_whole_rows(x_BSD)
    y_BSD, counts_E = _experts(layer, options, x_BSD, weights_BSK, idx_BSK)
    if explicit:
        y_BSD = jax.sharding.reshard(y_BSD, out_sharding or jax.typeof(inputs).sharding)
    return y_BSD, lb_loss, _bias_updates(layer, counts_E)


def _scores(
    layer: maxtext_moe.RoutedMoE, gate_inputs: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """What the gate gives, with its bias and, of models that have them apart, without it, laid out as tokens."""
    config = layer.config
    dtype = jnp.float32 if config.float32_gate_logits else config.dtype
    names = ("activation_batch_moe", "activation_length_moe", None)
    biased, unbiased = (
        maybe_shard_with_logical(s, names, mesh=layer.mesh, shard_mode=config.shard_mode)
        for s in layer.gate(gate_inputs.astype(dtype))
    )
    return biased, unbiased


def _with_whole_rows(x_BSD: jax.Array) -> jax.Array:
    """The array over Explicit axes with its last dimension gathered."""
    sharding = jax.typeof(x_BSD).sharding
    spec = PartitionSpec(*pad_spec(sharding.spec, x_BSD.ndim)[:-1], None)
    whole: jax.Array = jax.sharding.reshard(x_BSD, NamedSharding(sharding.mesh, spec))
    return whole


def _balance_loss(
    layer: maxtext_moe.RoutedMoE,
    scores_BSE: jax.Array,
    unbiased_BSE: jax.Array | None,
    idx_BSK: jax.Array,
) -> jax.Array | None:
    config = layer.config
    if config.load_balance_loss_weight <= 0 or layer.is_hash_routing:
        return None
    if config.model_call_mode == "inference":
        return None
    if maxtext_moe.uses_megatron_seq_aux_loss(config):
        loss: jax.Array = layer.megatron_seq_aux_loss(
            scores_BSE if unbiased_BSE is None else unbiased_BSE
        )
        return loss
    probs_BSE = jax.nn.softmax(scores_BSE.astype(jnp.float32), axis=-1).astype(layer.dtype)
    loss = layer.load_balance_loss(idx_BSK, probs_BSE)
    return loss


def _bias_updates(layer: maxtext_moe.RoutedMoE, counts_E: jax.Array) -> jax.Array | None:
    """The update of the bias; under gradient accumulation counts, of which MaxText makes one update of all."""
    if not layer.should_update_load_balance():
        return None
    if layer.config.gradient_accumulation_steps > 1:
        return counts_E
    rate = layer.config.routed_bias_update_rate
    updates: jax.Array = maxtext_moe.load_balance_updates_from_counts(
        counts_E, layer.num_experts, rate
    )
    return updates


def _experts(
    layer: maxtext_moe.RoutedMoE,
    options: Mapping[str, Any],
    x_BSD: jax.Array,
    weights_BSK: jax.Array,
    idx_BSK: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What the experts add up to, and the counts of choices."""
    if layer.config.decoder_block == DecoderBlockType.LLAMA4:  # E(w x) in place of w E(x)
        x_BSD *= jax.nn.sigmoid(weights_BSK.astype(jnp.float32)).astype(layer.dtype)
        weights_BSK = jnp.ones_like(weights_BSK)
    layout = layout_of(layer)
    params = _params(layer)
    config = MoEConfig(
        num_experts=layer.num_experts,
        top_k=idx_BSK.shape[-1],
        expert_dim=params["wo"].shape[1],
        activation=activation_of(layer.config),
        use_gate=False,
        use_bias="wo_bias" in params,
        dtype=layer.dtype,
        param_dtype=params["wo"].dtype,
        shard_exp_on_fsdp=layout.shard_exp_on_fsdp,
        ep_axis=layout.ep_axis,
        **options,
    )
    with global_shard_guard(layout.resource):
        out = moe(params, x_BSD, config, topk_idx=idx_BSK, topk_weights=weights_BSK)
    return out.y, out.tokens_per_expert


def _params(layer: maxtext_moe.RoutedMoE) -> dict[str, jax.Array]:
    """The layer's weights under the block's names."""
    names = ["wo"] + ["wi_0_bias", "wi_1_bias", "wo_bias"] * bool(layer.config.mlp_bias)
    if layer.config.prefuse_moe_weights:
        wi_0, wi_1 = jnp.split(layer.wi[...], 2, axis=-1)
        return {"wi_0": wi_0, "wi_1": wi_1} | {name: getattr(layer, name)[...] for name in names}
    return {name: getattr(layer, name)[...] for name in ["wi_0", "wi_1", *names]}
