"""The Mixture-of-Experts block, in global view: every step is an op with its own sharding rule and VJP.

    route -> prepare -> dispatch -> grouped_dense -> activate -> grouped_dense -> weight_rows -> combine

    y_t = sum_k w_tk * (act(x_t Wi_e + bi_e) Wo_e + bo_e) + act(x_t Si) So,  e = idx_tk

with shared experts Si, So or without. weight_rows may come before the second grouped_dense instead of after it; without
biases and recipe all from the activation on is one step, the weights before the product (see weighted_product.py), and
on one device a narrow first product reads the tokens where they are, not dispatched. A recipe quantizes the products
with Wi, Wo, Si and So. If its scales are a token's own, tokens are quantized before they are dispatched, and dispatch
is one step with the first product (see quantized_dispatch.py).

Dimension key: `...` tokens, K choices per token, E experts, P participants, C receive rows per participant, D model
width, F expert width, n chunks.
"""

import warnings
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core.mesh import current_resource
from expertmesh.core.operands import check_token_mask, debug_check_ids
from expertmesh.core.ops.activation import activate
from expertmesh.core.ops.dense import dense
from expertmesh.core.ops.gathered_gemm import gathered_gemm
from expertmesh.core.ops.grouped_dense import grouped_dense
from expertmesh.core.ops.grouped_gemm import grouped_gemm
from expertmesh.core.ops.permute import PermutePlan
from expertmesh.core.recipe import current_recipe
from expertmesh.core.router.balance import (
    expert_counts,
    load_balance_loss,
    router_z_loss,
    sequence_balance_loss,
)
from expertmesh.core.router.logits import router_logits
from expertmesh.core.router.route import route
from expertmesh.core.router.statistics import router_statistics
from expertmesh.core.specs import (
    axes_of_type,
    entry_axes,
    make_entry,
    mesh_of,
    pad_spec,
    spec_axes,
    strip_axes,
)
from expertmesh.ep import (
    Handle,
    combine,
    dispatch,
    dispatch_weights,
    find_overflow,
    prepare,
    recv_capacity,
)
from expertmesh.flax_moe.chunks import merge_chunks, split_chunks
from expertmesh.flax_moe.config import MoEConfig, MoEOutput, dispatches_quantized
from expertmesh.flax_moe.params import (
    LogicalAxes,
    Params,
    check_array,
    check_names,
    check_params,
    param_specs,
)
from expertmesh.flax_moe.quantization import check_quantization, output_and_state, placed_like
from expertmesh.flax_moe.quantized_dispatch import dispatch_dense
from expertmesh.flax_moe.quantized_experts import dispatch_experts, takes_experts
from expertmesh.flax_moe.remat import named, rematerialized
from expertmesh.flax_moe.weight_rows import weight_rows
from expertmesh.flax_moe.weighted_product import weighted_product

__all__ = ["moe"]


