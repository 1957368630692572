"""Training state in the host's memory, and an optimizer's step over it that holds one chunk on the device.

A leaf in `pinned_host` is read and written in `Chunks` of its leading dimensions. One chunk of the parameter and of
the optimizer's state comes to the device, is updated there, and goes back. The chunks of one leaf are a loop of one
program. Donated arrays are updated in place, on the host too.

Any optimizer of optax works whose update of a part of a parameter needs that part alone: its gradient, its state and
itself. Adam is elementwise, Muon works on each matrix. A norm over the whole tree comes from outside.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding

HOST = "pinned_host"


def unsupported(device: jax.Device) -> str | None:
    """Why arrays of a device cannot lie in the host's memory, or None."""
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST in kinds:
        return None
    return f"{device.device_kind} has no memory of the kind {HOST}, only {', '.join(kinds)}"


def in_host(shardings: Any) -> Any:
    """Of each sharding of a tree, whether it is in the host's memory."""
    return jax.tree.map(lambda sharding: sharding.memory_kind == HOST, shardings)


def to_host(x: jax.Array) -> jax.Array:
    """The array in the host's memory, inside jit."""
    out: jax.Array = jax.device_put(x, jax.memory.Space.Host)
    return out


def to_device(x: jax.Array) -> jax.Array:
    """The array in the device's memory, inside jit."""
    out: jax.Array = jax.device_put(x, jax.memory.Space.Device)
    return out


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Equal chunks of an array along its leading dimensions, in their order.

    Attributes:
      sizes: of a chunk in each of these dimensions, whose divisors they are; (): the array is the only chunk.
    """

    sizes: tuple[int, ...] = ()

    def count(self, shape: tuple[int, ...]) -> int:
        """How many chunks an array of that shape has."""
        return math.prod(self._counts(shape))

    def of(self, x: jax.Array, number: jax.Array) -> jax.Array:
        """A chunk of x, by its number."""
        if not self.sizes:
            return x
        rest = x.shape[len(self.sizes) :]
        chunk: jax.Array = jax.lax.dynamic_slice(x, self._start(x, number), (*self.sizes, *rest))
        return chunk

    def replaced(self, x: jax.Array, chunk: jax.Array, number: jax.Array) -> jax.Array:
        """x with another chunk of that number."""
        if not self.sizes:
            return chunk
        whole: jax.Array = jax.lax.dynamic_update_slice(x, chunk, self._start(x, number))
        return whole

    def _counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(of // size for of, size in zip(shape, self.sizes, strict=False))

    def _start(self, x: jax.Array, number: jax.Array) -> tuple[Any, ...]:
        places = _unraveled(number, self._counts(x.shape))
        starts = (place * size for place, size in zip(places, self.sizes, strict=True))
        return (*starts, *(0,) * (x.ndim - len(self.sizes)))


def cast_in_chunks(x: jax.Array, dtype: Any, chunks: Chunks, sharding: NamedSharding) -> jax.Array:
    """The array in the host's memory in another dtype on the device, chunk by chunk."""

    def cast(x: jax.Array) -> jax.Array:
        def one(number: jax.Array, out: jax.Array) -> jax.Array:
            return chunks.replaced(out, to_device(chunks.of(x, number)).astype(dtype), number)

        if not chunks.sizes:
            return to_device(x).astype(dtype)
        start = jnp.zeros(x.shape, dtype, out_sharding=_in_type(sharding))
        out: jax.Array = jax.lax.fori_loop(0, chunks.count(x.shape), one, start)
        return out

    made: jax.Array = jax.jit(cast, out_shardings=sharding)(x)
    return made


def _in_type(sharding: NamedSharding) -> NamedSharding | None:
    """The sharding, over Explicit axes."""
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


class Parameters(NamedTuple):
    """What an update changes.

    Attributes:
      params: the masters.
      opt_state: of the optimizer.
      copies: of masters in other dtypes, which the model reads; None where it reads the master.
    """

    params: Any
    opt_state: Any
    copies: Any


_SHARED = -1  # the owner of state that belongs to no parameter, such as a count of steps


def update(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Any,
    old: Parameters,
    hosted: Parameters,
    chunks: Any,
    **extra: jax.Array,
) -> Parameters:
    """One step of the optimizer, leaf after leaf and chunk after chunk.

    On GPUs a whole rounds as its chunks do: in either an update is compiled apart from what made the gradient.

    Args:
      optimizer: see the top of this module.
      grads: as `old.params`.
      old: before the step; of what is donated, each chunk is overwritten where it is.
      hosted: `in_host` of `old`; that of its `copies` is not read.
      chunks: as `old.params`, of each its Chunks, along dimensions that no mesh axis splits.
      extra: arguments of the optimizer's update, such as a norm over all gradients.

    Raises:
      ValueError: a parameter's state that has not its shape.
    """
    tree: Any = jax.tree.structure(old.params)
    params = jax.tree.leaves(old.params)
    state, state_tree = jax.tree.flatten(old.opt_state)
    copies, chunks = tree.flatten_up_to(old.copies), jax.tree.leaves(chunks)
    of_params, of_state = jax.tree.leaves(hosted.params), jax.tree.leaves(hosted.opt_state)
    rule = _Rule(optimizer, tree, _owners(optimizer, old), extra)
    shared = after = rule.shared(state)
    for number, grad in enumerate(tree.flatten_up_to(grads)):
        own = rule.state_of(number)
        leaf = _Leaf(
            step=functools.partial(rule.step, number, shared),
            grad=grad,
            arrays=(params[number], *(state[i] for i in own)),
            hosted=(of_params[number], *(of_state[i] for i in own)),
            copy=copies[number],
        )
        (params[number], *new), copies[number], after = leaf.updated(chunks[number], shared)
        state = _replaced(state, zip(own, new, strict=True))
    state = _replaced(state, after.items())
    return Parameters(*map(jax.tree.unflatten, (tree, state_tree, tree), (params, state, copies)))


