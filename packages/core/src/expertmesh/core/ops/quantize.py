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

(g is 1 where the tensor's amax is 0, Inf or NaN.) Numbers saturate: Inf becomes max. NaN stays NaN in 8 bits, where a
block with a scale of NaN is NaN in whole; 4 bits have no NaN: there the data of such a block is 0, or the NaN in a
tensor without a scale for it would be lost. All of it in float32, rounded to nearest, ties to even, but for stochastic
formats, and bit for bit the same on every platform.
"""

import dataclasses
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core import _jax, numerics
from expertmesh.core.op import Kernel, Op, Plan, Query
from expertmesh.core.operands import FLOATS, check_arrays, check_out_dtype
from expertmesh.core.quantized import QuantizedArray, check_quantized
from expertmesh.core.recipe import TensorFormat
from expertmesh.core.rule import Names, plan_by_rule
from expertmesh.core.scales import block_amax, block_scales, reciprocal, spread, tensor_scales
from expertmesh.core.specs import axis_size, entry_axes, pad_spec, spec_axes
from expertmesh.core.vjp import not_differentiable

__all__ = ["dequantize", "dequantize_values", "quantize", "quantize_dbias"]

# Bit i: whether row i of the rotation is negative (+ + + - + - - - - - - + - + - -).
_NEGATIVE_ROWS = 0b1101011111101000


def lead(values, ndim: int):
    """Values of the leading dimensions, to be broadcast over the others."""
    return values.reshape(values.shape + (1,) * (ndim - values.ndim))


def rotate(x, axis: int):
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


def random_bits(key, shape: tuple[int, ...], origin: tuple[tuple[str, ...], ...] = ()):
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
    return threefry_2x32(key, count)[: prod(shape)].reshape(shape)


def to_data(x, multiplier, format: TensorFormat, bits=None):
    """float32 x times the multiplier, saturated, rounded, in the format's dtype."""
    scaled = numerics.saturate(numerics.multiply(x, multiplier), format.dtype)
    if format.stochastic:
        return numerics.cast(numerics.round_randomly(scaled, format.dtype, bits), format.dtype)
    return numerics.cast(numerics.round_nearest(scaled, format.dtype), format.dtype)


def dequantize_values(data, scale, tensor_scale=None, *, block=(), dtype=jnp.float32):
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
    scale = spread(scale, data.shape, block) if block else lead(scale, data.ndim)
    values = numerics.multiply(values, scale)
    if tensor_scale is not None:
        values = numerics.multiply(values, lead(tensor_scale, data.ndim))
    return values.astype(dtype)


def _quantize_reference(
    x, *rest, format, block, batch_dims, has_multiplier, amax_axes=(), origin=()
):
    """(data, scale), (data, scale, tensor_scale), or with a given multiplier (data, scale, amax)."""
    multiplier = rest[0] if has_multiplier else None
    bits = random_bits(rest[-1], x.shape, origin) if format.stochastic else None
    if format.hadamard:
        x = rotate(x, block.index(16))
    magnitudes = numerics.magnitude(x)
    wide = numerics.widen(x)

    def tensor_amax():
        amax = jnp.max(magnitudes, axis=tuple(range(batch_dims, x.ndim)), initial=0)
        return jax.lax.pmax(amax, amax_axes) if amax_axes else amax

    if has_multiplier:
        data = to_data(wide, lead(multiplier, x.ndim), format, bits)
        return data, reciprocal(multiplier), numerics.from_magnitude(tensor_amax())
    if not block:
        multiplier, scale = tensor_scales(tensor_amax(), format)
        return to_data(wide, lead(multiplier, x.ndim), format, bits), scale
    two_level = format.scale == "float8_e4m3fn"
    g, tensor_scale = tensor_scales(tensor_amax(), format) if two_level else (None, None)
    multiplier, scale = block_scales(
        block_amax(magnitudes, block), format, x.dtype, None if g is None else lead(g, x.ndim)
    )
    data = to_data(wide, spread(multiplier, x.shape, block), format, bits)
    return (data, scale, tensor_scale) if two_level else (data, scale)


def row_groups(group_sizes_PG, num_rows: int):
    """int32[P, C] group of each row; G after the last group."""
    rows_C = jnp.arange(num_rows, dtype=jnp.int32)
    return jax.vmap(lambda ends_G: jnp.searchsorted(ends_G, rows_C, side="right"))(
        jnp.cumsum(group_sizes_PG, axis=1, dtype=jnp.int32)
    )


def of_rows(values_PG, groups_PC, fill=0):
    """[P, C] the value of each row's group; `fill` after the last group."""
    return jax.vmap(partial(jnp.take, axis=0, mode="fill", fill_value=fill))(values_PG, groups_PC)


def _dequantize_reference(data, scale, *rest, block, dtype, two_level):
    tensor_scale = rest[0] if two_level else None
    if len(rest) == two_level:
        return dequantize_values(data, scale, tensor_scale, block=block, dtype=dtype)
    groups_PC = row_groups(rest[-1], data.shape[1])
    if two_level:
        tensor_scale = of_rows(tensor_scale, groups_PC)
    else:
        scale = scale if block else of_rows(scale, groups_PC)
    values = dequantize_values(data, scale, tensor_scale, block=block, dtype=dtype)
    live_PC = groups_PC < rest[-1].shape[1]
    return jnp.where(lead(live_PC, data.ndim), values, jnp.zeros((), dtype))


def _why_not_dequantize(data, scale, *rest, block, dtype, **options) -> str | None:
    """What keeps these types from the kernel, or None."""
    del rest
    if not block or options["two_level"]:
        return f"the scales must be of blocks alone; block={block}, {options}"
    eight = (jnp.float8_e4m3fn, jnp.float8_e5m2)
    if data.dtype not in eight or scale.dtype not in (jnp.float32, jnp.float8_e8m0fnu):
        return f"numbers must be e4m3 or e5m2, scales float32 or e8m0; they are {data.dtype}, {scale.dtype}"
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the result must be float32, bfloat16 or float16; it is {dtype}"
    return why_no_blocks(data, block)


def _column_sums(x, *, feature_dims, out_dtype):
    rows = tuple(range(x.ndim - feature_dims))
    return jnp.sum(numerics.widen(x), axis=rows).astype(out_dtype)


def check_blocks(name: str, shape, block, spec, mesh_shape) -> None:
    """Raises ValueError where a mesh axis would cut a block in two.

    Args:
      shape, spec: of the data, global.
      block: elements of each dimension that share a scale; () for none.
    """
    for dim, b in enumerate(block):
        entry = pad_spec(spec, len(shape))[dim]
        shards = axis_size(mesh_shape, entry)
        if shards > 1 and b > 1 and shape[dim] % (shards * b):
            raise ValueError(
                f"{name}: a shard must hold whole blocks; got shape={tuple(shape)}, dim={dim} of size {shape[dim]}, "
                f"block {b}, {shards} shards over axis {entry!r}; make the dimension a multiple of {shards * b}, or "
                "shard another one"
            )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The layout of the first operand, for everything; its amax is that of all its shards."""

    name: str
    batch_dims: int = 0
    finds_amax: bool = False

    def __call__(self, query: Query) -> Plan:
        block = query.options["block"]
        check_blocks(self.name, query.shapes[0], block, query.operand_specs[0], query.mesh_shape)
        # Where results are wanted otherwise, those are moved: they are fewer bytes, and no block is cut.
        query = dataclasses.replace(query, result_specs=None)
        plan = plan_by_rule(query, query.rule, query.whole, query.summed)
        if not self.finds_amax:
            return plan
        spec = plan.operand_specs[0]
        local = {
            "amax_axes": spec_axes(spec[self.batch_dims :]),
            "origin": tuple(map(entry_axes, spec)),
        }
        return dataclasses.replace(plan, options=local)


def rule_of(*terms: Names | None) -> str:
    """Of the operands, None, the results."""
    text = " , ".join("->" if term is None else " ".join(term) or "()" for term in terms)
    return text.replace(" , -> , ", " -> ")


def data_roles(ndim: int, batch_dims: int) -> Names:
    """Of tokens, or of weights where there is a batch of them, for Auto axes under a MeshResource."""
    roles = ("experts", "fsdp") if batch_dims else ("tokens", "sequence" if ndim > 2 else ".")
    return (*roles, *["."] * ndim)[:ndim]


def why_no_kernel(x, format: TensorFormat, block: tuple[int, ...]) -> str | None:
    """What keeps these numbers and this format from the kernels, or None."""
    if format.dtype == "float4_e2m1fn" or format.hadamard:
        return f"the kernels quantize to 8 bits, and rotate nothing; the format is {format}"
    return why_no_blocks(x, block)


def why_no_blocks(x, block: tuple[int, ...]) -> str | None:
    """What keeps numbers in these blocks from kernels that convert to or from 8 bits, or None."""
    capability = _jax.compute_capability()
    if capability is not None and capability < 8.9:
        return f"GPUs convert to 8 bits from compute capability 8.9 on; this one has {capability}"
    along = [dim for dim, b in enumerate(block) if b > 1]
    if any(b & (b - 1) or b > 128 for b in block) or len(along) == 2 and along[1] < x.ndim - 1:
        return f"blocks must be powers of two up to 128, square ones in the last dimension; they are {block}"
    return None if x.size else "there must be elements"


def _why_not(x, *rest, format, block, **options) -> str | None:
    del rest, options
    return why_no_kernel(x, format, block)


def _quantize_op(ndim: int, batch_dims: int, two_level: bool, blocks: bool, given: bool, key: bool):
    """The op for these operands: x, the multiplier if it is given, the key if there is one."""

    def terms(dims: Names, word: str) -> tuple[Names | None, ...]:
        lead = dims[:batch_dims]
        third = (lead,) if given or two_level else ()
        scale = dims if blocks else lead
        return (dims, *[lead] * given, *[(word,)] * key, None, dims, scale, *third)

    return Op(
        "quantize",
        _quantize_reference,
        rule_of(*terms(tuple(f"d{i}" for i in range(ndim)), "key")),
        whole=("key",),
        roles=rule_of(*terms(data_roles(ndim, batch_dims), ".")),
        plan=_Plan("quantize", batch_dims, finds_amax=True),
        kernels=(Kernel.triton("expertmesh.core.kernels.triton.quantize", "quantize", _why_not),),
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
    """The formulas at the top of this module, for the operand of a GEMM.

    Args:
      x: float32, bfloat16 or float16 [*S].
      format: from a recipe: `recipe.formats().x`, `.kernel`, ...
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

    Random numbers depend on the key and the position in the global array, so layouts change no value; inside your own
    `shard_map` the shard is the array: fold the axis' index into the key. Each shard is quantized where it is. Tensor
    amaxes are maximised over the axes that shard `x` (all-reduces of one number per tensor); blocks need no
    communication.
    """
    quantized, _ = _quantize("quantize", x, format, axis, across, batch_dims, multiplier, key, spec)
    return quantized


def quantize_with_amax(x, format: TensorFormat, multiplier, *, batch_dims=0, spec=None):
    """(`quantize` by a given multiplier, the amax of x), float32[*S[:batch_dims]] both."""
    return _quantize("quantize_delayed", x, format, -1, None, batch_dims, multiplier, None, spec)


def _quantize(name, x, format, axis, across, batch_dims, multiplier, key, spec):
    check_source(name, x, format)
    block = block_shape(name, x.shape, format, axis, across, batch_dims)
    operands, specs = [not_differentiable(x, f"{name}: use dense or grouped_dense")], [spec]
    if multiplier is not None:
        check_multiplier(name, multiplier, x.shape[:batch_dims], block)
        operands.append(jnp.asarray(multiplier, jnp.float32))
        specs.append(None if spec is None else PartitionSpec(*tuple(spec)[:batch_dims]))
    if format.stochastic:
        operands.append(key_words(name, key))
        specs.append(None)
    two_level = format.scale == "float8_e4m3fn"
    op = _quantize_op(
        x.ndim, batch_dims, two_level, bool(block), multiplier is not None, format.stochastic
    )
    data, scale, *third = op(
        *operands,
        operand_specs=tuple(specs),
        format=format,
        block=block,
        batch_dims=batch_dims,
        has_multiplier=multiplier is not None,
    )
    third = third[0] if third else None
    tensor_scale, amax = (third, None) if two_level else (None, third)
    return QuantizedArray(data, scale, tensor_scale, None, block, format, x.dtype.name), amax


def dequantize(q: QuantizedArray, *, spec: PartitionSpec | None = None) -> jax.Array:
    """`data * scale * tensor_scale`, each scale repeated over the elements that share it.

    Args:
      q: from `quantize` or `grouped_quantize`; rows after the last group are zeros.
      spec: where the data are, for Auto axes under a MeshResource; None: weights over (ep, fsdp) where tensor scales
        are of leading dimensions, or blocks are two-dimensional behind one; else tokens over (dp, fsdp, ep).

    Returns:
      [*S] in `q.dtype`; multiplied in float32 and rounded once. NaN where the data or the scale are. Of a rotated
      format the rotated numbers: a product of two rotated operands needs no rotation back.

    Raises:
      ValueError: a block that would lie on two shards; scales whose shape does not fit.
      NotImplementedError: differentiated.

    No communication: the scales follow the layout of the data.
    """
    check_quantized("dequantize", q)
    two_level, grouped = q.tensor_scale is not None, q.group_sizes is not None
    scales = [q.scale] if q.tensor_scale is None else [q.scale, q.tensor_scale]
    op = _dequantize_op(q.ndim, _leading_dims(q), bool(q.block), two_level, grouped)
    operands = (q.data, *scales, *([q.group_sizes] if grouped else []))
    q_data = not_differentiable(q.data, "dequantize: use dense or grouped_dense")
    return op(
        q_data,
        *operands[1:],
        operand_specs=(spec, *[_scale_spec(spec, x, q) for x in operands[1:]]),
        block=q.block,
        dtype=jnp.dtype(q.dtype),
        two_level=two_level,
    )


def _leading_dims(q: QuantizedArray) -> int:
    """The dimensions with tensor scales of their own; where there are none, what the block lets one know of them."""
    if q.tensor_scale is not None:
        return q.tensor_scale.ndim
    if not q.block:
        return q.scale.ndim
    return int(q.block[0] == 1 and sum(b > 1 for b in q.block) > 1)  # only weights have such blocks


def _scale_spec(spec, scale, q: QuantizedArray):
    """Where scales, or group sizes, are whose data are at `spec`."""
    if spec is None:
        return None
    if q.block and scale is q.scale:
        return spec
    lead = scale.ndim if q.group_sizes is None else 1
    return PartitionSpec(*tuple(spec)[:lead])


def _dequantize_op(ndim: int, lead_dims: int, blocks: bool, two_level: bool, grouped: bool) -> Op:
    def terms(dims: Names, group: str):
        lead = (dims[0], group) if grouped else dims[:lead_dims]
        scale = dims if blocks else lead
        return (dims, scale, *[lead] * two_level, *[lead] * grouped, None, dims)

    return Op(
        "dequantize",
        _dequantize_reference,
        rule_of(*terms(tuple(f"d{i}" for i in range(ndim)), "g")),
        whole=("d1", "g") if grouped else (),
        roles=rule_of(*terms(data_roles(ndim, lead_dims * (not grouped)), ".")),
        plan=_Plan("dequantize"),
        kernels=(
            Kernel.triton(
                "expertmesh.core.kernels.triton.quantize", "dequantize", _why_not_dequantize
            ),
        ),
    )


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
      (QuantizedArray, dbias [*S[-feature_dims:]]), the sum of the numbers before they are quantized, in float32 and
      rounded once.

    Raises:
      As `quantize`; ValueError: more feature dimensions than `x` has.

    Besides the communication of `quantize`, sums cross the axes that shard the other dimensions, and no others.
    """
    check_source("quantize_dbias", x, format)
    if not 0 <= feature_dims <= x.ndim:
        raise ValueError(
            f"quantize_dbias: feature_dims must be 0 .. {x.ndim}, the rank of x; got feature_dims={feature_dims}, "
            f"x {x.shape}; count the dimensions of the bias"
        )
    q = quantize(x, format, spec=spec, **options)
    rows, features = x.ndim - feature_dims, feature_dims
    names = tuple(f"t{i}" for i in range(rows)), tuple(f"n{i}" for i in range(features))
    roles = data_roles(x.ndim, options.get("batch_dims", 0))
    op = Op(
        "dbias",
        _column_sums,
        rule_of((*names[0], *names[1]), None, names[1]),
        summed=names[0],
        roles=rule_of(roles, None, roles[rows:]),
    )
    x = not_differentiable(x, "quantize_dbias: use dense or grouped_dense")
    dtype = check_out_dtype("quantize_dbias", dbias_dtype or x.dtype, "dbias_dtype")
    return q, op(x, operand_specs=(spec,), feature_dims=features, out_dtype=dtype)


def check_source(name: str, x, format) -> None:
    check_arrays(name, FLOATS, x=x)
    if not isinstance(format, TensorFormat):
        raise TypeError(
            f"{name}: format must be a TensorFormat; got {format!r}; take it from recipe.formats()"
        )
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{name}: x must be float32, bfloat16 or float16; got dtype {x.dtype}; cast it"
        )


