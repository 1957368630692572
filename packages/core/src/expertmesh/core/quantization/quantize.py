"""Quantization: numbers of few bits, and the scales that turn them back.

    quantize:   q = round(clip(x * multiplier, -max, max)),  scale = 1 / multiplier
    dequantize: x ~ q * scale * tensor_scale

with max the largest number of the format's dtype, one multiplier per block or tensor, and amax the largest magnitude:

| format.scale | multiplier | scale | amax 0 | amax Inf | amax NaN |
|---|---|---|---|---|---|
| float32 | max / amax, of blocks at most the largest number of x's dtype | its reciprocal | 1 | 1 | 1 |
| power_of_2 | max / amax, rounded down to a power of two | its reciprocal | 1 | 1 | 1 |
| float8_e8m0fnu | reciprocal of the scale | amax / max, rounded up to a power of two | 2^-127 | 2^127 | NaN |
| float8_e4m3fn | g / scale, g = 6 * 448 / tensor amax | amax / 6 * g in e4m3; tensor_scale 1 / g | 0 | 448 | NaN |

(g is 1 if the tensor's amax is 0, Inf or NaN.) Numbers saturate: Inf becomes max. NaN stays NaN in 8 bits, and a block
whose scale is NaN is NaN as a whole. 4 bits have no NaN: the data of a block with NaN is 0, and its scale is NaN.
Everything is computed in float32 and rounded to nearest, ties to even (stochastic formats excepted), with the same bits
on every platform.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.op import Kernel, Op, Plan, Query
from expertmesh.core.operands import FLOATS, check_arrays, check_out_dtype
from expertmesh.core.ops.groups import cleared, expand_trailing, of_rows, row_groups
from expertmesh.core.quantization import numerics
from expertmesh.core.quantization.quantized import QuantizedArray, check_quantized, quantized_like
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.quantization.scales import (
    block_amax,
    block_scales,
    reciprocal,
    repeat_blocks,
    tensor_scales,
)
from expertmesh.core.rule import plan_by_rule
from expertmesh.core.specs import Entry, axis_size, entry_axes, spec_axes
from expertmesh.core.support import eight_bits_unsupported
from expertmesh.core.vjp import not_differentiable

__all__ = ["dequantize", "dequantize_values", "quantize", "quantize_dbias"]

# Bit i: whether row i of the rotation is negative (+ + + - + - - - - - - + - + - -).
_NEGATIVE_ROWS = 0b1101011111101000


def rotate(x: jax.Array, axis: int) -> jax.Array:
    """Blocks of 16 along `axis` times the Hadamard matrix / 4 whose rows have the fixed signs.

    In float32, by pairs at distance 1, 2, 4, 8; rounded to bfloat16 where `x` is. Subnormal numbers are zeros.
    """
    wide = numerics.flush(numerics.widen(x))
    ahead, behind = wide.shape[:axis], wide.shape[axis + 1 :]
    blocks = wide.reshape(*ahead, wide.shape[axis] // 16, 16, prod(behind))
    # No array: custom_partitioning takes no constants.
    negative = (_NEGATIVE_ROWS >> jnp.arange(16, dtype=jnp.int32)[:, None]) & 1
    blocks = jnp.where(negative > 0, -blocks, blocks)
    for distance in (1, 2, 4, 8):
        pairs = blocks.reshape(*ahead, -1, 16 // (2 * distance), 2, distance, prod(behind))
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        blocks = jnp.stack([first + second, first - second], axis=-3)
    rotated = blocks.reshape(wide.shape) * jnp.float32(0.25)
    if x.dtype == jnp.bfloat16:
        rotated = jax.lax.reduce_precision(rotated, exponent_bits=8, mantissa_bits=7)
    return numerics.flush(rotated)


def random_bits(
    key: jax.Array, shape: tuple[int, ...], origin: tuple[tuple[str, ...], ...] = ()
) -> jax.Array:
    """uint32 per element: of the key and the element's position in the global array alone.

    Args:
      key: uint32[2].
      shape: of the local array.
      origin: mesh axes that split each dimension; () for none.
    """
    # Two counters, rows and columns, as one of 32 bits is too short for a large array.
    row = column = jnp.zeros(shape, jnp.uint32)
    length = 1
    for dim, (size, axes) in enumerate(zip(shape, origin or ((),) * len(shape), strict=True)):
        row = row * jnp.uint32(length) + column
        first = jax.lax.axis_index(axes).astype(jnp.uint32) * size if axes else jnp.uint32(0)
        column = first + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        length = size * (jax.lax.axis_size(axes) if axes else 1)
    count = jnp.concatenate([row.reshape(-1), column.reshape(-1)])
    out: jax.Array = threefry_2x32(key, count)[: prod(shape)].reshape(shape)
    return out


@partial(jax.jit, static_argnames="format")
def to_data(
    x: jax.Array, multiplier: jax.Array, format: TensorFormat, bits: jax.Array | None = None
) -> jax.Array:
    """float32 x times the multiplier, saturated, rounded, in the format's dtype."""
    scaled = numerics.saturate(numerics.multiply(x, multiplier), format.dtype)
    if format.stochastic:
        rounded = numerics.round_stochastically(scaled, format.dtype, bits)
    else:
        rounded = numerics.round_nearest(scaled, format.dtype)
    data: jax.Array = numerics.cast(rounded, format.dtype)
    return data


