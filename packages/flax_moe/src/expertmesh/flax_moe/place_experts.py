"""Which rank holds which experts: by their load, so that no rank computes much more than the others.

    placement[s] = the expert that slot s is to hold       slot s lies on rank s // (E / R)

Renumbering changes the experts' numbers alone: the block computes the same function.

Dimension key: E experts, R ranks of the EP group.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.typing import ArrayLike

from expertmesh.core.linear.layer import DenseState
from expertmesh.core.operands import check_counts

__all__ = ["permute_experts", "place_experts"]

# The dimension of E, by a parameter's name.
_ROUTERS = {"gate_kernel": 1, "gate_bias": 0, "expert_bias": 0}
# Behind an expert's weight: its own bias, and the adapters of Linen's block and of NNX's.
_PARTS = "", "_bias", "_a", "_b", "_lora_a", "_lora_b"
_DIM = _ROUTERS | {f"{name}{part}": 0 for name in ("wi", "wi_0", "wi_1", "wo") for part in _PARTS}


def place_experts(
    tokens_per_expert: ArrayLike, ranks: int, *, num_groups: int | None = None
) -> np.ndarray:
    """Finds a placement that balances the ranks: the largest expert first, each onto the least loaded rank that has
    room.

    Args:
      tokens_per_expert: [E] numbers, at least 0: the load of each expert, such as `MoEOutput.tokens_per_expert` added
        over some steps; without null experts, which are the last.
      ranks: R, the size of the EP group.
      num_groups: `MoEConfig.num_groups` of the router, or None. Whole groups then change places; if there are more
        ranks than groups, the experts of each group do. Groups stay groups.

    Returns:
      int32[E] on the host, for `permute_experts`; a rank's experts ascend. `arange(E)` where nothing is gained.

    Raises:
      ValueError: R does not divide E; groups that are neither divided by the ranks nor divide them; a load that is
        negative or not finite.

    Experts are moved, never split or copied: an expert that has more than 1 / R of all choices stays the limit.
    Runs outside jit, in microseconds. Every process of a job must pass the same loads.
    """
    loads_E = np.asarray(tokens_per_expert, np.float64)
    groups = num_groups or loads_E.size
    _check(loads_E, ranks, groups)
    if groups % ranks == 0:  # whole groups; without any, each expert is one
        units = np.arange(loads_E.size).reshape(groups, -1)
        order = _pack(loads_E.reshape(groups, -1).sum(axis=1), ranks)
        placement_E = units[order].reshape(-1)
    else:
        size = loads_E.size // groups
        packed = [_pack(loads, ranks // groups) for loads in loads_E.reshape(groups, size)]
        placement_E = np.concatenate([g * size + order for g, order in enumerate(packed)])
    gained = _largest(loads_E[placement_E], ranks) < _largest(loads_E, ranks)
    return (placement_E if gained else np.arange(loads_E.size)).astype(np.int32)


def permute_experts(tree: Any, placement: ArrayLike) -> Any:
    """Renumbers the experts of a tree: slot s of each parameter then holds what slot `placement[s]` held.

    Args:
      tree: parameters of one block, by the names of `init_params` or `split_wi`, or any tree whose paths end with these
        names: an optimizer's moments, adapters, `{"expert_bias": ...}`, a `quant_state`; the variables of a Linen
        block, the state of an NNX one. Other leaves stay as they are.
      placement: int[E] of `place_experts`; null experts, which follow the E in the router's parameters, stay. Its
        inverse, `jnp.argsort(placement)`, takes the tree back.

    Returns:
      The tree, laid out as before. If you permute all trees of a block alike, it computes the same function.
      `tokens_per_expert`, `topk_idx` and other results then have the new numbers. Of exactly equal scores the router
      takes the expert with the lower number.

    Raises:
      ValueError: a named array without E in its dimension of experts; a placement that is no vector of integers, or,
        unless it is traced, no permutation.

    Costs one gather of each array; where the experts are sharded, an exchange of shards in which XLA holds a few of an
    array's at a time, never the whole. For use between steps, outside of the loop that is timed.
    """
    placement = jnp.asarray(placement)
    if placement.ndim != 1 or not jnp.issubdtype(placement.dtype, jnp.integer):
        raise ValueError(
            f"permute_experts: placement must be int[E]; got {placement.dtype}{list(placement.shape)}; "
            "make it with place_experts"
        )
    if not isinstance(placement, jax.core.Tracer):
        _check_permutation(np.asarray(placement))

    def permuted(path: Any, leaf: Any) -> Any:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        name = next((name for name in reversed(names) if name in _DIM), None)
        if name is None or leaf is None:
            return leaf
        if isinstance(leaf, DenseState):  # one scale for all rows, and one for each expert's weight
            weight = jax.tree.map(lambda x: _take(name, x, placement, 0), leaf.weight)
            return dataclasses.replace(leaf, weight=weight)
        return _take(name, leaf, placement, _DIM[name])

    return jax.tree_util.tree_map_with_path(
        permuted, tree, is_leaf=lambda node: isinstance(node, DenseState)
    )


def _check_permutation(placement: np.ndarray) -> None:
    if not np.array_equal(np.sort(placement), np.arange(placement.size)):
        raise ValueError(
            f"permute_experts: placement must have each of 0 to {placement.size - 1} once; got {placement.tolist()}; "
            "make it with place_experts"
        )


def _take(name: str, x: jax.Array, placement: jax.Array, dim: int) -> jax.Array:
    if name in _ROUTERS and x.ndim > dim:
        null = jnp.arange(placement.size, x.shape[dim])
        placement = jnp.concatenate([placement, null])
    if x.ndim <= dim or x.shape[dim] != placement.size:
        raise ValueError(
            f"permute_experts: {name} must have E = {placement.size} in dimension {dim}; got {name}.shape={x.shape}; "
            "pass the placement and the trees of one block"
        )
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return jnp.take(x, placement, axis=dim)
    return x.at[(slice(None),) * dim + (placement,)].get(out_sharding=sharding)


def _pack(loads: np.ndarray, ranks: int) -> np.ndarray:
    """The units in the order of their ranks, as many on each."""
    room, total = np.full(ranks, loads.size // ranks), np.zeros(ranks)
    rank_of = np.empty(loads.size, int)
    for unit in np.argsort(-loads, kind="stable"):
        rank = np.argmin(np.where(room > 0, total, np.inf))
        rank_of[unit] = rank
        room[rank] -= 1
        total[rank] += loads[unit]
    return np.argsort(rank_of, kind="stable")


def _largest(loads_E: np.ndarray, ranks: int) -> float:
    most: float = loads_E.reshape(ranks, -1).sum(axis=1).max()
    return most


def _check(loads_E: np.ndarray, ranks: int, groups: int) -> None:
    if loads_E.ndim != 1 or not np.all(np.isfinite(loads_E) & (loads_E >= 0)):
        raise ValueError(
            f"place_experts: tokens_per_expert must be [E] finite numbers of at least 0; got {loads_E}; "
            "pass MoEOutput.tokens_per_expert"
        )
    check_counts("place_experts", ranks=ranks)
    fits = groups % ranks == 0 or ranks % groups == 0
    if loads_E.size == 0 or loads_E.size % ranks or loads_E.size % groups or not fits:
        raise ValueError(
            "place_experts: ranks must divide the experts, and the groups or be divided by them; "
            f"got {loads_E.size} experts, ranks={ranks}, num_groups={groups}; use another EP size"
        )
