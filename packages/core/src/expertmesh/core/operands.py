"""Checks of operands, results and options of public functions: arrays of one kind of numbers, masks, ids, counts."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import checkify
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Kind:
    """Numbers that an operand may consist of.

    Attributes:
      words: what they are called.
      dtypes: of which theirs must be a subtype; () for any.
      remedy: what to do with other numbers.
      bytes: of a number at least.
    """

    words: str
    dtypes: tuple[type, ...]
    remedy: str
    bytes: int = 0

    def __contains__(self, dtype: DTypeLike) -> bool:
        if self.dtypes and not any(jnp.issubdtype(dtype, each) for each in self.dtypes):
            return False
        return not self.bytes or jnp.dtype(dtype).itemsize >= self.bytes


NUMBERS = Kind("numbers", (), "")
FLOATS = Kind("floats of at least 16 bits", (jnp.floating,), "cast it to float32 or bfloat16", 2)
ANY_FLOATS = dataclasses.replace(FLOATS, words="floats", bytes=0)
INTEGERS = Kind("integers", (jnp.integer,), "cast it to int32")
BOOLS = Kind("bools", (jnp.bool_,), "compare it with 0")
FLAGS = Kind("bools or integers", (jnp.bool_, jnp.integer), "compare it with 0")


def check_arrays(
    name: str,
    kind: Kind = NUMBERS,
    /,
    *,
    optional: bool = False,
    quantized: bool = False,
    **operands: Any,
) -> None:
    """Raises an error that names `name` unless each operand is an array of such numbers.

    An array is what has a shape and a dtype, so of NumPy and a variable of Flax; lists and Python numbers are none.

    Args:
      optional: whether None passes.
      quantized: whether a QuantizedArray passes, which is of the numbers that it stands for.
      operands: by the names that `name` has for them.

    Raises:
      TypeError: not an array, or of other numbers.
      ValueError: integers of NumPy that JAX does not hold.
    """
    for operand, x in operands.items():
        if x is None and optional:
            continue
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            got = "None" if x is None else f"a {type(x).__name__}"
            raise TypeError(
                f"{name}: {operand} must be an array of {kind.words}; got {got}; pass a jax.Array, as by "
                "jax.numpy.asarray"
            )
        if not quantized and not _is_one(x):
            raise TypeError(
                f"{name}: {operand} must be an array of {kind.words}; got a {type(x).__name__}; "
                "dequantize or merge it into a jax.Array"
            )
        if x.dtype not in kind:
            raise TypeError(
                f"{name}: {operand} must be an array of {kind.words}; got dtype={x.dtype}; {kind.remedy}"
            )
        _check_range(name, operand, x)


def _is_one(x: Any) -> bool:
    """Whether it is one array, or a variable that stands for one, and no pytree of several."""
    return hasattr(x, "__jax_array__") or jax.tree_util.all_leaves([x])


def _check_range(name: str, operand: str, x: Any) -> None:
    """Raises where JAX would cut bits off an array of NumPy's integers: without x64 it holds 32 bits."""
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu" or not x.size:
        return
    held = jax.dtypes.canonicalize_dtype(x.dtype)
    if held == x.dtype:
        return
    least, most = int(x.min()), int(x.max())
    if least < np.iinfo(held).min or most > np.iinfo(held).max:
        raise ValueError(
            f"{name}: {operand} must be of numbers that {held} holds; got {least} to {most}; pass smaller numbers, or "
            "set jax_enable_x64"
        )


def check_numbers(name: str, remedy: str, *, least: float = -math.inf, **numbers: object) -> None:
    """Raises an error that names `name` and says `remedy` unless each is a finite number of at least `least`.

    Raises:
      TypeError: no number of Python's or NumPy's.
      ValueError: infinite, NaN or below `least`.
    """
    for option, given in numbers.items():
        value = given.item() if isinstance(given, np.generic) else given
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(
                f"{name}: {option} must be a Python number; got {option}={value!r}; pass a float"
            )
        if not (math.isfinite(value) and value >= least):
            bound = f" and at least {least}" if least > -math.inf else ""
            raise ValueError(
                f"{name}: {option} must be finite{bound}; got {option}={value}; {remedy}"
            )


def check_type(name: str, cls: type, remedy: str, **given: object) -> None:
    """Raises an error that names `name` and says `remedy` unless each is a `cls`.

    Raises:
      TypeError: it is none.
    """
    for argument, value in given.items():
        if not isinstance(value, cls):
            got = "None" if value is None else type(value).__name__
            raise TypeError(
                f"{name}: {argument} must be of type {cls.__name__}; got {got}; {remedy}"
            )