def like_state(
    optimizer: optax.GradientTransformation, state: Any, of_params: Any, shared: Any
) -> Any:
    """A tree like the optimizer's state: what `of_params` has for a leaf's parameter, and `shared` if it has none."""
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, own: leaf if isinstance(leaf, optax.MaskedNode) else own,
        state,
        of_params,
        transform_non_params=lambda _: shared,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),  # another optimizer's
    )


def _owners(optimizer: optax.GradientTransformationExtraArgs, old: Parameters) -> list[int]:
    """Of each leaf of the optimizer's state, the number of the parameter whose it is, or _SHARED."""
    count = len(jax.tree.leaves(old.params))
    numbers = jax.tree.unflatten(jax.tree.structure(old.params), range(count))
    found = like_state(optimizer, old.opt_state, numbers, _SHARED)
    owners: list[int] = jax.tree.leaves(found)
    return owners


def _replaced(leaves: list[Any], new: Iterable[tuple[int, Any]]) -> list[Any]:
    changed = dict(new)
    return [changed.get(i, leaf) for i, leaf in enumerate(leaves)]


class _Rule(NamedTuple):
    """An optimizer for one parameter at a time: in its trees all others are None, as in a state made of such a tree.

    Attributes:
      tree: of the parameters.
      owners: of the state's leaves.
      extra: arguments of its update.
    """

    optimizer: optax.GradientTransformationExtraArgs
    tree: Any
    owners: list[int]
    extra: dict[str, jax.Array]

    def state_of(self, number: int) -> list[int]:
        """Which leaves of the state are the parameter's."""
        return [i for i, owner in enumerate(self.owners) if owner == number]

    def shared(self, state: list[Any]) -> dict[int, jax.Array]:
        """The leaves of the state that are no parameter's."""
        return {i: state[i] for i in self.state_of(_SHARED)}

    def step(
        self, number: int, shared: dict[int, jax.Array], grad: jax.Array, *arrays: jax.Array
    ) -> tuple[tuple[jax.Array, ...], dict[int, jax.Array]]:
        """What follows `arrays`, a parameter (or a part of it) and its state, and what follows `shared`."""
        own, (param, *mine) = self.state_of(number), arrays
        kept = shared | dict(zip(own, mine, strict=True))
        grads, params = (self._alone(number, x) for x in (grad, param))
        tree: Any = jax.tree.structure(jax.eval_shape(self.optimizer.init, params))
        before = tree.unflatten([kept[i] for i in sorted(kept)])
        updates, after = self.optimizer.update(grads, before, params, **self.extra)
        (new,) = jax.tree.leaves(optax.apply_updates(params, updates))
        found = dict(zip(sorted(kept), jax.tree.leaves(after), strict=True))
        return (new, *(found[i] for i in own)), {i: found[i] for i in shared}

    def _alone(self, number: int, leaf: jax.Array) -> Any:
        return self.tree.unflatten(
            [leaf if i == number else None for i in range(self.tree.num_leaves)]
        )


class _Leaf(NamedTuple):
    """One parameter in an update.

    Attributes:
      step: (gradient, *arrays) -> (arrays, shared state) after it, of the whole or of a part.
      arrays: the master, then its state.
      hosted: of each, whether it is in the host's memory.
      copy: of the master, if there is one.
    """

    step: Callable[..., Any]
    grad: jax.Array
    arrays: tuple[jax.Array, ...]
    hosted: tuple[bool, ...]
    copy: jax.Array | None

    def updated(self, chunks: Chunks, shared: dict[int, jax.Array]) -> Any:
        """The arrays, the copy and the shared state after a step, chunk after chunk."""
        shape = self.arrays[0].shape
        if any(x.shape != shape for x in self.arrays):
            raise ValueError(
                f"update: a parameter's state must have its shape; got {[x.shape for x in self.arrays[1:]]} for "
                f"{shape}; keep that optimizer's state on the device"
            )
        start = self.arrays, self.copy, shared
        if chunks.sizes:
            one = functools.partial(self._chunk, chunks)
            return jax.lax.fori_loop(0, chunks.count(shape), one, start)
        # As a loop's operands are: what made the gradient is not fused with the update, which would round otherwise.
        alone = self._replace(grad=jax.lax.optimization_barrier(self.grad))
        return alone._chunk(chunks, 0, start)

    def _chunk(self, chunks: Chunks, number: Any, carry: Any) -> Any:
        arrays, copy, _ = carry
        parts = (
            to_device(chunks.of(x, number)) if hosted else chunks.of(x, number)
            for x, hosted in zip(arrays, self.hosted, strict=True)
        )
        new, shared = self.step(chunks.of(self.grad, number), *parts)
        if copy is not None:
            copy = chunks.replaced(copy, new[0].astype(copy.dtype), number)
        arrays = tuple(
            chunks.replaced(x, to_host(part) if hosted else part, number)
            for x, part, hosted in zip(arrays, new, self.hosted, strict=True)
        )
        return arrays, copy, shared


def _unraveled(number: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The indices of an element of an array of these sizes, by its number."""
    place: list[jax.Array] = []
    for size in reversed(sizes):
        number, index = jnp.divmod(number, size)
        place.insert(0, index)
    return tuple(place)