def moe(
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    *,
    expert_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    topk_idx: jax.Array | None = None,
    quant_state: Any = None,
    kernels_quantized: Any = None,
    key: jax.Array | None = None,
) -> MoEOutput:
    """Sends each token to its K experts and returns the weighted sum of what they make of it.

    Args:
      params: `gate_kernel` [D, E], `wi` [E, D, 2, F] (0 gate, 1 up), `wo` [E, F, D], and both or none of the biases
        `wi_bias` [E, 2, F] and `wo_bias` [E, D]; without a gate in the activation there is no dimension of 2. With
        `config.shared_expert_dim` S also `shared_wi` [D, 2, S] and `shared_wo` [S, D]. See `init_params`,
        `param_specs`, `merge_wi`.
      x: float[..., D] with at least one dimension of tokens.
      config: see MoEConfig.
      expert_bias: float[E] that steers the choice of experts and nothing else; see `expertmesh.core.route`.
      token_mask: bool[...]; a token for which it is False goes to no expert: its y is 0, and it is in no count, no
        loss and no gradient, whatever it holds.
      topk_idx: int[..., K]: these choices instead of the router's; weights and losses are still the logits'.
      quant_state: under DelayedScaling, `init_quant_state` or the `quant_state` of the step before; else None.
      kernels_quantized: of `quantize_kernels`, if the weights are quantized once for several calls; else None.
      key: a PRNG key, for recipes that round stochastically (NVFP4BlockScaling); another one each call.

    Returns:
      MoEOutput. Logits, routing weights and both losses are float32, the experts compute in `config.dtype`.

    Warns:
      UserWarning: over Explicit axes, x is not sharded over the EP axis, or not over another that splits the experts
        or their D: the block spreads its tokens over the EP axis, and gathers y so that it is laid out like x.

    Raises:
      ValueError: a parameter that is missing, unknown or of the wrong shape; experts or tokens that the EP axis or
        `config.num_chunks` does not divide; an EP axis that the mesh lacks; a bias, mask or choices that `route`
        refuses; no bias under `config.use_expert_bias`, unless choices are given; a symbolic size.
      TypeError: x or a parameter is no array, or not floating point; a bias, mask or choices of a dtype that `route`
        refuses; a derivative in forward mode (`jax.jvp`, `jax.jacfwd`), in the words of JAX.

    Differentiable in x and every parameter, in reverse mode and once; `expert_bias` gets gradient 0. What the backward
    keeps is said by `config.remat`, or by a policy of yours on `expertmesh.flax_moe.CHECKPOINT_NAMES`.
    Runs on global arrays: on one device, over Explicit axes (layouts are those of the arrays' types), over Auto axes
    under a MeshResource, over Auto axes without one (correct, but every device then routes all tokens), and inside your
    own `shard_map` over all axes, where x and the expert weights are shards.
    The same operands give the same bits, run after run; another mesh or transport sums in another order.
    Costs two exchanges of T K rows over the EP axis, one gather of the expert weights over fsdp, all-reduces of [E]
    vectors; the backward two exchanges, a gather, and a reduce-scatter of the weights' gradients into their layout.
    """
    _check_tokens(x)
    check_names("moe", params, config)
    if config.use_expert_bias and expert_bias is None and topk_idx is None:
        raise ValueError(
            "moe: expert_bias must be given under use_expert_bias; got expert_bias=None; start with jnp.zeros(E), or "
            "leave use_expert_bias out"
        )
    config = config.under(current_recipe())
    given = check_quantization("moe", config, quant_state, kernels_quantized, key)
    ep_axis = _ep_axis(params, config)
    check_params("moe", params, x.shape[-1], config, _experts_held(x, config, ep_axis))
    if token_mask is not None:
        check_token_mask("moe", token_mask, x.shape[:-1])
        # What a masked token holds may be NaN, and the gradients of all tokens' weights multiply with it.
        x = jnp.where(token_mask[..., None], x, 0)

    if config.debug and topk_idx is not None:
        debug_check_ids("moe", topk_idx, config.num_experts)

    if config.num_chunks > 1:
        given = given.with_kernels(params, config)
    specs = _specs(config)
    logits = router_logits(x, params["gate_kernel"], w_spec=specs.get("gate_kernel"))
    topk_idx, topk_weights = route(
        logits, config.router, expert_bias=expert_bias, token_mask=token_mask, topk_idx=topk_idx
    )
    experts = {k: w for k, w in params.items() if k in ("wi", "wo", "wi_bias", "wo_bias")}
    y, num_dropped, overflow, state = _routed_in_chunks(
        config, ep_axis, experts, given.of(experts), x, topk_idx, topk_weights
    )
    y = _laid_out_like(x, y, _spreading_axes(experts, config, ep_axis), ep_axis)
    if config.shared_expert_dim is not None:
        shared, more = _shared(params, x.astype(config.dtype), config, specs, given)
        y, state = y + shared, state and {**state, **more}
    return MoEOutput(
        y=y.astype(x.dtype),
        aux_loss=_aux_loss(logits, topk_idx, token_mask, config),
        z_loss=_z_loss(logits, token_mask, config),
        # The counts of the balance loss, so that the two are computed and summed once.
        tokens_per_expert=expert_counts(topk_idx, num_experts=config.num_experts),
        num_dropped=num_dropped,
        entropy=router_statistics(logits, topk_idx, score_function=config.score_function).entropy,
        topk_idx=topk_idx,
        overflow=overflow,
        # Again: what a loop over parts returns is where the compiler left it.
        quant_state=placed_like(state, given.state),
    )


def _check_tokens(x):
    check_array("moe", "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"moe: x must be floating point; got dtype={x.dtype}; cast it to config.dtype"
        )
    if x.ndim < 2:
        raise ValueError(f"moe: x must be [..., D] with tokens; got x.shape={x.shape}; add x[None]")
    if any(map(is_symbolic_dim, x.shape)):
        raise ValueError(
            f"moe: sizes must be numbers, by which tokens are divided over devices; got x.shape={x.shape}; export it "
            "once for each size, and pad"
        )


