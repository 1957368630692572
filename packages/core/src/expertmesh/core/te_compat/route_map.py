"""Router in dense form: from each token's logits to one weight and one flag per expert.

    probs[..., e] = sum_k [idx[..., k] == e] * weights[..., k],   map[..., e] = any_k(idx[..., k] == e)

of the choices `idx` and their `weights` that `route` makes.

Dimension key: `...` tokens, E experts, K choices per token.
"""

from typing import NamedTuple

import jax

from expertmesh.core.operands import BOOLS, FLOATS, INTEGERS, check_arrays
from expertmesh.core.router.route import RouterConfig, route
from expertmesh.core.te_compat.routing_map import check_format, to_routing_map
from expertmesh.core.te_compat.topk_weights import topk_weights_to_probs

__all__ = ["DenseRouting", "route_map"]


class DenseRouting(NamedTuple):
    """The choices of each token, without their order; what `plan_permute_map` and its `unpermute` take.

    Attributes:
      probs: float[..., E] in the dtype of the logits; 0 where not routed.
      routing_map: bool[..., E], or uint8[..., ceil(E / 8)] in the format "bitmap"; see `to_routing_map`.
    """

    probs: jax.Array
    routing_map: jax.Array


def route_map(
    logits: jax.Array,
    config: RouterConfig,
    *,
    expert_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    topk_idx: jax.Array | None = None,
    format: str = "bytemap",
) -> DenseRouting:
    """`route`, its weights by `topk_weights_to_probs` and its choices by `to_routing_map`.

    Args:
      logits: float[..., E].
      config, expert_bias, token_mask, topk_idx: as for `route`.
      format: of the map, "bytemap" or "bitmap".

    Returns:
      DenseRouting. An expert that is chosen with a weight of 0 has its flag; one that a forced routing names twice has
      the sum of both weights.

    Raises:
      ValueError: an unknown format, and what `route` refuses.
      TypeError: what `route` refuses.

    Differentiable in `logits`. No communication, however tokens are sharded; a sharded expert dimension is gathered.
    """
    RouterConfig.check("route_map", config=config)
    check_format("route_map", format)
    check_arrays("route_map", FLOATS, logits=logits)
    check_arrays("route_map", FLOATS, optional=True, expert_bias=expert_bias)
    check_arrays("route_map", BOOLS, optional=True, token_mask=token_mask)
    check_arrays("route_map", INTEGERS, optional=True, topk_idx=topk_idx)
    routing = route(
        logits, config, expert_bias=expert_bias, token_mask=token_mask, topk_idx=topk_idx
    )
    num_experts = logits.shape[-1]
    probs = topk_weights_to_probs(
        routing.topk_weights, routing.topk_idx, num_experts=num_experts
    ).astype(logits.dtype)
    return DenseRouting(probs, to_routing_map(routing.topk_idx, num_experts, format))
