"""The stages of the block as functions of values, which `moe` composes and a schedule of your own can call.

    routed     = route(params, x, config)
    dispatched = dispatch(params, routed, config)
    computed   = experts(params, dispatched, config)
    y          = combine(computed)

Each value is a pytree of arrays, so you can hold one microbatch's result of `dispatch` while you compute another stage
of the next. Each stage has its own backward: that of `dispatch` is a combine, that of `combine` a dispatch, that of
`experts` moves no token.

Pass every stage the same parameters and config; each reads what it needs. Call all of them in the same context:
`expertmesh.core.autocast`, `expertmesh.core.global_shard_guard` and mesh. `moe` adds what concerns the whole block:
`num_chunks` and `remat`, which the stages do not read, the sum of the shared experts, and the layout of y, which is
that of x.

Dimension key: `...` tokens, K choices per token, E experts, P participants, C receive rows per participant, D model
width, F expert width.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from expertmesh import ep
from expertmesh.core.linear.adapted import check_weights
from expertmesh.core.linear.dense import dense
from expertmesh.core.mesh import MeshResource, current_resource, global_shard_guard
from expertmesh.core.operands import (
    check_token_mask,
    check_type,
    debug_check_ids,
    routed_ids,
    wide_ids,
)
from expertmesh.core.ops.activation import activate
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import current_recipe
from expertmesh.core.router.balance import (
    expert_counts,
    load_balance_loss,
    router_z_loss,
    sequence_balance_loss,
)
from expertmesh.core.router.logits import router_logits
from expertmesh.core.router.route import RouterConfig
from expertmesh.core.router.route import route as route_logits
from expertmesh.core.router.statistics import router_statistics
from expertmesh.core.specs import pad_spec
from expertmesh.ep.partition import resource_of_rows
from expertmesh.flax_moe.checks import (
    Coefficient,
    check_expert_bias,
    check_latent,
    check_outside,
    check_tokens,
    coefficient,
    ep_axes,
    experts_held,
    is_on,
)
from expertmesh.flax_moe.config import MoEConfig, dispatches_quantized
from expertmesh.flax_moe.experts import Dispatched, adds_rows, feed_forward, reads_tokens
from expertmesh.flax_moe.params import (
    BIASES,
    EXPERTS,
    LATENT,
    SHARED,
    SHARED_GATE,
    Params,
    check_part,
    gate_part,
    whole_params,
    whole_specs,
)
from expertmesh.flax_moe.quantization import Quantization, output_and_state
from expertmesh.flax_moe.quantized_dispatch import dispatch_quantized, quantize_tokens
from expertmesh.flax_moe.remat import named
from expertmesh.flax_moe.spare_experts import with_copies

__all__ = [
    "Computed",
    "Dispatched",
    "Routed",
    "combine",
    "dispatch",
    "experts",
    "from_latent",
    "null_experts",
    "route",
    "shared_experts",
    "to_latent",
]


class Routed(NamedTuple):
    """Tokens and their choices. With your own router, make one from the first three fields.

    Attributes:
      x: [..., D], 0 for tokens that a mask takes out.
      topk_idx: int[..., K]. A choice outside [0, E), such as -1, goes to no expert; a choice in [E, E + Z) is a null
        expert.
      topk_weights: float32[..., K].
      aux_loss, z_loss, tokens_per_expert, entropy: as in `MoEOutput`; None where `route` did not make them.
    """

    x: jax.Array
    topk_idx: jax.Array
    topk_weights: jax.Array
    aux_loss: Any = None
    z_loss: Any = None
    tokens_per_expert: Any = None
    entropy: Any = None


class Computed(NamedTuple):
    """What the experts make of their rows.

    Attributes:
      handle: that of the `Dispatched`.
      rows: [P, C, D] in `config.dtype`, times the routing weights. Do not read rows that hold no token. None if there
        are `sums`.
      quant_state: the next call's, of `wi` and `wo`; None unless the recipe is a DelayedScaling.
      sums: [..., D], the sum of each token's rows, if the experts add them up, which they do on one device (`experts`).
    """

    handle: ep.Handle
    rows: jax.Array | None
    quant_state: Any = None
    sums: jax.Array | None = None


def route(
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    *,
    expert_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    logits: jax.Array | None = None,
    aux_loss_coeff: Coefficient | None = None,
    z_loss_coeff: Coefficient | None = None,
) -> Routed:
    """`topk_idx, topk_weights = expertmesh.core.route(logits, config.router)`, and the losses of these logits.

        logits = x @ gate_kernel + gate_bias,  in float32

    Args:
      params: `gate_kernel` [D, E], with Z null experts [D, E + Z], unless logits or weights are given, and `gate_bias`
        [E] if the gate has one; others are not read.
      x: float[..., D] with at least one dimension of tokens.
      config: see MoEConfig.
      expert_bias, token_mask, topk_idx, topk_weights, logits, aux_loss_coeff, z_loss_coeff: as for `moe`.

    Returns:
      Routed, its numbers float32, sharded as x is over tokens.

    Raises:
      ValueError: a `gate_kernel` that is missing, of the wrong shape, or there beside logits; a bias, mask or choices
        that `expertmesh.core.route` refuses; no bias under `config.use_expert_bias`, unless choices are given; logits
        or weights that do not fit the tokens; weights without choices; losses without logits; a symbolic size.
      TypeError: x or `gate_kernel` is no array, or not floating point; a bias, mask, choices, weights or logits of
        other numbers.

    Differentiable in x, `gate_kernel`, `gate_bias`, `logits`, `topk_weights` and the coefficients. Routes tokens where
    they are: no token moves. The counts and losses are all-reduces of [E] vectors; a program that does not read them
    leaves these out.
    """
    MoEConfig.check("stages.route", config=config)
    check_tokens("stages.route", x)
    check_expert_bias("stages.route", config, expert_bias, topk_idx)
    outside = dict(logits=logits, topk_idx=topk_idx, topk_weights=topk_weights)
    coeffs: dict[str, Any] = dict(aux_loss_coeff=aux_loss_coeff, z_loss_coeff=z_loss_coeff)
    check_outside("stages.route", params, x, config, **outside, **coeffs)
    needs_gate = logits is None and topk_weights is None
    own = gate_part("stages.route", params, x.shape[-1], config, needed=needs_gate)
    if token_mask is not None:
        check_token_mask("stages.route", token_mask, x.shape[:-1])
        # What a masked token holds may be NaN, and the gradients of all tokens' weights multiply with it.
        x = jnp.where(token_mask[..., None], x, 0)
    if config.debug and topk_idx is not None:
        debug_check_ids("stages.route", topk_idx, config.num_candidates)
    logits, topk_idx, topk_weights = (_with_tokens(x, array) for array in outside.values())
    if own:
        logits = _logits(own, x, config)
    if topk_weights is not None:
        topk_idx, topk_weights = _given(topk_idx, topk_weights, token_mask, config)
    else:
        topk_idx, topk_weights = route_logits(
            logits, config.router, expert_bias=expert_bias, token_mask=token_mask, topk_idx=topk_idx
        )
    return Routed(
        x=x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        aux_loss=_aux_loss(logits, topk_idx, token_mask, config, aux_loss_coeff),
        z_loss=_z_loss(logits, token_mask, config, z_loss_coeff),
        # The counts of the balance loss, so that the two are computed and summed once.
        tokens_per_expert=expert_counts(topk_idx, num_experts=config.num_candidates),
        entropy=_entropy(logits, topk_idx, config),
    )


def dispatch(params: Params, routed: Routed, config: MoEConfig) -> Dispatched:
    """`handle = prepare(topk_idx, ...)`; `rows = expertmesh.ep.dispatch(handle, x.astype(config.dtype))`.

    Under `config.weigh_inputs` it dispatches w x, rounded once, w being the token's one weight; the weight of each row
    is then 1.

    Under `config.num_spare_experts` the exchange is over slots (`expertmesh.ep.balance`). `copies` says which experts
    the spare slots hold, and `experts` copies their weights.

    Under a recipe with scales per token (`Float8BlockScaling`, `MXFP8BlockScaling`) tokens are quantized where they
    are, and 8 bits travel. If all tokens and experts are on one device, `experts` can read the tokens in place, and
    nothing is copied. It does so under a recipe with one scale per group (`Float8CurrentScaling`, `DelayedScaling`),
    and without a recipe if the up projection writes no more than it reads (2 F <= D).

    Args:
      params: `wi` and, if there are biases, `wi_bias` and `wo_bias`. Their types and shapes say over which axes the
        experts are split and how wide they are.
      routed: of `route`, or tokens and choices of your own.
      config: see MoEConfig.

    Returns:
      Dispatched, its arrays sharded over (outer axes..., EP axes...).

    Raises:
      ValueError: a parameter that is missing or of the wrong shape; experts or tokens that the EP axis does not divide;
        an EP axis that the mesh lacks; choices or weights that do not fit the tokens.
      TypeError: x is no array, or not floating point; choices that are not integers.

    Differentiable in `routed.x` and `routed.topk_weights`; the backward is a combine. Costs an all-gather of int32
    [..., K] and one of float32 [..., K] over the EP axis, and the exchange of each choice's token; see
    `expertmesh.ep.dispatch`.
    """
    check_type("stages.dispatch", Routed, "pass what stages.route made", routed=routed)
    MoEConfig.check("stages.dispatch", config=config)
    config, params = config.under(current_recipe()), whole_params("stages.dispatch", params)
    check_tokens("stages.dispatch", routed.x)
    check_latent("stages.dispatch", config, routed.x)
    ep_axis = ep_axes("stages.dispatch", params, config)
    held = experts_held("stages.dispatch", routed.x, config, ep_axis)
    names = (*EXPERTS, *BIASES)
    own = check_part("stages.dispatch", params, names, routed.x.shape[-1], config, held)
    prepared = _prepare(_sent(routed.topk_idx, config), config, ep_axis)
    handle, copies = named("dispatched", prepared)
    x, weights = _weighed(routed, config)
    weights_PC = named("dispatched", ep.dispatch_weights(handle, weights))
    rows, quantized = _dispatched_rows(own, x, handle, config)
    return Dispatched(
        handle=handle,
        weights=weights_PC,
        rows=rows,
        quantized=quantized,
        num_dropped=jnp.sum(handle.num_dropped, dtype=jnp.int32),
        overflow=ep.find_overflow(handle) if config.overflow == "error" else None,
        copies=copies,
    )


def experts(
    params: Params,
    dispatched: Dispatched,
    config: MoEConfig,
    *,
    quant_state: Any = None,
    weights_quantized: Any = None,
    key: jax.Array | None = None,
) -> Computed:
    """`rows_r = (w_r act(rows_r wi_e + wi_bias_e)) wo_e + w_r wo_bias_e`, e being the expert of row r, w its weight.

    Args:
      params: `wi` [E, D, 2, F] and `wo` [E, F, D], both or none of their biases; others are not read.
      dispatched: of `dispatch`, under this config.
      config: see MoEConfig.
      quant_state, weights_quantized: as for `moe`; only the entries of `wi` and `wo` are read.
      key: as for `moe`.

    Returns:
      Computed, its rows sharded like those of `dispatched`. On one device and without biases it can have the tokens'
      sums in place of rows; the backward then reads the cotangents of tokens in place. That is so under a recipe that
      quantizes gradients to 8 bits, and without a recipe for experts of F up to 1024 that read tokens in place.

    Raises:
      ValueError: a parameter that is missing or of the wrong shape; what a recipe needs is missing, or has no use.
      TypeError: a parameter that is no array, or not floating point.

    Differentiable in `dispatched` and all of these parameters. Moves no token. Costs one gather of the weights over
    fsdp; the backward costs another and a reduce-scatter of their gradients. A tp axis adds the sum over F. Spare slots
    add an exchange of copies and one of their gradients over the EP axis (`expertmesh.ep.copy_experts`).
    """
    check_type(
        "stages.experts", Dispatched, "pass what stages.dispatch made", dispatched=dispatched
    )
    MoEConfig.check("stages.experts", config=config)
    config, params = config.under(current_recipe()), whole_params("stages.experts", params)
    given = Quantization(quant_state, weights_quantized, key).of(EXPERTS)
    given = given.checked("stages.experts", config, EXPERTS)
    held = experts_held(
        "stages.experts", dispatched.rows, config, ep_axes("stages.experts", params, config)
    )
    names, width = (*EXPERTS, *BIASES), dispatched.rows.shape[-1]
    own = check_part("stages.experts", params, names, width, config, held)
    of_slots, given = with_copies(own, given, dispatched.copies, config, specs=_specs(config))
    with _resource_of(dispatched.handle):
        rows, state = feed_forward(of_slots, dispatched, config, given=given, specs=_specs(config))
    handle = dispatched.handle
    if adds_rows(own, handle, config):
        sums = rows.reshape(*handle.slot.shape[:-1], rows.shape[-1])
        return Computed(handle=handle, rows=None, quant_state=state, sums=sums)
    return Computed(handle=handle, rows=rows, quant_state=state)


def combine(computed: Computed) -> jax.Array:
    """`y_t = sum of computed.rows over the rows of token t`: `expertmesh.ep.combine`, or `computed.sums`.

    Args:
      computed: of `experts`.

    Returns:
      [..., D] in the dtype of the rows; 0 for a token without rows. Sharded like `topk_idx` over tokens. Over Explicit
      axes tokens are sharded over the EP axis, even if x was not; `moe` lays y out like x.

    Raises:
      ValueError: rows that do not fit the handle, or no rows and no sums.

    Differentiable in the rows; the backward is a dispatch. Costs the exchange of one row for each choice; see
    `expertmesh.ep.combine`.
    """
    check_type("stages.combine", Computed, "pass what stages.experts made", computed=computed)
    handle, rows, _, sums = computed
    if sums is not None:
        return named("combined", sums)
    if rows is None:
        raise ValueError(
            "stages.combine: computed must have rows or sums; got neither; pass the result of stages.experts"
        )
    with _resource_of(handle):
        return named("combined", ep.combine(handle, rows))


def shared_experts(
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    *,
    quant_state: Any = None,
    weights_quantized: Any = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """`act(x shared_wi) shared_wo`: what `moe` adds to the result of `combine` under `config.shared_expert_dim`.

    Under `config.shared_expert_gate` the result is times `sigmoid(x . shared_gate)`, one number per token, computed in
    float32.

    Args:
      params: `shared_wi` [D, 2, S] and `shared_wo` [S, D], and `shared_gate` [D] if they are gated; others are not
        read.
      x: float[..., D]; with a token mask `Routed.x`, else what you gave to `route`.
      config: see MoEConfig.
      quant_state, weights_quantized: as for `moe`; only the entries of the shared experts are read.
      key: as for `moe`.

    Returns:
      ([..., D] in `config.dtype`, the next call's `quant_state` of the shared experts or None).

    Raises:
      ValueError: a parameter that is missing or of the wrong shape; what a recipe needs is missing, or has no use.
      TypeError: x or a parameter that is no array, or not floating point.

    Differentiable in x and the parameters. Moves no token and needs no other stage, so a compiler can run it during an
    exchange. Costs what `expertmesh.core.dense` costs, twice; a gate reads x once more.
    """
    MoEConfig.check("stages.shared_experts", config=config)
    names = SHARED + SHARED_GATE * config.shared_expert_gate
    given = Quantization(quant_state, weights_quantized, key)
    layers = _Dense.of("stages.shared_experts", names, params, x, config, given)
    h, wi_state = layers.project("shared_wi", x)
    y, wo_state = layers.project("shared_wo", activate(h, config.activation))
    if config.shared_expert_gate:
        y = _weighted(y, _gate(x, layers.params["shared_gate"]), y.dtype)
    return y, layers.given.state and {"shared_wi": wi_state, "shared_wo": wo_state}


def to_latent(
    params: Params,
    routed: Routed,
    config: MoEConfig,
    *,
    quant_state: Any = None,
    weights_quantized: Any = None,
    key: jax.Array | None = None,
) -> tuple[Routed, Any]:
    """`routed` with `x latent_down` for x: what `moe` dispatches under `config.latent_dim`.

    Args:
      params: `latent_down` [D, L]; others are not read.
      routed: of `route`.
      config: see MoEConfig.
      quant_state, weights_quantized: as for `moe`; only the entry of `latent_down` is read.
      key: as for `moe`.

    Returns:
      (Routed with x [..., L] in `config.dtype`, the next call's `quant_state` of `latent_down` or None).

    Raises:
      ValueError: a parameter that is missing or of the wrong shape; what a recipe needs is missing, or has no use.
      TypeError: x or a parameter that is no array, or not floating point.

    Differentiable in `routed.x` and the parameter. Moves no token. Costs what `expertmesh.core.dense` costs.
    """
    MoEConfig.check("stages.to_latent", config=config)
    check_type("stages.to_latent", Routed, "pass what stages.route made", routed=routed)
    given = Quantization(quant_state, weights_quantized, key)
    layers = _Dense.of("stages.to_latent", LATENT[:1], params, routed.x, config, given)
    x, state = layers.project("latent_down", routed.x)
    return routed._replace(x=x), layers.given.state and {"latent_down": state}


def from_latent(
    params: Params,
    y: jax.Array,
    config: MoEConfig,
    *,
    quant_state: Any = None,
    weights_quantized: Any = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """`y latent_up`, y being the result of `combine`: what `moe` returns under `config.latent_dim`.

    Args:
      params: `latent_up` [L, D]; others are not read.
      y: float[..., L].
      config, quant_state, weights_quantized, key: as for `to_latent`.

    Returns, costs, errors and gradients are those of `to_latent`: ([..., D], state).
    """
    MoEConfig.check("stages.from_latent", config=config)
    given = Quantization(quant_state, weights_quantized, key)
    layers = _Dense.of("stages.from_latent", LATENT[1:], params, y, config, given)
    y, state = layers.project("latent_up", y)
    return y, layers.given.state and {"latent_up": state}


@dataclasses.dataclass(frozen=True)
class _Dense:
    """The dense layers of a stage.

    Attributes:
      params: its own.
      config: under the recipe in context.
      given: what its layers are given for that.
    """

    params: Params
    config: MoEConfig
    given: Quantization

    @classmethod
    def of(
        cls,
        function: str,
        names: tuple[str, ...],
        params: Params,
        x: jax.Array,
        config: MoEConfig,
        given: Quantization,
    ) -> "_Dense":
        """After the errors about the operands, which name `function`."""
        config = config.under(current_recipe())
        check_tokens(function, x)
        layers = [name for name in names if name not in SHARED_GATE]
        given = given.of(layers).checked(function, config, layers)
        # A latent is as wide as the config says: what its projection makes of it is the parameter's to say.
        width = x.shape[-1]
        if names == LATENT[1:]:
            up = whole_params(function, params, names).get("latent_up")
            if up is not None:
                check_weights(function, latent_up=up)
                width = up.shape[-1] if up.shape else width
        return cls(
            check_part(function, params, names, width, config, config.num_experts), config, given
        )

    def project(self, name: str, x: jax.Array) -> tuple[jax.Array, Any]:
        """x times a weight, and the layer's next state."""
        more, config = self.given.layer(name), self.config
        out = dense(
            x.astype(config.dtype),
            self.params[name],
            recipe=config.recipe,
            reduce_dtype=config.reduce_dtype,
            w_spec=_specs(config).get(name),
            **more,
        )
        return output_and_state(out, more["state"])


def null_experts(routed: Routed, config: MoEConfig) -> jax.Array:
    """`w_t x_t`, w_t being the sum of a token's weights of null experts: what `moe` adds if null experts are
    "identity".

    Args:
      routed: of `route`.
      config: see MoEConfig.

    Returns:
      [..., D] in `config.dtype`, sharded as x.

    Differentiable in `routed.x` and `routed.topk_weights`. Moves nothing.
    """
    check_type("stages.null_experts", Routed, "pass what stages.route made", routed=routed)
    MoEConfig.check("stages.null_experts", config=config)
    null = _is_null(routed.topk_idx, config)
    weights = jnp.sum(jnp.where(null, routed.topk_weights, 0), axis=-1)
    return _weighted(routed.x, weights, config.dtype)


def _is_null(topk_idx: jax.Array, config: MoEConfig) -> jax.Array:
    topk_idx = wide_ids(topk_idx)
    return (topk_idx >= config.num_experts) & (topk_idx < config.num_candidates)


def _sent(topk_idx: jax.Array, config: MoEConfig) -> jax.Array:
    """The choices with -1 for those of null experts. An id beyond all stays one, which the exchange finds."""
    if config.num_null_experts == 0:
        return topk_idx
    ids = jnp.minimum(wide_ids(topk_idx), config.num_candidates)
    ids = routed_ids(ids, None, config.num_candidates + 1)
    return jnp.where(_is_null(ids, config), -1, ids)


def _gate(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`sigmoid(x . weight)`, float32[...]."""
    logits = router_logits(x, weight[:, None], w_spec=PartitionSpec(None, None))
    return jax.nn.sigmoid(logits[..., 0])


def _weighted(x: jax.Array, weights: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Each token [..., D] times its weight [...], rounded once."""
    return (x.astype(jnp.float32) * weights[..., None]).astype(dtype)


_Specs = Mapping[str, PartitionSpec]


def _resource_of(handle: ep.Handle) -> AbstractContextManager[MeshResource | None]:
    """The context in which rows lie where the exchange leaves them."""
    return global_shard_guard(resource_of_rows(handle.slot, handle.axis))


def _specs(config: MoEConfig) -> _Specs:
    """Where each parameter is, as far as its type does not say so."""
    return {} if current_resource() is None else whole_specs(config)


# ---- route


def _with_tokens(x: jax.Array, given: Any) -> Any:
    """[..., n] over the Explicit axes that the tokens of x are over."""
    sharding = jax.typeof(x).sharding
    if given is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return given
    spec = PartitionSpec(*pad_spec(sharding.spec, x.ndim)[:-1], None)
    return jax.sharding.reshard(given, NamedSharding(sharding.mesh, spec))


def _logits(gate: Params, x: jax.Array, config: MoEConfig) -> jax.Array:
    w_spec = _specs(config).get("gate_kernel")
    return router_logits(x, gate["gate_kernel"], gate.get("gate_bias"), w_spec=w_spec)


def _given(
    topk_idx: jax.Array, topk_weights: jax.Array, token_mask: jax.Array | None, config: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """Choices and weights from outside as `expertmesh.core.route` returns its own."""
    topk_idx = routed_ids(topk_idx, token_mask, config.num_candidates)
    return topk_idx, jnp.where(topk_idx >= 0, topk_weights.astype(jnp.float32), 0.0)


def _entropy(logits: jax.Array | None, topk_idx: jax.Array, config: MoEConfig) -> jax.Array | None:
    if logits is None:
        return None
    return router_statistics(logits, topk_idx, score_function=config.score_function).entropy


def _aux_loss(
    logits: jax.Array,
    topk_idx: jax.Array,
    token_mask: jax.Array | None,
    config: MoEConfig,
    given: Coefficient | None,
) -> jax.Array:
    coeff = coefficient(config, "aux_loss_coeff", given)
    if not is_on(coeff):
        return jnp.zeros((), jnp.float32)
    if config.aux_loss_counts == "unbiased":
        topk_idx = _unbiased(logits, token_mask, config)
    loss = sequence_balance_loss if config.aux_loss_per_sequence else load_balance_loss
    return loss(
        logits,
        topk_idx,
        coeff=coeff,
        score_function=config.score_function,
        token_mask=token_mask,
    )


def _unbiased(logits: jax.Array, token_mask: jax.Array | None, config: MoEConfig) -> jax.Array:
    """The choices by scores alone: without bias, groups or replay."""
    alone = RouterConfig(top_k=config.top_k, score_function=config.score_function)
    return route_logits(logits, alone, token_mask=token_mask).topk_idx


def _z_loss(
    logits: jax.Array,
    token_mask: jax.Array | None,
    config: MoEConfig,
    given: Coefficient | None,
) -> jax.Array:
    coeff = coefficient(config, "z_loss_coeff", given)
    if not is_on(coeff):
        return jnp.zeros((), jnp.float32)
    return router_z_loss(logits, coeff=coeff, token_mask=token_mask)


# ---- dispatch


def _prepare(
    topk_idx: jax.Array, config: MoEConfig, ep_axis: tuple[str, ...]
) -> tuple[ep.Handle, ep.Copies | None]:
    """The exchange, and what spare slots hold if there are any."""
    if config.num_spare_experts == 0:
        return _prepare_experts(topk_idx, config, ep_axis), None
    balanced = ep.balance(
        topk_idx,
        config.exchange(axis=ep_axis),
        num_spare=config.num_spare_experts,
        least_rows=config.least_rows_per_copy,
        capacity_factor=1.0 if config.capacity_factor is None else config.capacity_factor,
    )
    if balanced.copies.expert.size == 0:  # one rank
        return _prepare_experts(topk_idx, config, ep_axis), None
    return ep.prepare(balanced.topk_idx, balanced.config), balanced.copies


def _prepare_experts(topk_idx: jax.Array, config: MoEConfig, ep_axis: tuple[str, ...]) -> ep.Handle:
    """The exchange without spare slots."""
    dropless = config.exchange(axis=ep_axis)
    if config.capacity_factor is None or topk_idx.size == 0:
        return ep.prepare(topk_idx, dropless)
    # The number of participants follows from the layout, which only `prepare` knows.
    handle = jax.eval_shape(lambda idx: ep.prepare(idx, dropless), topk_idx)
    participants, num_local = handle.group_sizes.shape
    capacity = ep.recv_capacity(
        config.num_experts,
        config.top_k,
        prod(topk_idx.shape[:-1]) // participants,
        config.num_experts // num_local,
        config.row_alignment,
        config.capacity_factor,
    )
    return ep.prepare(topk_idx, config.exchange(axis=ep_axis, capacity=capacity))


def _weighed(routed: Routed, config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """The tokens as they are sent, and the weights of their rows."""
    x, weights = routed.x, routed.topk_weights
    if not config.weigh_inputs:
        return x.astype(config.dtype), weights
    return _weighted(x, weights[..., 0], config.dtype), jnp.ones_like(weights)


def _dispatched_rows(
    params: Params, x: jax.Array, handle: ep.Handle, config: MoEConfig
) -> tuple[jax.Array, QuantizedArray | None]:
    """(rows, quantized) of a Dispatched."""
    recipe = config.recipe
    if reads_tokens(params["wi"], handle, config):
        tokens = x.reshape(1, -1, x.shape[-1])
        quantized = quantize_tokens(tokens, recipe) if dispatches_quantized(recipe) else None
        return tokens, quantized
    if dispatches_quantized(recipe):
        of: dict[str, Any] = dict(recipe=recipe, quantize_combine=config.quantize_backward_combine)
        return dispatch_quantized(handle, x, **of)
    return named("dispatched", ep.dispatch(handle, x)), None