def _laid_out_like(x, y, spreading, ep_axis):
    """y over the Explicit axes that x is over; the exchange spreads tokens over the EP axis if they are not yet."""
    got = jax.typeof(y).sharding
    if AxisType.Explicit not in got.mesh.axis_types:
        return y
    want = pad_spec(jax.typeof(x).sharding.spec, x.ndim)
    advised = _spread(got.spec, x.shape, got.mesh.shape, spreading, ep_axis)
    made, cut, best = (_cuts(spec, got.mesh.shape) for spec in (got.spec, want, advised))
    if best != cut and (made != cut or not set(spreading) <= set(spec_axes(got.spec))):
        warnings.warn(
            f"moe: tokens should be sharded over every axis that splits the experts or their D, as {advised}; got x "
            f"as {want}; left so, devices do the same work, or y is gathered to be like x; shard x so",
            stacklevel=3,
        )
    return y if got.spec == want else jax.sharding.reshard(y, NamedSharding(got.mesh, want))


def _spreading_axes(experts, config, ep_axis) -> tuple[str, ...]:
    """The Explicit axes that split the experts' kernels, and neither by the EP group nor along F: those of fsdp."""
    axes: dict[str, None] = {}
    for name in ("wi", "wo"):
        sharding, dims = jax.typeof(experts[name]).sharding, LogicalAxes(mlp=None)
        entries = pad_spec(sharding.spec, experts[name].ndim)
        for dim, entry in zip(dims.of(name, gated=config.act.gated), entries, strict=True):
            axes |= dict.fromkeys(entry_axes(entry) if dim else ())
    return tuple(axis for axis in axes if axis not in ep_axis)


def _spread(spec, sizes, mesh_shape, axes, ep_axis):
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


def _cuts(spec, mesh_shape):
    """The spec without the axes of one device, which cut nothing."""
    return strip_axes(spec, [axis for axis, size in mesh_shape.items() if size == 1])


def _specs(config):
    """Where each parameter is, as far as its type does not say so."""
    return {} if current_resource() is None else param_specs(config)


def _aux_loss(logits, topk_idx, token_mask, config):
    if not config.aux_loss_coeff:
        return jnp.zeros((), jnp.float32)
    loss = sequence_balance_loss if config.aux_loss_per_sequence else load_balance_loss
    return loss(
        logits,
        topk_idx,
        coeff=config.aux_loss_coeff,
        score_function=config.score_function,
        token_mask=token_mask,
    )


def _z_loss(logits, token_mask, config):
    if not config.z_loss_coeff:
        return jnp.zeros((), jnp.float32)
    return router_z_loss(logits, coeff=config.z_loss_coeff, token_mask=token_mask)


def _routed(config, ep_axis, params, given, x, topk_idx, topk_weights):
    """y [..., D] in the experts' dtype, the number of dropped choices, MoEOutput's overflow, the layers' next state."""
    handle = named("dispatched", _prepare(topk_idx, config, ep_axis))
    weights_PC = named("dispatched", dispatch_weights(handle, topk_weights))
    x = x.astype(config.dtype)
    overflow = find_overflow(handle) if config.overflow == "error" else None
    dropped = jnp.sum(handle.num_dropped)
    if _experts_at_once(params, config):
        y_PCD = _experts_in_8_bits(params, x, weights_PC, handle, config, given)
        return named("combined", combine(handle, y_PCD)), dropped, overflow, given.state
    h, wi_state = _first_product(params, x, handle, config, given)
    if config.recipe is None and "wo_bias" not in params:
        y = weighted_product(
            named("hidden", h),
            params["wo"],
            weights_PC,
            handle,
            activation=config.activation,
            reduce_dtype=config.reduce_dtype,
            w_spec=_specs(config).get("wo"),
        )
        return named("combined", y), dropped, overflow, given.state
    y_PCD, wo_state = _second_product(params, h, weights_PC, handle, config, given)
    state = given.state and {"wi": wi_state, "wo": wo_state}
    return named("combined", combine(handle, y_PCD)), dropped, overflow, state


_ROUTED = rematerialized(_routed, static_argnums=(0, 1))


@partial(jax.jit, static_argnums=(0, 1))
def _routed_in_chunks(config, ep_axis, params, given, x, topk_idx, topk_weights):
    """`_routed`, one part of the tokens after the other."""
    routed = partial(_ROUTED[config.remat], config, ep_axis, params)
    if config.num_chunks == 1 or x.size == 0:
        return routed(given, x, topk_idx, topk_weights)
    parts, dim = split_chunks("moe", (x, topk_idx, topk_weights), config.num_chunks)

    def one(state, part):
        number, *tokens = part
        y, num_dropped, overflow, state = routed(given.of_part(state, number), *tokens)
        return state, (y, num_dropped, overflow)

    numbers = jnp.arange(config.num_chunks)
    state, (y, num_dropped, overflow) = jax.lax.scan(one, given.state, (numbers, *parts))
    return merge_chunks(y, dim), jnp.sum(num_dropped), overflow, state