@partial(jax.jit, static_argnames=("block", "dtype"))
def dequantize_values(
    data: jax.Array,
    scale: jax.Array,
    tensor_scale: jax.Array | None = None,
    *,
    block: tuple[int, ...] = (),
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """`data * scale * tensor_scale` on plain arrays: what the references of quantized GEMMs begin with.

    Args:
      data: [*S], of 8 or 4 bits.
      scale: [ceil(S / block)], or, where `block` is (), of leading dimensions of `data` ([] for one tensor).
      tensor_scale: float32 of leading dimensions, or None.
      block: elements of each dimension that share a scale.
      dtype: of the result.

    Returns:
      [*S], the product in float32, from left to right, rounded to `dtype`; subnormal products are zeros.
    """
    values = data.astype(jnp.float32)
    scale = numerics.scale_values(scale)
    scale = repeat_blocks(scale, data.shape, block) if block else expand_trailing(scale, data.ndim)
    values = numerics.multiply(values, scale)
    if tensor_scale is not None:
        values = numerics.multiply(values, expand_trailing(tensor_scale, data.ndim))
    out: jax.Array = values.astype(dtype)
    return out


def quantized_array(
    x: jax.Array,
    format: TensorFormat,
    block: tuple[int, ...],
    multiplier: jax.Array | None,
    bits: jax.Array | None,
    *,
    amax: Callable[[jax.Array], jax.Array],
    of_elements: Callable[[jax.Array], jax.Array],
    of_blocks: Callable[[jax.Array], jax.Array],
) -> tuple[QuantizedArray, jax.Array | None]:
    """(QuantizedArray, the amax by a given multiplier, else None).

    Args:
      multiplier: of each tensor or group, or None.
      bits: uint32 for each element of a stochastic format.
      amax: from the magnitudes of elements to those of tensors or groups.
      of_elements, of_blocks: values of tensors or groups, to be broadcast over elements or blocks.
    """
    dtype, tensor_scale, found = x.dtype.name, None, None
    if format.hadamard:
        x = rotate(x, block.index(16))
    magnitudes = numerics.magnitude(x)
    if block:
        g = None
        if format.scale == "float8_e4m3fn":
            g, tensor_scale = tensor_scales(amax(magnitudes), format)
            g = of_blocks(g)
        multiplier, scale = block_scales(block_amax(magnitudes, block), format, x.dtype, g)
        factor = repeat_blocks(multiplier, x.shape, block)
    else:
        if multiplier is None:
            multiplier, scale = tensor_scales(amax(magnitudes), format)
        else:
            scale, found = reciprocal(multiplier), numerics.from_magnitude(amax(magnitudes))
        factor = of_elements(multiplier)
    data = to_data(numerics.widen(x), factor, format, bits)
    return QuantizedArray(data, scale, tensor_scale, None, block, format, dtype), found


def _quantize_reference(
    x: jax.Array,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    *,
    format: TensorFormat,
    block: tuple[int, ...],
    batch_dims: int,
    amax_axes: tuple[str, ...] = (),
    origin: tuple[tuple[str, ...], ...] = (),
) -> tuple[QuantizedArray, jax.Array | None]:
    """(QuantizedArray, the amax by a given multiplier, else None)."""

    def amax(magnitudes: jax.Array) -> jax.Array:
        of_tensors = jnp.max(magnitudes, axis=tuple(range(batch_dims, x.ndim)), initial=0)
        return jax.lax.pmax(of_tensors, amax_axes) if amax_axes else of_tensors

    bits = None if key is None else random_bits(key, x.shape, origin)
    of_all = partial(expand_trailing, ndim=x.ndim)
    return quantized_array(
        x, format, block, multiplier, bits, amax=amax, of_elements=of_all, of_blocks=of_all
    )


def _results_like(
    x: jax.Array,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    *,
    format: TensorFormat,
    block: tuple[int, ...],
    batch_dims: int,
) -> tuple[QuantizedArray, jax.Array | None]:
    del key
    return quantized_like(x.shape, x.dtype, format, block, x.shape[:batch_dims]), multiplier


def _dequantize_reference(q: QuantizedArray, *, block: tuple[int, ...]) -> jax.Array:
    del block
    values = partial(dequantize_values, block=q.block, dtype=q.dtype)
    if q.group_sizes is None:
        out: jax.Array = values(q.data, q.scale, q.tensor_scale)
        return out
    groups_PC = row_groups(q.group_sizes, q.shape[1])
    scale = q.scale if q.block else of_rows(q.scale, groups_PC)
    tensor_scale = None if q.tensor_scale is None else of_rows(q.tensor_scale, groups_PC)
    return cleared(values(q.data, scale, tensor_scale), q.group_sizes)


def _dequantize_unsupported(q: QuantizedArray, *, block: tuple[int, ...]) -> str | None:
    """What keeps these types from the kernel, or None."""
    if not block or q.tensor_scale is not None:
        return f"the scales must be of blocks alone; block={block}, format={q.format}"
    eight = (jnp.float8_e4m3fn, jnp.float8_e5m2)
    if q.data.dtype not in eight or q.scale.dtype not in (jnp.float32, jnp.float8_e8m0fnu):
        return f"numbers must be e4m3 or e5m2, scales float32 or e8m0; they are {q.data.dtype}, {q.scale.dtype}"
    if q.dtype not in ("float32", "bfloat16", "float16"):
        return f"the result must be float32, bfloat16 or float16; it is {q.dtype}"
    return blocks_unsupported(q.data, block)


def _column_sums(x: jax.Array, *, feature_dims: int, out_dtype: DTypeLike) -> jax.Array:
    rows = tuple(range(x.ndim - feature_dims))
    return jnp.sum(numerics.widen(x), axis=rows).astype(out_dtype)


def check_blocks(
    name: str,
    shape: Sequence[int],
    block: Sequence[int],
    entries: Sequence[Entry],
    mesh_shape: Mapping[str, int],
) -> None:
    """Raises ValueError where a mesh axis would cut a block in two.

    Args:
      shape, entries: of the data, global, and of their spec.
      block: elements of each dimension that share a scale.
    """
    for dim, (b, entry) in enumerate(zip(block, entries, strict=True)):
        shards = axis_size(mesh_shape, entry)
        if shards > 1 and b > 1 and shape[dim] % (shards * b):
            raise ValueError(
                f"{name}: a shard must hold whole blocks; got shape={tuple(shape)}, dim={dim} of size {shape[dim]}, "
                f"block {b}, {shards} shards over axis {entry!r}; make the dimension a multiple of {shards * b}, or "
                "shard another one"
            )


def are_scales_of_groups(names: tuple[str, ...]) -> bool:
    """Whether a result has this term for scales of groups: they are of the amax of all shards, and no sums."""
    return names == ("p", "g")


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The layout of the first operand, for everything; its amax is that of all its shards."""

    name: str

    def __call__(self, query: Query) -> Plan:
        shape, options = query.shapes[0], query.options
        entries = list(zip(query.rule.operands[0], query.operand_specs[0], strict=True))
        kept = [None if name in query.whole else entry for name, entry in entries]
        for block in filter(None, options.get("blocks", (options.get("block"),))):
            # Rows may lack dimensions after the second that the operand has of which they are made.
            block = (*block[:2], *[1] * (len(shape) - len(block)), *block[2:])
            check_blocks(self.name, shape, block, kept, query.mesh_shape)
        # Where results are wanted otherwise, those are moved: they are fewer bytes, and no block is cut.
        query = dataclasses.replace(query, result_specs=None)
        plan = plan_by_rule(query, query.rule, query.whole, query.summed)
        if "format" not in options:
            return plan
        sums = zip(query.rule.results, plan.summed_axes, strict=True)
        summed_axes = tuple(() if are_scales_of_groups(names) else axes for names, axes in sums)
        spec = plan.operand_specs[0]
        used = {*spec_axes(spec), *(query.resource.all_axes() if query.resource else ())}
        gathered = (a for name, entry in entries if name in query.whole for a in entry_axes(entry))
        return dataclasses.replace(
            plan,
            summed_axes=summed_axes,
            options={
                "amax_axes": spec_axes(spec[options.get("batch_dims", 1) :]),
                "origin": tuple(map(entry_axes, spec)),
            },
            idle_axes=tuple(axis for axis in gathered if axis not in used),
        )


def quantize_unsupported(x: jax.Array, format: TensorFormat, block: tuple[int, ...]) -> str | None:
    """What keeps these numbers and this format from the kernels, or None."""
    if format.dtype == "float4_e2m1fn" or format.hadamard:
        return f"the kernels quantize to 8 bits, and rotate nothing; the format is {format}"
    return blocks_unsupported(x, block)


def blocks_unsupported(x: jax.Array, block: tuple[int, ...]) -> str | None:
    """What keeps numbers in these blocks from kernels that convert to or from 8 bits, or None."""
    if reason := eight_bits_unsupported():
        return reason
    along = [dim for dim, b in enumerate(block) if b > 1]
    if any(b & (b - 1) or b > 128 for b in block) or len(along) == 2 and along[1] < x.ndim - 1:
        return f"blocks must be powers of two up to 128, square ones in the last dimension; they are {block}"
    return None if x.size else "there must be elements"


def _unsupported(
    x: jax.Array,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    *,
    format: TensorFormat,
    block: tuple[int, ...],
    **options: Any,
) -> str | None:
    del multiplier, key, options
    return quantize_unsupported(x, format, block)


def _square_reference(
    x: jax.Array, *, dgrad: bool, **options: Any
) -> tuple[QuantizedArray, QuantizedArray | None]:
    """(QuantizedArray, the same if `dgrad`)."""
    q, _ = _quantize_reference(x, None, None, **options)
    return q, q if dgrad else None


def _squares_like(
    x: jax.Array, *, dgrad: bool, **options: Any
) -> tuple[QuantizedArray, QuantizedArray | None]:
    q, _ = _results_like(x, None, None, **options)
    return q, q if dgrad else None


def _square_unsupported(
    x: jax.Array, *, format: TensorFormat, block: tuple[int, ...], **options: Any
) -> str | None:
    del options
    return quantize_unsupported(x, format, block)


_quantize_op = Op(
    "quantize",
    _quantize_reference,
    "batch_dims... ..., batch_dims..., key -> batch_dims... ..., batch_dims...",
    whole=("key",),
    roles=". rows, ., . -> . rows, .",
    plan=BlockPlan("quantize"),
    kernels=(Kernel.triton("expertmesh.core.kernels.triton.quantize", "quantize", _unsupported),),
    results_like=_results_like,
)
_quantize_weights_op = dataclasses.replace(
    _quantize_op, roles="experts fsdp, experts, . -> experts fsdp, experts"
)
_quantize_square_op = Op(
    "quantize_square",
    _square_reference,
    "batch_dims... ... -> batch_dims... ..., batch_dims... ...",
    roles="experts fsdp -> experts fsdp, experts fsdp",
    plan=BlockPlan("quantize"),
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.quantize_square", "quantize_square", _square_unsupported
        ),
    ),
    results_like=_squares_like,
)
_dequantize_op = Op(
    "dequantize",
    _dequantize_reference,
    "... -> ...",
    roles="rows -> rows",
    plan=BlockPlan("dequantize"),
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.triton.quantize", "dequantize_array", _dequantize_unsupported
        ),
    ),
)
_dequantize_weights_op = dataclasses.replace(
    _dequantize_op, sharding="e ... -> e ...", roles="experts fsdp -> experts fsdp"
)
_dequantize_groups_op = dataclasses.replace(
    _dequantize_op,
    sharding="p n ... -> p n ...",
    whole=("n", "g"),
    roles="tokens sequence . -> tokens sequence .",
)
_dbias_op = Op(
    "dbias",
    _column_sums,
    "... feature_dims... -> feature_dims...",
    summed=("...",),
)


def quantize(
    x: jax.Array,
    format: TensorFormat,
    *,
    axis: int = -1,
    across: int | None = None,
    batch_dims: int = 0,
    multiplier: jax.Array | None = None,
    key: jax.Array | None = None,
    spec: PartitionSpec | None = None,
) -> QuantizedArray:
    """Quantizes the operand of a GEMM, by the module's formulas.

    Args:
      x: float32, bfloat16 or float16 [*S].
      format: from a recipe: `recipe.formats().x`, `.weight`, ...
      axis: the dimension that the GEMM contracts (of several, the last): `format.block[1]` elements along it share a
        scale.
      across: the dimension along which `format.block[0]` elements share it; needed where that is not 1.
      batch_dims: leading dimensions with tensor scales of their own: 1 for the weights [E, K, *N] of experts.
      multiplier: float32[*S[:batch_dims]], in place of max / amax; only without blocks. Not checked: data that are too
        large for it saturate.
      key: for stochastic formats, else unused: uint32[2], or a key of `jax.random.key` (threefry).
      spec: where `x` is, for Auto axes under a MeshResource; None: tokens over (dp, fsdp, ep), or, with batch_dims,
        weights over (ep, fsdp).

    Returns:
      A QuantizedArray whose data have the shape and orientation of `x`.

    Raises:
      ValueError: `axis`, `across` or `batch_dims` do not fit the shape or the format; a dimension that is not a
        multiple of the block (of 128: only where it is sharded; else the last block may be partial); a block that would
        lie on two shards; no key for a stochastic format; a multiplier for a format with blocks or of another shape.
      TypeError: `x` is not one of these dtypes, `format` no TensorFormat, or `key` of another kind.
      NotImplementedError: differentiated; the layers `dense` and `grouped_dense` define gradients.

    Random numbers depend on the key and the position in the global array, so layouts change no value. Inside your own
    `shard_map` the shard is the array: fold the axis' index into the key. Each shard is quantized where it is. The amax
    of a tensor is maximised over the axes that shard `x`: an all-reduce of one number per tensor. Blocks need no
    communication.
    """
    quantized, _ = _quantize("quantize", x, format, axis, across, batch_dims, multiplier, key, spec)
    return quantized


def quantize_with_amax(
    x: jax.Array,
    format: TensorFormat,
    multiplier: jax.Array,
    *,
    spec: PartitionSpec | None = None,
) -> tuple[QuantizedArray, jax.Array]:
    """(`quantize` by a given multiplier, the amax of x), float32[*S[:batch_dims]] both."""
    batch_dims = multiplier.ndim
    return _quantize("quantize_delayed", x, format, -1, None, batch_dims, multiplier, None, spec)


def quantize_square(
    x: jax.Array,
    format: TensorFormat,
    *,
    axis: int,
    across: int,
    batch_dims: int = 0,
    dgrad: bool,
    spec: PartitionSpec | None = None,
) -> tuple[QuantizedArray, QuantizedArray | None]:
    """`quantize` of a weight in square blocks, or with a scale per matrix, for the forward and, if `dgrad`, the input
    gradient.

    Args:
      x, format, axis, across, batch_dims, spec: of `quantize`.
      dgrad: whether there is an input gradient.

    Returns:
      Two equal arrays. Where the two GEMMs read memory in different orders one kernel writes both, of one read (beside
      that for the amax of a matrix); elsewhere they are one.
    """
    check_source("quantize", x, format)
    out: tuple[QuantizedArray, QuantizedArray | None] = _quantize_square_op(
        not_differentiable(x, "quantize: use dense or grouped_dense"),
        operand_specs=(spec,),
        format=format,
        block=block_shape("quantize", x.shape, format, axis, across, batch_dims),
        batch_dims=batch_dims,
        dgrad=dgrad,
    )
    return out


def _quantize(
    name: str,
    x: jax.Array,
    format: TensorFormat,
    axis: int,
    across: int | None,
    batch_dims: int,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    spec: PartitionSpec | None,
) -> tuple[QuantizedArray, jax.Array]:
    check_source(name, x, format)
    block = block_shape(name, x.shape, format, axis, across, batch_dims)
    if multiplier is not None:
        check_multiplier(name, multiplier, x.shape[:batch_dims], block)
        multiplier = jnp.asarray(multiplier, jnp.float32)
    op = _quantize_weights_op if batch_dims else _quantize_op
    out: tuple[QuantizedArray, jax.Array] = op(
        not_differentiable(x, f"{name}: use dense or grouped_dense"),
        multiplier,
        key_words(name, key) if format.stochastic else None,
        operand_specs=(
            spec,
            None if spec is None else PartitionSpec(*tuple(spec)[:batch_dims]),
            None,
        ),
        format=format,
        block=block,
        batch_dims=batch_dims,
    )
    return out


def dequantize(q: QuantizedArray, *, spec: PartitionSpec | None = None) -> jax.Array:
    """`data * scale * tensor_scale`, each scale repeated over the elements that share it.

    Args:
      q: from `quantize` or `grouped_quantize`; padding rows become zeros.
      spec: where the data are, for Auto axes under a MeshResource; None: weights over (ep, fsdp) where tensor scales
        are of leading dimensions, or blocks are two-dimensional behind one; else tokens over (dp, fsdp, ep).

    Returns:
      [*S] in `q.dtype`, multiplied in float32 and rounded once. NaN where the data or the scale are NaN. For a rotated
      format these are the rotated numbers: a GEMM of two rotated operands needs no rotation back.

    Raises:
      ValueError: a block that would lie on two shards; scales whose shape does not fit.
      NotImplementedError: differentiated.

    No communication: the scales follow the layout of the data.
    """
    check_quantized("dequantize", q)
    data = not_differentiable(q.data, "dequantize: use dense or grouped_dense")
    op = _dequantize_weights_op if _is_of_weights(q) else _dequantize_op
    op = op if q.group_sizes is None else _dequantize_groups_op
    out: jax.Array = op(dataclasses.replace(q, data=data), operand_specs=(spec,), block=q.block)
    return out


def plain(x: Any, *, spec: PartitionSpec | None = None) -> jax.Array:
    """What an operand stands for: a QuantizedArray's numbers, by `dequantize`; any other is itself."""
    out: jax.Array = dequantize(x, spec=spec) if isinstance(x, QuantizedArray) else x
    return out


def _is_of_weights(q: QuantizedArray) -> bool:
    """Whether tensor scales are of leading dimensions; where there are none, what the block lets one know of it."""
    if q.tensor_scale is not None:
        return q.tensor_scale.ndim > 0
    if not q.block:
        return q.scale.ndim > 0
    return q.block[0] == 1 and sum(b > 1 for b in q.block) > 1


def quantize_dbias(
    x: jax.Array,
    format: TensorFormat,
    *,
    feature_dims: int = 1,
    dbias_dtype: DTypeLike | None = None,
    spec: PartitionSpec | None = None,
    **options: Any,
) -> tuple[QuantizedArray, jax.Array]:
    """(`quantize(x, format, **options)`, the sum of x over all but its last dimensions).

    Args:
      x: as of `quantize`: the cotangent of a layer's output.
      feature_dims: how many dimensions the bias has.
      dbias_dtype: None: that of `x`.
      spec, options: of `quantize`.

    Returns:
      (QuantizedArray, dbias [*S[-feature_dims:]]). dbias sums the numbers before they are quantized, in float32, and is
      rounded once.

    Raises:
      As `quantize`; ValueError: more feature dimensions than `x` has.

    Besides the communication of `quantize`, dbias is summed over the axes that shard the other dimensions.
    """
    check_source("quantize_dbias", x, format)
    if not 0 <= feature_dims <= x.ndim:
        raise ValueError(
            f"quantize_dbias: feature_dims must be 0 .. {x.ndim}, the rank of x; got feature_dims={feature_dims}, "
            f"x {x.shape}; count the dimensions of the bias"
        )
    q = quantize(x, format, spec=spec, **options)
    x = not_differentiable(x, "quantize_dbias: use dense or grouped_dense")
    dtype = check_out_dtype("quantize_dbias", dbias_dtype or x.dtype, "dbias_dtype")
    return q, _dbias_op(x, operand_specs=(spec,), feature_dims=feature_dims, out_dtype=dtype)


def check_source(name: str, x: Any, format: Any, *, quantized: bool = False) -> None:
    """Raises an error that names `name` unless x has a dtype that is quantized, and is not quantized or may be."""
    check_arrays(name, FLOATS, quantized=quantized, x=x)
    if not isinstance(format, TensorFormat):
        raise TypeError(
            f"{name}: format must be a TensorFormat; got {format!r}; take it from recipe.formats()"
        )
    if jnp.dtype(x.dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{name}: x must be float32, bfloat16 or float16; got dtype {x.dtype}; cast it"
        )


def block_shape(
    name: str,
    shape: Sequence[int],
    format: TensorFormat,
    axis: int,
    across: int | None,
    batch_dims: int,
) -> tuple[int, ...]:
    """The elements of each dimension that share a scale; () for a format without blocks."""
    for rule, remedy in _broken_rules(shape, format, axis, across, batch_dims):
        raise ValueError(
            f"{name}: {rule}; got x {tuple(shape)}, axis={axis}, across={across}, batch_dims={batch_dims}, "
            f"block={format.block}; {remedy}"
        )
    return () if format.block is None else _block(len(shape), format.block, axis, across)


def _block(ndim: int, block: tuple[int, int], axis: int, across: int | None) -> tuple[int, ...]:
    of_dims = [1] * ndim
    of_dims[axis] = block[1]
    if across is not None and block[0] > 1:
        of_dims[across] = block[0]
    return tuple(of_dims)


def _broken_rules(
    shape: Sequence[int], format: TensorFormat, axis: int, across: int | None, batch_dims: int
) -> Iterator[tuple[str, str]]:
    """What operands of `block_shape` must be and are not, and what to do; ask for no more after one of them."""
    ndim, block = len(shape), format.block
    if not 0 <= batch_dims <= ndim:
        yield "batch_dims must be at most the rank of x", "pass 0 for one tensor"
    if block is None:
        return
    if not -ndim <= axis < ndim:
        yield "axis must be a dimension of x", "pass that of the contraction"
    apart = across is not None and -ndim <= across < ndim and across % ndim != axis % ndim
    if block[0] > 1 and not apart:
        rule = "a format with blocks of several rows needs another dimension in across"
        yield rule, "pass the last dimension that the GEMM does not contract"
    sizes = _block(ndim, block, axis, across)
    if any(b > 1 for b in sizes[:batch_dims]):
        rule = "blocks must not lie along batch dimensions"
        yield rule, "pass fewer batch_dims or another axis"
    if format.scale not in ("float32", "power_of_2"):
        for dim in (dim for dim, b in enumerate(sizes) if shape[dim] % b != 0):
            rule = f"dimension {dim} of size {shape[dim]} must be a multiple of the block, {sizes[dim]}"
            yield rule, "pad it"


def check_multiplier(
    name: str, multiplier: jax.Array, shape: Sequence[int], block: tuple[int, ...]
) -> None:
    if block:
        raise ValueError(
            f"{name}: a multiplier must be left out for formats with blocks; got block={block}; "
            "blocks have their own amax"
        )
    if jnp.shape(multiplier) != tuple(shape):
        raise ValueError(
            f"{name}: the multiplier must have the shape of the batch dimensions, {tuple(shape)}; "
            f"got {jnp.shape(multiplier)}; make the state with init_delayed(recipe, {tuple(shape)})"
        )


def key_words(name: str, key: jax.Array | None) -> jax.Array:
    """The uint32[2] of a key."""
    if key is None:
        raise ValueError(
            f"{name}: a stochastic format needs a key; got key=None; pass jax.random.key(seed), or turn stochastic "
            "rounding off in the recipe"
        )
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if key.shape != (2,) or key.dtype != jnp.uint32:
        raise TypeError(
            f"{name}: key must be a threefry key or its uint32[2]; got {key.dtype}{key.shape}; "
            "pass jax.random.key(seed)"
        )
    return key
