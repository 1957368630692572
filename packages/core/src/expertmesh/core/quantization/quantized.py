"""QuantizedArray: 8- or 4-bit data with the scales that turn it back into numbers."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from expertmesh.core.quantization.recipe import TensorFormat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A pytree: an argument or result of jit, a scan carry, a residual, a checkpoint's leaf.

    `dequantize(q) = data * scale * tensor_scale`, each scale repeated over the elements that share it. Two arrays
    whose `format`, `block` and `dtype` are equal have equal tree structures.

    Attributes:
      data: [..., in the shape of what was quantized], of `format.dtype`.
      scale: with blocks, `ceil(shape / block)` of `format.scale`'s dtype. Without: float32[] of a tensor, [E] of
        experts, [P, G] of groups of rows.
      tensor_scale: float32, in the shape that `scale` has without blocks; None unless `format.scale` has two levels.
      group_sizes: int[P, G] of grouped rows whose scales are per group; else None.
      block: elements of each dimension that share a scale; () without blocks (static).
      format: (static).
      dtype: the dtype of the array that was quantized; dequantizing returns it (static).
    """

    data: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None = None
    group_sizes: jax.Array | None = None
    block: tuple[int, ...] = dataclasses.field(default=(), metadata=dict(static=True))
    format: TensorFormat = dataclasses.field(
        default=TensorFormat(dtype="float8_e4m3fn"), metadata=dict(static=True)
    )
    dtype: str = dataclasses.field(default="bfloat16", metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.size

    def move_dim(self, source: int, target: int) -> "QuantizedArray":
        """Moves a dimension of the data, as `jnp.moveaxis`, with its blocks; tensor scales are of none that moves."""

        def moved(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x, source, target)

        block = list(self.block)
        if block:
            block.insert(target % self.ndim, block.pop(source))
        scale = moved(self.scale) if block else self.scale
        return dataclasses.replace(self, data=moved(self.data), scale=scale, block=tuple(block))

    def per_leaf(self, of_data: tuple[Any, ...], of_groups: Any) -> tuple[tuple[Any, ...], ...]:
        """Extends a property of the data's dimensions, such as their mesh axes, to the dimensions of each leaf.

        Scales of blocks have all dimensions of the data. Other scales have the leading ones; scales of groups of rows
        have the participants and the groups.
        """
        shape = (self.scale if self.tensor_scale is None else self.tensor_scale).shape
        groups = (*of_data[:1], of_groups)
        grouped = self.group_sizes is not None or shape != self.shape[: len(shape)]
        leading = groups if len(shape) == 2 and grouped else of_data[: len(shape)]
        leaves = {
            "data": of_data,
            "scale": of_data if self.block else leading,
            "tensor_scale": leading,
            "group_sizes": groups,
        }
        return tuple(of for name, of in leaves.items() if getattr(self, name) is not None)


def quantized_like(
    shape: tuple[int, ...],
    dtype: Any,
    format: TensorFormat,
    block: tuple[int, ...],
    tensors: tuple[int, ...],
) -> QuantizedArray:
    """The type of what an array of this shape and dtype is quantized to; `tensors`: the shape of scales of tensors."""
    array: Any = jax.ShapeDtypeStruct
    of_tensors = array(tensors, "float32")
    blocks = tuple(-(-n // b) for n, b in zip(shape, block, strict=bool(block)))
    scale = "float32" if format.scale == "power_of_2" else format.scale
    return QuantizedArray(
        data=array(shape, format.dtype),
        scale=array(blocks, scale) if block else of_tensors,
        tensor_scale=of_tensors if block and format.scale == "float8_e4m3fn" else None,
        block=block,
        format=format,
        dtype=jnp.dtype(dtype).name,
    )


def is_quantized(*operands: Any) -> bool:
    """Whether one of the operands is quantized."""
    return any(isinstance(x, QuantizedArray) for x in operands)


def is_plain(*operands: Any) -> bool:
    """Whether none of the operands is quantized."""
    return not is_quantized(*operands)


def named[Tree](tree: Tree, names: Sequence[str]) -> Tree:
    """The arrays of a pytree, each under all of these names for checkpoint policies; what is quantized as bits.

    JAX rounds a float that a policy keeps to its exponent and mantissa (`jax.lax.reduce_precision`), as if it were an
    IEEE float: E4M3 would have NaN from 256 on and no subnormals, E2M1 6 for 4.
    """
    kept: Tree = jax.tree.map(lambda x: _named(x, names), tree, is_leaf=is_quantized)
    return kept


def _named(x: Any, names: Sequence[str]) -> Any:
    if isinstance(x, QuantizedArray):
        return jax.tree.map(lambda leaf: of_bits(_named(bits_of(leaf), names), leaf.dtype), x)
    for name in names:
        x = checkpoint_name(x, name)
    return x


def bits_of(x: jax.Array) -> jax.Array:
    """A float of 8 or 4 bits as an integer, whose zero has the same bits; any other array as it is."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    narrow = {8: jnp.uint8, 4: jnp.uint4}.get(jnp.finfo(x.dtype).bits)
    return x if narrow is None else jax.lax.bitcast_convert_type(x, narrow)


def of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """What `bits_of` was given, an array of this dtype."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def check_quantized(name: str, q: QuantizedArray) -> None:
    """Raises an error that names `name` unless the parts of `q` fit each other.

    Raises:
      TypeError: not a QuantizedArray, or parts of other dtypes than its format's.
      ValueError: scales, block or group sizes of other shapes than the data's.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(
            f"{name}: the operand must be a QuantizedArray; got {type(q).__name__}; quantize it first"
        )
    two_level = q.format.scale == "float8_e4m3fn"
    dtypes = {
        "data": (q.data, q.format.dtype),
        "scale": (q.scale, "float32" if q.format.scale == "power_of_2" else q.format.scale),
        "tensor_scale": (q.tensor_scale, "float32" if two_level else None),
    }
    for part, (x, want) in dtypes.items():
        if (None if x is None else x.dtype.name) != want:
            raise TypeError(
                f"{name}: {part} must be of dtype {want}; got {None if x is None else x.dtype}, format {q.format}; "
                "make it with quantize"
            )
    _check_shapes(name, q)


def _check_shapes(name: str, q: QuantizedArray) -> None:
    for rule in _broken_rules(q):
        parts = {
            part: getattr(q, part) for part in ("data", "scale", "tensor_scale", "group_sizes")
        }
        shapes = {part: None if x is None else x.shape for part, x in parts.items()}
        raise ValueError(
            f"{name}: {rule}; got {shapes}, block={q.block}; pass it as quantize made it"
        )


def _broken_rules(q: QuantizedArray) -> Iterator[str]:
    """What the parts of `q` must be and are not; ask for no more after one of them."""
    if bool(q.block) != (q.format.block is not None) or len(q.block) not in (0, q.ndim):
        yield "the block must have one entry per dimension, and none for formats without blocks"
    if q.block:
        want = tuple(-(-n // b) for n, b in zip(q.shape, q.block, strict=True))
        if q.scale.shape != want:
            yield f"scale must be ceil(shape / block) = {want}"
    leading, sizes = q.tensor_scale if q.block else q.scale, q.group_sizes
    if leading is None:
        return
    if sizes is None:
        if leading.shape != q.shape[: leading.ndim]:
            yield "tensor scales must be of leading dimensions"
    elif (
        q.ndim < 2
        or leading.ndim != 2
        or leading.shape != sizes.shape
        or leading.shape[0] != q.shape[0]
    ):
        yield "the scales of groups and group_sizes must be [P, G], data [P, C, ...]"


def widths_unsupported(*widths: int) -> str | None:
    """What keeps GEMMs of a weight of 8 bits, of these sizes of K and N, from the kernels, or None."""
    if any(width == 0 or width % 16 for width in widths):
        return f"widths must be multiples of 16; they are {widths}"
    return None


def blocked_weight_unsupported(parts: int, width: int) -> str | None:
    """As `widths_unsupported`, of a weight [K, parts, width] in blocks of 128: no block may be of two parts."""
    if parts > 1 and width % 128:
        return f"the last dimension of the weight must consist of blocks of 128; it is {width}"
    return None