def _experts_at_once(params, config) -> bool:
    """Whether nothing but the activation comes between the experts' products, and all of it is in 8 bits."""
    plain = "wo_bias" not in params and not config.apply_topk_weights_early
    return plain and takes_experts(config.recipe, config.activation)


def _experts_in_8_bits(params, x, weights_PC, handle, config, given):
    """The experts' output times the rows' weights, 0 for rows that hold no token."""
    specs = _specs(config)
    y_PCD = dispatch_experts(
        handle,
        x,
        params["wi"],
        params["wo"],
        activation=config.activation,
        recipe=config.recipe,
        kernels_quantized=tuple(given.layer(name)["kernel_quantized"] for name in ("wi", "wo")),
        quantize_combine=config.quantize_backward_combine,
        reduce_dtype=config.reduce_dtype,
        w_specs=(specs.get("wi"), specs.get("wo")),
    )
    return _weighed(named("expert_output", y_PCD), weights_PC, handle)


def _weighed(rows, weights_PC, handle, spec=None):
    return weight_rows(rows, weights_PC, handle.group_sizes, handle.tokens_per_expert, y_spec=spec)


def _first_product(params, x, handle, config, given):
    """[P, C, 2, F], every expert's first projection of its rows; and the layer's next state."""
    wi, bias, spec = params["wi"], params.get("wi_bias"), _specs(config).get("wi")
    if dispatches_quantized(config.recipe):
        h = dispatch_dense(
            handle,
            x,
            wi,
            bias,
            recipe=config.recipe,
            kernel_quantized=given.layer("wi")["kernel_quantized"],
            reduce_dtype=config.reduce_dtype,
            w_spec=spec,
            quantize_combine=config.quantize_backward_combine,
        )
        return h, None
    if config.recipe is None and bias is None and _reads_tokens(handle, x, wi):
        plan = PermutePlan(handle.row, handle.source, handle.tokens_per_expert, handle.group_sizes)
        return gathered_gemm(x.reshape(1, -1, x.shape[-1]), wi, plan, rhs_spec=spec), None
    rows_PCD = named("dispatched", dispatch(handle, x))
    return _grouped(config, given, "wi", rows_PCD, wi, handle.group_sizes, bias, spec)


def _reads_tokens(handle: Handle, x, wi) -> bool:
    """Whether the first product reads tokens where they are: all are here, and it writes less than their rows.

    Where it writes more, a copy of the rows costs little beside it, and is read faster.
    """
    all_here = mesh_of(x).size <= 1 and handle.row.shape[:2] == (1, prod(x.shape[:-1]))
    return all_here and prod(wi.shape[2:]) <= wi.shape[1]


def _grouped(config, given, name, rows, kernel, group_sizes, bias, spec):
    """A product by experts, and the layer's next state."""
    # It casts the weights, so that gradients of float32 masters can be summed and scattered in float32.
    more = given.layer(name)
    out = grouped_dense(
        rows,
        kernel,
        group_sizes,
        bias,
        recipe=config.recipe,
        reduce_dtype=config.reduce_dtype,
        w_spec=spec,
        zero_rest=False,  # nothing here reads rows that hold no token
        **more,
    )
    return output_and_state(out, more["state"])


def _second_product(params, h, weights_PC, handle, config, given):
    """The second projection times the rows' weights, 0 for rows that hold no token; and the layer's next state."""
    specs, sizes = _specs(config), handle.group_sizes
    wo, bias, h = params["wo"], params.get("wo_bias"), named("hidden", h)
    a_PCF = activate(h, config.activation)
    product = partial(_grouped, config, given, "wo")
    if not config.apply_topk_weights_early:
        if config.recipe is not None and bias is not None:
            # A group's padding has its bias, which must not enter the scales of its tokens.
            a_PCF = _weighed(a_PCF, jnp.ones_like(weights_PC), handle, _hidden_spec(specs))
        y_PCD, state = product(a_PCF, wo, sizes, bias, specs.get("wo"))
        return _weighed(named("expert_output", y_PCD), weights_PC, handle), state
    a_PCF = _weighed(a_PCF, weights_PC, handle, _hidden_spec(specs))
    y_PCD, state = product(a_PCF, wo, sizes, None, specs.get("wo"))
    if bias is not None:
        y_PCD += _weighted_bias(weights_PC, bias, sizes, specs).astype(y_PCD.dtype)
    return named("expert_output", y_PCD), state


