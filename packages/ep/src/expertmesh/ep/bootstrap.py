"""bootstrap: everything that can be wrong with an exchange, found before the first step."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from expertmesh.core.operands import check_counts
from expertmesh.core.specs import constrain, pad_spec
from expertmesh.core.support import platform_of
from expertmesh.ep.agreement import check_processes, facts_of
from expertmesh.ep.capacity import most_rows
from expertmesh.ep.config import EpConfig
from expertmesh.ep.dispatch import Handle, combine, dispatch, prepare
from expertmesh.ep.transports import choose_auto
from expertmesh.ep.transports.choice import Exchange

__all__ = ["EpGroup", "bootstrap"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpGroup:
    """What `bootstrap` found, to read and to log.

    Attributes:
      ep_size: R, ranks of an EP group.
      num_participants: P, over all EP groups.
      tokens_per_rank: T.
      experts_per_rank: e.
      capacity: C.
      max_rows: the most rows that a participant can be sent: all choices of its group.
      transport: the one in use; with "auto", its choice.
    """

    ep_size: int
    num_participants: int
    tokens_per_rank: int
    experts_per_rank: int
    capacity: int
    max_rows: int
    transport: str


def bootstrap(
    config: EpConfig,
    tokens: jax.ShapeDtypeStruct | jax.Array,
    *,
    top_k: int,
    timeout: float = 60.0,
) -> EpGroup:
    """Checks the sizes of an exchange, runs one, and compares what comes back. Optional: nothing depends on it.

    It opens the communicators, so that the first step need not, and finds wrong sizes, a missing axis and a transport
    that does not work here. Call it before training, outside jit, on every process, under the MeshResource if there is
    one. It keeps nothing: call it for any number of configs and meshes.

    Args:
      config: EpConfig.
      tokens: what `dispatch` will be given, [..., D]; its values are not read:
        `jax.ShapeDtypeStruct((B, S, D), dtype, sharding=NamedSharding(mesh, spec))`. No sharding: one device.
      top_k: K.
      timeout: seconds for which it waits for the other processes.

    Returns:
      EpGroup.

    Raises:
      RuntimeError: called under jit; a process that does not call it in time; or the exchange brings wrong values back.
      ValueError: what `prepare` and `dispatch` refuse; a capacity above the group's maximum; options, sizes, meshes or
        versions that differ between processes. In all processes alike.
      TypeError: a dtype that they refuse, or a `top_k` that is no int.

    Costs one dispatch and one combine of these sizes, and their compilation.
    """
    EpConfig.check("bootstrap", config=config)
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise RuntimeError(
            "bootstrap: it must be called outside jit, since it runs an exchange; got a call under tracing; "
            "call bootstrap(config, jax.ShapeDtypeStruct(shape, dtype, sharding=...), top_k=K) before the first step"
        )
    check_processes("bootstrap", _facts(config, tokens, top_k), timeout=timeout)
    check_counts("bootstrap", top_k=top_k)
    topk_idx, x = _operands(config, tokens, top_k)
    handle = jax.eval_shape(partial(prepare, config=config), topk_idx)
    group = _describe(config, handle, x.dtype, platform_of(x))
    if group.capacity > group.max_rows:
        raise ValueError(
            "bootstrap: capacity must be at most the rows that a group can send to one rank; got "
            f"capacity={group.capacity}, max_rows={group.max_rows} of ep_size={group.ep_size} times "
            f"{group.tokens_per_rank} tokens times top_k={top_k}; capacity counts rows of one participant, not of all"
        )
    if jax.jit(partial(_differs, config=config))(topk_idx, x):
        raise RuntimeError(
            f"bootstrap: the exchange must bring every token back; got other values with "
            f"transport={group.transport!r}, ep_size={group.ep_size}; try another transport, and check the links"
        )
    return group


def _facts(config: EpConfig, tokens: Any, top_k: int) -> dict[str, str]:
    """What must be the same in all processes."""
    sharding = getattr(tokens, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    of_tokens: dict[str, object] = {
        "features": tokens.shape[-1],
        "dtype": jnp.dtype(tokens.dtype).name,
        "spec": mesh and sharding and sharding.spec,
    }
    facts = facts_of(config, tokens.shape[:-1], top_k, None if mesh is None else mesh.shape)
    return facts | {name: repr(value) for name, value in of_tokens.items()}


def _operands(
    config: EpConfig, tokens: jax.Array | jax.ShapeDtypeStruct, top_k: int
) -> tuple[jax.Array, jax.Array]:
    """Choices that take the experts in turn, and tokens of 0 and 1 in turn, whose sums are exact."""
    leading = tokens.shape[:-1]
    number = np.arange(np.prod(leading, dtype=np.int64)).reshape(*leading, 1)
    chosen = (number * top_k + np.arange(top_k)) % config.num_experts
    sharding, values = tokens.sharding, np.broadcast_to(number % 2, tokens.shape)
    if not isinstance(sharding, NamedSharding):
        return jnp.asarray(chosen, jnp.int32), jnp.asarray(values, tokens.dtype)
    spec = PartitionSpec(*pad_spec(sharding.spec, len(tokens.shape))[:-1])

    def put(x: np.ndarray, sharding: Sharding, dtype: DTypeLike) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at].astype(dtype))

    choices = put(chosen, NamedSharding(sharding.mesh, spec), np.int32)
    return choices, put(values, sharding, tokens.dtype)


def _describe(config: EpConfig, handle: Handle, dtype: DTypeLike, platform: str) -> EpGroup:
    (participants, capacity), ep_size = handle.source.shape, handle.ep_size
    _, group_tokens, top_k = handle.row.shape
    tokens_per_rank, experts_per_rank = group_tokens // ep_size, config.num_experts // ep_size
    exchange = Exchange(
        num_tokens=tokens_per_rank,
        top_k=top_k,
        capacity=capacity,
        ep_size=ep_size,
        dtype=dtype,
        platform=platform,
    )
    return EpGroup(
        ep_size=ep_size,
        num_participants=participants,
        tokens_per_rank=tokens_per_rank,
        experts_per_rank=experts_per_rank,
        capacity=capacity,
        max_rows=most_rows(experts_per_rank, group_tokens * top_k, config.alignment),
        transport=choose_auto(exchange) if handle.transport == "auto" else handle.transport,
    )


def _differs(topk_idx: jax.Array, tokens: jax.Array, *, config: EpConfig) -> jax.Array:
    handle = prepare(topk_idx, config)
    out = combine(handle, dispatch(handle, tokens))
    tokens = constrain(tokens, jax.typeof(out).sharding.spec)
    held = jnp.sum(handle.slot >= 0, axis=-1, keepdims=True).astype(jnp.float32)
    return jnp.any(out != (held * tokens.astype(jnp.float32)).astype(out.dtype))
