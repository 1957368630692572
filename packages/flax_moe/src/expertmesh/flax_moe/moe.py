"""The Mixture-of-Experts block, in global view: the stages one after the other, for parts of the tokens under remat.

    route -> dispatch -> experts -> combine             stages.py, each of ops with sharding rules and VJPs of their own

    y_t = sum_k (w_tk act(x_t Wi_e + bi_e)) Wo_e + w_tk bo_e + g_t act(x_t Si) So,  e = idx_tk

where e is an expert. A null expert adds nothing, or w_tk x_t. At a latent width experts see x_t Ld for x_t, and their
sum is times Lu. The last term is that of shared experts Si, So, if there are any; g_t is 1, or sigmoid(x_t . s) with a
gate s. Under `weigh_inputs`, where K = 1, the experts see w_t x_t, and w is 1 in the formula. The experts are one
function with one VJP (see experts.py). On one device without a recipe the GEMMs of narrow experts read tokens in place.
A recipe quantizes the operands of the GEMMs with Wi, Wo, Si and So. If it has scales per token, tokens are quantized
before they are dispatched (see quantized_dispatch.py).

Dimension key: `...` tokens, K choices per token, E experts, D model width, F expert width, n chunks.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core.operands import check_token_mask
from expertmesh.core.quantization.recipe import current_recipe
from expertmesh.core.specs import entry_axes, make_entry, pad_spec, spec_axes, strip_axes
from expertmesh.ep import Overflow
from expertmesh.flax_moe import stages
from expertmesh.flax_moe.checks import (
    Coefficient,
    check_expert_bias,
    check_outside,
    check_tokens,
    ep_axes,
    experts_held,
    type_of,
)
from expertmesh.flax_moe.chunks import merge_chunks, split_chunks
from expertmesh.flax_moe.config import MoEConfig, MoEOutput
from expertmesh.flax_moe.params import (
    BIASES,
    EXPERTS,
    LogicalAxes,
    Params,
    check_names,
    check_shapes,
    whole_params,
)
from expertmesh.flax_moe.quantization import Quantization, layers_of, placed_like
from expertmesh.flax_moe.remat import rematerialized

__all__ = ["moe"]


def moe(
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
    quant_state: Any = None,
    weights_quantized: Any = None,
    key: jax.Array | None = None,
) -> MoEOutput:
    """Sends each token to its K experts and returns the weighted sum of what they make of it.

    Args:
      params: `gate_kernel` [D, E] (with Z null experts [D, E + Z]), `wi` [E, D, 2, F] (0 gate, 1 up), `wo` [E, F, D],
        and both or none of the biases `wi_bias` [E, 2, F] and `wo_bias` [E, D]. An activation without a gate has no
        dimension of 2. With a `gate_bias` [E] the logits are x @ gate_kernel + gate_bias. `config.shared_expert_dim` S
        adds `shared_wi` [D, 2, S] and `shared_wo` [S, D], `config.shared_expert_gate` adds `shared_gate` [D].
        `config.latent_dim` L adds `latent_down` [D, L] and `latent_up` [L, D], and the experts' D is then L. `wi`,
        `wi_bias` and `shared_wi` may come as halves, by the names of `split_wi`. The weights of GEMMs may be frozen,
        with adapters (`with_lora`). See `init_params`, `param_specs`.
      x: float[..., D] with at least one dimension of tokens.
      config: see MoEConfig.
      expert_bias: float[E] that steers the choice of experts and nothing else; see `expertmesh.core.route`.
      token_mask: bool[...]. A token for which it is False goes to no expert. Its y is 0, and it enters no count, no
        loss and no gradient, whatever it holds.
      topk_idx: int[..., K], choices to use instead of the router's. Weights and losses still come from the logits.
      topk_weights: float[..., K], the weights of these choices, used as they are, without `config.scaling_factor`.
        Losses still come from the logits; without logits their coefficients must be 0, and the entropy is None.
      logits: float[..., E] of a router outside, in place of x @ gate_kernel. Params then have no `gate_kernel`: nothing
        would train it.
      aux_loss_coeff, z_loss_coeff: number or float[] in place of the config's; may be traced, as by a schedule.
      quant_state: under DelayedScaling, the result of `init_quant_state` or the previous step's `quant_state`; else
        None.
      weights_quantized: the result of `quantize_weights`, if you quantize weights once for several calls; else None.
      key: a PRNG key, for recipes that round stochastically (NVFP4BlockScaling); another one each call.

    Returns:
      MoEOutput. Logits, routing weights and both losses are float32, the experts compute in `config.dtype`.

    Warns:
      UserWarning: over Explicit axes, x is not sharded over the EP axis, or over another axis that splits the experts
        or their D. The block then shards tokens over the EP axis, and gathers y to lay it out like x.

    Raises:
      ValueError: a parameter that is missing, unknown or of the wrong shape; experts or tokens that the EP axis or
        `config.num_chunks` does not divide; an EP axis that the mesh lacks; a bias, mask or choices that `route`
        refuses; no bias under `config.use_expert_bias`, unless choices are given; logits or weights that do not fit the
        tokens; logits beside a gate, weights without choices, losses without logits; a symbolic size.
      TypeError: x or a parameter is no array, or not floating point; a bias, mask, choices, weights or logits of other
        numbers; a derivative in forward mode (`jax.jvp`, `jax.jacfwd`), in the words of JAX.

    Differentiable in x, every parameter, `logits`, `topk_weights` and the coefficients, in reverse mode and once;
    `expert_bias` gets gradient 0. `config.remat` says what the backward keeps, or your own policy on
    `expertmesh.flax_moe.remat.CHECKPOINT_NAMES`.

    Runs on global arrays: on one device, over Explicit axes (layouts are those of the arrays' types), over Auto axes
    under a MeshResource, over Auto axes without one (correct, but every device then routes all tokens), and inside your
    own `shard_map` over all axes, where x and the expert weights are shards. The same operands give the same bits, run
    after run; another mesh or transport sums in another order.

    Costs two exchanges of T K rows over the EP axis, one gather of the expert weights over fsdp, and all-reduces of [E]
    vectors. The backward costs two exchanges, a gather, and a reduce-scatter of the weights' gradients into their
    layout.
    """
    MoEConfig.check("moe", config=config)
    check_tokens("moe", x)
    params = whole_params("moe", params)
    check_names("moe", params, config, needs_gate=logits is None and topk_weights is None)
    coeffs = dict(aux_loss_coeff=aux_loss_coeff, z_loss_coeff=z_loss_coeff)
    outside: dict[str, Any] = dict(
        logits=logits, topk_idx=topk_idx, topk_weights=topk_weights, **coeffs
    )
    check_outside("moe", params, x, config, **outside)
    check_expert_bias("moe", config, expert_bias, topk_idx)
    config = config.under(current_recipe())
    given = Quantization(quant_state, weights_quantized, key)
    given = given.checked("moe", config, layers_of(config))
    ep_axis = ep_axes("moe", params, config)
    check_shapes("moe", params, x.shape[-1], config, experts_held("moe", x, config, ep_axis))
    check_token_mask("moe", token_mask, x.shape[:-1])
    if config.num_chunks > 1:
        given = given.with_weights(params, config)
    routed = stages.route(
        params, x, config, expert_bias=expert_bias, token_mask=token_mask, **outside
    )
    experts = {k: w for k, w in params.items() if k in EXPERTS + BIASES}
    y, num_dropped, overflow, state = _through_experts(config, params, given, routed)
    y = _laid_out_like(x, y, _weight_axes(experts, config, ep_axis), ep_axis)
    y, state = _with_others(config, params, given, routed, y, state)
    return MoEOutput(
        y=y.astype(x.dtype),
        aux_loss=routed.aux_loss,
        z_loss=routed.z_loss,
        tokens_per_expert=routed.tokens_per_expert,
        num_dropped=num_dropped,
        entropy=routed.entropy,
        topk_idx=routed.topk_idx,
        overflow=overflow,
        # Again: what a loop over parts returns is where the compiler left it.
        quant_state=placed_like(state, given.state),
    )


_Result = tuple[jax.Array, jax.Array, Overflow | None, Any]


def _laid_out_like(
    x: jax.Array, y: jax.Array, weight_axes: tuple[str, ...], ep_axis: tuple[str, ...]
) -> jax.Array:
    """y over the Explicit axes that x is over; the exchange shards tokens over the EP axis if they are not yet."""
    got = jax.typeof(y).sharding
    if AxisType.Explicit not in got.mesh.axis_types:
        return y
    want = pad_spec(jax.typeof(x).sharding.spec, x.ndim)
    advised = _shard_tokens(got.spec, x.shape, got.mesh.shape, weight_axes, ep_axis)
    made, cut, best = (_cuts(spec, got.mesh.shape) for spec in (got.spec, want, advised))
    if best != cut and (made != cut or not set(weight_axes) <= set(spec_axes(got.spec))):
        warnings.warn(
            f"moe: tokens should be sharded over every axis that splits the experts or their D, as {advised}; got x "
            f"as {want}; left so, devices do the same work, or y is gathered to be like x; shard x so",
            stacklevel=3,
        )
    return y if got.spec == want else jax.sharding.reshard(y, NamedSharding(got.mesh, want))


def _weight_axes(experts: Params, config: MoEConfig, ep_axis: tuple[str, ...]) -> tuple[str, ...]:
    """The Explicit axes that split the experts' weights, and neither by the EP group nor along F: those of fsdp."""
    axes: dict[str, None] = {}
    for name in EXPERTS:
        sharding, dims = type_of(experts[name]).sharding, LogicalAxes(mlp=None)
        entries = pad_spec(sharding.spec, experts[name].ndim)
        for dim, entry in zip(dims.of(name, gated=config.act.gated), entries, strict=True):
            axes |= dict.fromkeys(entry_axes(entry) if dim else ())
    return tuple(axis for axis in axes if axis not in ep_axis)


def _shard_tokens(
    spec: PartitionSpec,
    sizes: Sequence[int],
    mesh_shape: Mapping[str, int],
    axes: Sequence[str],
    ep_axis: tuple[str, ...],
) -> PartitionSpec:
    """The spec with `axes` on tokens, outside of the EP axes, if they cut a dimension into equal shards."""
    *tokens, features = map(entry_axes, spec)
    idle = tuple(axis for axis in axes if axis not in sum(tokens, ()))
    for dim in sorted(range(len(tokens)), key=lambda dim: not set(tokens[dim]) & set(ep_axis)):
        outer = tuple(axis for axis in tokens[dim] if axis not in ep_axis)
        wanted = (*outer, *idle, *(axis for axis in tokens[dim] if axis in ep_axis))
        if sizes[dim] % prod(mesh_shape[axis] for axis in wanted) == 0:
            rest = tuple(axis for axis in features if axis not in idle)
            return PartitionSpec(
                *map(make_entry, (*tokens[:dim], wanted, *tokens[dim + 1 :], rest))
            )
    return spec


def _cuts(spec: PartitionSpec, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """The spec without the axes of one device, which cut nothing."""
    return strip_axes(spec, [axis for axis, size in mesh_shape.items() if size == 1])


def _with_others(
    config: MoEConfig,
    params: Params,
    given: Quantization,
    routed: stages.Routed,
    y: jax.Array,
    state: Any,
) -> tuple[jax.Array, Any]:
    """y and the layers' next state with those of null and shared experts."""
    if config.num_null_experts and config.null_experts == "identity":
        y += stages.null_experts(routed, config)
    if config.shared_expert_dim is not None:
        shared, of_shared = stages.shared_experts(params, routed.x, config, **given.arguments)
        y, state = y + shared, state and {**state, **of_shared}
    return y, state


def _through_experts(
    config: MoEConfig, params: Params, given: Quantization, routed: stages.Routed
) -> _Result:
    """What the routed experts add to y, its layout that of the exchange, and the rest of a `_Result`."""
    experts = {k: w for k, w in params.items() if k in EXPERTS + BIASES}
    of_latents: Any = {}
    if config.latent_dim is not None:
        routed, of_latents = stages.to_latent(params, routed, config, **given.arguments)
    y, num_dropped, overflow, state = _routed_in_chunks(config, experts, given.of(experts), routed)
    if config.latent_dim is not None:
        y, of_up = stages.from_latent(params, y, config, **given.arguments)
        of_latents = of_up and {**of_latents, **of_up}
    return y, num_dropped, overflow, state and {**state, **of_latents}


def _routed(
    config: MoEConfig, params: Params, given: Quantization, routed: stages.Routed
) -> _Result:
    """y [..., D] in the experts' dtype, the number of dropped choices, MoEOutput's overflow, the layers' next state."""
    dispatched = stages.dispatch(params, routed, config)
    computed = stages.experts(params, dispatched, config, **given.arguments)
    y = stages.combine(computed)
    return y, dispatched.num_dropped, dispatched.overflow, computed.quant_state


_ROUTED = rematerialized(_routed, static_argnums=(0,))


@partial(jax.jit, static_argnums=0)
def _routed_in_chunks(
    config: MoEConfig, params: Params, given: Quantization, routed: stages.Routed
) -> _Result:
    """`_routed`, one part of the tokens after the other."""
    of_part = partial(_ROUTED[config.remat], config, params)
    tokens = routed.x, routed.topk_idx, routed.topk_weights
    if config.num_chunks == 1 or routed.x.size == 0:
        return of_part(given, stages.Routed(*tokens))
    parts, dim = split_chunks("moe", tokens, config.num_chunks)

    def one(state: Any, part: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        number, *tokens = part
        quantization = given.of_part(state, number)
        y, num_dropped, overflow, state = of_part(quantization, stages.Routed(*tokens))
        return state, (y, num_dropped, overflow)

    numbers = jnp.arange(config.num_chunks)
    state, (y, num_dropped, overflow) = jax.lax.scan(one, given.state, (numbers, *parts))
    return merge_chunks(y, dim), jnp.sum(num_dropped, dtype=jnp.int32), overflow, state
