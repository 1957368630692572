"""A parameter whose master is elsewhere: the model reads a copy, and the gradient goes to the master.

    read(Weight(copy, slot)) = copy in the slot's dtype          gradient of the slot = the cotangent, unrounded

Casting the result of `read` back to the copy's dtype changes nothing. So a model that casts first computes the same
bits from a copy as from its master.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from expertmesh.core.vjp import differentiable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """What stands for a parameter in the tree of a model.

    Attributes:
      copy: what is read; it has no gradient.
      slot: of the master's shape and dtype; its value is not read, and its gradient is the master's.
    """

    copy: jax.Array
    slot: jax.Array


def read(params: Any) -> Any:
    """The tree with an array for each `Weight`."""
    return jax.tree.map(_array, params, is_leaf=_is_weight)


def _array(leaf: Any) -> Any:
    return _widened(leaf.copy, leaf.slot) if isinstance(leaf, Weight) else leaf


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, Weight)


def _fwd(copy: jax.Array, slot: jax.Array) -> tuple[jax.Array, None]:
    return copy.astype(slot.dtype), None


def _bwd(_: None, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, cotangent


_widened = differentiable(_fwd, _bwd)