def as_dtype(name: str, option: str, value: DTypeLike) -> jnp.dtype:
    """The dtype of what names one.

    Raises:
      TypeError: no dtype; names `name` and `option`.
    """
    try:
        dtype: jnp.dtype = jnp.dtype(value)
    except TypeError:
        raise TypeError(
            f"{name}: {option} must be a dtype; got {option}={value!r}; pass one of jax.numpy's, or its name"
        ) from None
    return dtype


def check_out_dtype(name: str, dtype: DTypeLike, option: str = "out_dtype") -> jnp.dtype:
    """The dtype of a sum's result, given or that of an operand.

    Raises:
      TypeError: no dtype.
      ValueError: names `name`; for integers and for floats of less than 16 bits, whose range is too small.
    """
    resolved = as_dtype(name, option, dtype)
    if not jnp.issubdtype(resolved, jnp.floating) or resolved.itemsize < 2:
        raise ValueError(
            f"{name}: the result must be of floats of at least 16 bits; got {option}={resolved.name}; take bfloat16, "
            "and quantize for less"
        )
    return resolved


def check_counts(name: str, *, optional: bool = False, least: int = 1, **counts: object) -> None:
    """Raises an error that names `name` unless each is a Python int of at least `least`.

    Args:
      optional: whether None passes.
      least: 1, or 0.
      counts: by the names that `name` has for them.

    Raises:
      TypeError: not an int.
      ValueError: below `least`.
    """
    for option, value in counts.items():
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(
                f"{name}: {option} must be an int; got {option}={value!r}; pass a Python int"
            )
        if value < least:
            others = " or 0" * (least == 0) + " or None" * optional
            raise ValueError(
                f"{name}: {option} must be at least {least}; got {option}={value}; pass a positive int{others}"
            )


def as_counts(name: str, *, least: int = 1, **counts: Any) -> tuple[int, ...]:
    """Python's of ints, NumPy's too, that `check_counts` takes; in their order."""
    ints: dict[str, Any] = {
        option: value.item() if isinstance(value, np.integer) else value
        for option, value in counts.items()
    }
    check_counts(name, least=least, **ints)
    return tuple(ints.values())


def exceeds(size: int, limit: int) -> bool:
    """`size > limit`; False for a size that `jax.export` knows by a symbol only, whatever it will be."""
    return not export.is_symbolic_dim(size) and size > limit


def check_token_mask(name: str, token_mask: jax.Array | None, tokens: tuple[int, ...]) -> None:
    """Refuses a mask of tokens that is not bool[tokens].

    Raises:
      TypeError: not bool.
      ValueError: another shape.
    """
    check_arrays(name, BOOLS, optional=True, token_mask=token_mask)
    if token_mask is not None and token_mask.shape != tokens:
        raise ValueError(
            f"{name}: token_mask must have one value per token; got token_mask.shape={token_mask.shape}, "
            f"tokens {tokens}; pass the mask of these tokens"
        )


def of_live(x: jax.Array, token_mask: jax.Array | None, other: float) -> jax.Array:
    """[..., n] of tokens, `other` for those that do not take part."""
    return x if token_mask is None else jnp.where(token_mask[..., None], x, other)


def wide_ids(topk_idx: jax.Array) -> jax.Array:
    """A narrow integer could not hold every expert id that it is compared with or replaced by."""
    return topk_idx if topk_idx.dtype.itemsize >= 4 else topk_idx.astype(jnp.int32)


def is_routed(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """bool, like `topk_idx` of `wide_ids`: whether a choice goes to an expert; any other id, such as -1, does not."""
    return (topk_idx >= 0) & (topk_idx < num_experts)


def routed_ids(topk_idx: jax.Array, token_mask: jax.Array | None, num_experts: int) -> jax.Array:
    """int32 choices, -1 for each that goes to no expert and for all of a token that does not take part."""
    topk_idx = of_live(wide_ids(topk_idx), token_mask, -1)
    return jnp.where(is_routed(topk_idx, num_experts), topk_idx, -1).astype(jnp.int32)


def debug_check_ids(name: str, topk_idx: jax.Array, num_experts: int) -> None:
    """Under `jax.experimental.checkify.checkify` an id >= num_experts is an error."""
    checkify.debug_check(
        jnp.all(wide_ids(topk_idx) < num_experts),
        f"{name}: expert ids must be below num_experts={num_experts}; got {{most}}; pass -1 for a choice of none",
        most=jnp.max(topk_idx, initial=0),
    )