def block_shape(name: str, shape, format: TensorFormat, axis, across, batch_dims) -> tuple:
    """The elements of each dimension that share a scale; () for a format without blocks."""
    ndim = len(shape)

    def require(ok, rule, remedy):
        if not ok:
            raise ValueError(
                f"{name}: {rule}; got x {tuple(shape)}, axis={axis}, across={across}, batch_dims={batch_dims}, "
                f"block={format.block}; {remedy}"
            )

    require(
        0 <= batch_dims <= ndim, "batch_dims must be at most the rank of x", "pass 0 for one tensor"
    )
    if format.block is None:
        return ()
    require(-ndim <= axis < ndim, "axis must be a dimension of x", "pass that of the contraction")
    block = [1] * ndim
    block[axis] = format.block[1]
    if format.block[0] > 1:
        require(
            across is not None and -ndim <= across < ndim and across % ndim != axis % ndim,
            "a format with blocks of several rows needs another dimension in across",
            "pass the last dimension that the GEMM does not contract",
        )
        block[across] = format.block[0]
    require(
        all(b == 1 for b in block[:batch_dims]),
        "blocks must not lie along batch dimensions",
        "pass fewer batch_dims or another axis",
    )
    partial = format.scale in ("float32", "power_of_2")
    for dim, b in enumerate(block):
        require(
            partial or shape[dim] % b == 0,
            f"dimension {dim} of size {shape[dim]} must be a multiple of the block, {b}",
            "pad it",
        )
    return tuple(block)


def check_multiplier(name, multiplier, shape, block) -> None:
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


def key_words(name: str, key):
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