def _hidden_spec(specs):
    """Where [P, C, F] between the GEMMs is, as far as its type does not say so: F as that of `wo`."""
    resource = current_resource()
    if resource is None:
        return None
    return PartitionSpec(resource.entry("tokens"), None, specs["wo"][1])


def _weighted_bias(weights_PC, bias_ED, group_sizes, specs):
    """weights[p, c] * bias[expert of row c], float32[P, C, D]: a grouped GEMM whose contraction has size 1."""
    spec = specs.get("wo_bias")
    return grouped_gemm(
        weights_PC[..., None],
        jnp.expand_dims(bias_ED, 1),
        group_sizes,
        rhs_spec=None if spec is None else PartitionSpec(spec[0], None, spec[1]),
    )


def _shared(params, x, config, specs, given):
    """The feed-forward that every token takes, and its layers' next state."""

    def product(name, rows):
        more = given.layer(name)
        out = dense(
            rows,
            params[name],
            recipe=config.recipe,
            reduce_dtype=config.reduce_dtype,
            w_spec=specs.get(name),
            **more,
        )
        return output_and_state(out, more["state"])

    h, wi_state = product("shared_wi", x)
    y, wo_state = product("shared_wo", activate(h, config.activation))
    return y, {"shared_wi": wi_state, "shared_wo": wo_state}


def _ep_axis(params, config) -> tuple[str, ...]:
    """The axes of the EP group; () for none."""
    if config.ep_axis is not None:
        return entry_axes(config.ep_axis)
    resource = current_resource()
    if resource is not None:
        return entry_axes(resource.ep_resource)
    wi = params.get("wi")
    spec = () if wi is None else tuple(jax.typeof(wi).sharding.spec)
    if config.shard_exp_on_fsdp and spec and spec[0]:
        raise ValueError(
            "moe: under shard_exp_on_fsdp ep_axis must be given, or a MeshResource in context; "
            f"got ep_axis=None, wi over {spec}; pass MoEConfig(ep_axis=...), its first axes"
        )
    return entry_axes(spec[0]) if spec else ()


def _experts_held(x, config, ep_axis) -> int:
    """Experts in the weights as the caller sees them: all, or one shard's where the EP axis is Manual."""
    mesh = mesh_of(x)
    manual = axes_of_type(mesh, AxisType.Manual)
    ranks = prod(mesh.shape[axis] for axis in manual if axis in ep_axis)
    if config.num_experts % ranks:
        raise ValueError(
            "moe: num_experts must be divisible by the EP size; "
            f"got num_experts={config.num_experts}, ep_size={ranks}, axis={ep_axis!r}; change one of them"
        )
    held = config.num_experts // ranks
    if config.shard_exp_on_fsdp:
        _check_experts_split(held, mesh, ep_axis, manual)
    return held


def _check_experts_split(held, mesh, ep_axis, manual):
    """Raises unless ep and fsdp, as far as they are not Manual, divide the experts."""
    resource = current_resource()
    fsdp = () if resource is None else resource.axes("fsdp")
    split = {axis: mesh.shape.get(axis, 1) for axis in (*ep_axis, *fsdp) if axis not in manual}
    if held % prod(split.values()):
        raise ValueError(
            "moe: under shard_exp_on_fsdp num_experts must be divisible by the sizes of ep and fsdp together; "
            f"got num_experts={held}, sizes={split}; change one of them, or leave shard_exp_on_fsdp out"
        )


def _prepare(topk_idx, config, ep_axis) -> Handle:
    dropless = config.exchange(axis=ep_axis)
    if config.capacity_factor is None or topk_idx.size == 0:
        return prepare(topk_idx, dropless)
    # The number of participants follows from the layout, which only `prepare` knows.
    handle = jax.eval_shape(lambda idx: prepare(idx, dropless), topk_idx)
    participants, num_local = handle.group_sizes.shape
    capacity = recv_capacity(
        config.num_experts,
        config.top_k,
        prod(topk_idx.shape[:-1]) // participants,
        config.num_experts // num_local,
        config.row_alignment,
        config.capacity_factor,
    )
    return prepare(topk_idx, config.exchange(axis=ep_axis, capacity=capacity))
