"""The Mixture-of-Experts block, in global view: every step is an op with its own sharding rule and VJP.

    route -> prepare -> dispatch -> grouped_gemm -> gated_activation -> grouped_gemm -> weight_rows -> combine

    y_t = sum_k w_tk * ((act(x_t Wg_e + bg_e) * (x_t Wu_e + bu_e)) Wo_e + bo_e),  e = idx_tk

Dimension key: `...` tokens, K choices per token, E experts, P participants, C receive rows per participant, D model
width, F expert width.
"""

from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from expertmesh.core.mesh import current_resource
from expertmesh.core.ops.activation import gated_activation
from expertmesh.core.ops.gemm import gemm
from expertmesh.core.ops.grouped_gemm import grouped_gemm
from expertmesh.core.ops.load_balance import expert_counts, load_balance_loss, router_z_loss
from expertmesh.core.ops.router import route
from expertmesh.core.specs import entry_axes
from expertmesh.ep import (
    Handle,
    combine,
    dispatch,
    dispatch_weights,
    prepare,
    recv_capacity,
)
from expertmesh.flax_moe.config import MoEConfig, MoEOutput
from expertmesh.flax_moe.params import Params, check_params, param_specs
from expertmesh.flax_moe.weight_rows import weight_rows

__all__ = ["moe"]


def moe(
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    *,
    expert_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    topk_idx: jax.Array | None = None,
) -> MoEOutput:
    """Sends each token to its K experts and returns the weighted sum of what they make of it.

    Args:
      params: `gate_kernel` [D, E], `wi` [E, D, 2, F] (0 gate, 1 up), `wo` [E, F, D], and both or none of the biases
        `wi_bias` [E, 2, F] and `wo_bias` [E, D]; see `init_params`, `param_specs`, `merge_wi`.
      x: float[..., D] with at least one dimension of tokens.
      config: see MoEConfig.
      expert_bias: float[E] that steers the choice of experts and nothing else; see `expertmesh.core.route`.
      token_mask: bool[...]; a token for which it is False goes to no expert: its y is 0, and it is in no count and no
        loss.
      topk_idx: int[..., K]: these choices instead of the router's; weights and losses are still the logits'.

    Returns:
      MoEOutput. Logits, routing weights and both losses are float32, the experts compute in `config.dtype`.

    Raises:
      ValueError: a parameter that is missing, unknown or of the wrong shape; experts or tokens that the EP axis does
        not divide; an EP axis that the mesh lacks; a bias, mask or choices that `route` refuses.
      TypeError: x is not floating point; a bias, mask or choices of a dtype that `route` refuses.

    Differentiable in x and every parameter; the bias gets gradient 0. Runs on global arrays: on one device, over
    Explicit axes (layouts are those of the arrays' types), over Auto axes under a MeshResource, over Auto axes without
    one (correct, but every device then routes all tokens), and inside your own `shard_map` over all axes, where x and
    the expert weights are shards.
    Costs two exchanges of T K rows over the EP axis, one gather of the expert weights over fsdp, all-reduces of [E]
    vectors; the backward two exchanges, a gather, and a reduce-scatter of the weights' gradients into their layout.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"moe: x must be floating point; got dtype={x.dtype}; cast it to config.dtype"
        )
    if x.ndim < 2:
        raise ValueError(f"moe: x must be [..., D] with tokens; got x.shape={x.shape}; add x[None]")
    ep_axis = _ep_axis(params, config)
    check_params("moe", params, x.shape[-1], config, _experts_held(x, config, ep_axis))
    specs = param_specs(config) if current_resource() is not None else {}

    gate_kernel = params["gate_kernel"].astype(jnp.float32)
    logits = gemm(x.astype(jnp.float32), gate_kernel, w_spec=specs.get("gate_kernel"))
    topk_idx, topk_weights = route(
        logits, config.router, expert_bias=expert_bias, token_mask=token_mask, topk_idx=topk_idx
    )

    handle = _prepare(topk_idx, config, ep_axis)
    rows_PCD = dispatch(handle, x.astype(config.dtype))
    y_PCD = _experts(params, rows_PCD, handle.group_sizes, config, specs)
    weights_PC = dispatch_weights(handle, topk_weights)
    y_PCD = weight_rows(y_PCD, weights_PC, handle.group_sizes, handle.tokens_per_expert)
    y = combine(handle, y_PCD).astype(x.dtype)

    zero = jnp.zeros((), jnp.float32)
    return MoEOutput(
        y=y,
        aux_loss=load_balance_loss(
            logits,
            topk_idx,
            coeff=config.aux_loss_coeff,
            score_function=config.score_function,
            token_mask=token_mask,
        )
        if config.aux_loss_coeff
        else zero,
        z_loss=router_z_loss(logits, coeff=config.z_loss_coeff, token_mask=token_mask)
        if config.z_loss_coeff
        else zero,
        tokens_per_expert=expert_counts(topk_idx, num_experts=config.num_experts),
        num_dropped=jnp.sum(handle.num_dropped),
    )


def _experts(params, rows_PCD, group_sizes, config, specs):
    """Every expert's feed-forward on its rows."""
    # The GEMMs cast the weights, so that gradients of float32 masters are summed and scattered in float32.
    h_PC2F = grouped_gemm(
        rows_PCD, params["wi"], group_sizes, params.get("wi_bias"), rhs_spec=specs.get("wi")
    )
    a_PCF = gated_activation(h_PC2F, activation=config.activation)
    return grouped_gemm(
        a_PCF, params["wo"], group_sizes, params.get("wo_bias"), rhs_spec=specs.get("wo")
    )


def _ep_axis(params, config) -> tuple[str, ...]:
    """The axes of the EP group; () for none."""
    if config.ep_axis is not None:
        return entry_axes(config.ep_axis)
    resource = current_resource()
    if resource is not None:
        return entry_axes(resource.ep_resource)
    wi = params.get("wi")
    spec = () if wi is None else tuple(jax.typeof(wi).sharding.spec)
    return entry_axes(spec[0]) if spec else ()


def _experts_held(x, config, ep_axis) -> int:
    """Experts in the weights as the caller sees them: all, or one shard's where the EP axis is Manual."""
    mesh = jax.typeof(x).sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    manual = [
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual and axis in ep_axis
    ]
    ranks = prod(mesh.shape[axis] for axis in manual)
    if config.num_experts % ranks:
        raise ValueError(
            "moe: num_experts must be divisible by the EP size; "
            f"got num_experts={config.num_experts}, ep_size={ranks}, axis={ep_axis!r}; change one of them"
        )
    return config.num_experts // ranks


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
        config.alignment,
        config.capacity_factor,
    )
    return prepare(topk_idx, config.exchange(axis=ep_axis, capacity=capacity))
