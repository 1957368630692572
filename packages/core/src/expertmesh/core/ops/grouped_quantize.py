"""Quantization of rows in groups: each group's numbers are those of `quantize` of its rows alone.

    scale[p, g] = amax(rows of group g of participant p) / max          formats without blocks
    blocks restart at row 0 of a participant                            formats with blocks

Rows are contiguous by group, as in `grouped_gemm`; rows after the last group are zeros and enter no amax. Dimension
key: P participants, C rows per participant, G groups per participant.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from expertmesh.core import numerics
from expertmesh.core.op import Kernel, Op, Plan, Query
from expertmesh.core.operands import INTEGERS, check_arrays
from expertmesh.core.ops.quantize import (
    block_shape,
    check_blocks,
    check_multiplier,
    check_source,
    key_words,
    lead,
    of_rows,
    random_bits,
    rotate,
    row_groups,
    rule_of,
    to_data,
    why_no_kernel,
)
from expertmesh.core.quantized import QuantizedArray
from expertmesh.core.recipe import TensorFormat, quantized_once
from expertmesh.core.rule import Names, plan_by_rule
from expertmesh.core.scales import block_amax, block_scales, reciprocal, spread, tensor_scales
from expertmesh.core.specs import entry_axes, spec_axes
from expertmesh.core.vjp import not_differentiable

__all__ = ["grouped_quantize"]


def _group_amax(magnitudes, groups_PC, num_groups: int, axes):
    """int32[P, G]; rows of the group `num_groups` enter none."""
    rows_PC = jnp.max(magnitudes, axis=tuple(range(2, magnitudes.ndim)), initial=0)
    amax_PG = jax.vmap(
        lambda rows, groups: jnp.zeros(num_groups, jnp.int32).at[groups].max(rows, mode="drop")
    )(rows_PC, groups_PC)
    return jax.lax.pmax(amax_PG, axes) if axes else amax_PG


def _reference(x, group_sizes, *rest, twice=False, **options):
    """What `_quantized` gives, and if `twice` the data again, which a kernel lays as the weight gradient reads them."""
    out = _quantized(x, group_sizes, *rest, **options)
    return (*out, out[0]) if twice else out


def _quantized(x, group_sizes, *rest, format, block, has_multiplier, amax_axes=(), origin=()):
    """(data, scale), (data, scale, tensor_scale), or with a given multiplier (data, scale, amax)."""
    num_groups = group_sizes.shape[1]
    groups_PC = row_groups(group_sizes, x.shape[1])
    live_PC = groups_PC < num_groups
    x = jnp.where(lead(live_PC, x.ndim), x, jnp.zeros((), x.dtype))
    multiplier = rest[0] if has_multiplier else None
    bits = random_bits(rest[-1], x.shape, origin) if format.stochastic else None
    if format.hadamard:
        x = rotate(x, block.index(16))
    magnitudes, wide = numerics.magnitude(x), numerics.widen(x)

    def by_group(multiplier_PG):
        rows = lead(of_rows(multiplier_PG, groups_PC), x.ndim)
        return to_data(wide, rows, format, bits)

    def amax():
        return _group_amax(magnitudes, groups_PC, num_groups, amax_axes)

    if has_multiplier:
        return by_group(multiplier), reciprocal(multiplier), numerics.from_magnitude(amax())
    if not block:
        multiplier, scale = tensor_scales(amax(), format)
        return by_group(multiplier), scale
    g, tensor_scale = None, None
    if format.scale == "float8_e4m3fn":
        g, tensor_scale = tensor_scales(amax(), format)
        # A group starts with a block, so a block's first row says whose it is.
        g = lead(of_rows(g, groups_PC[:, :: block[1]], fill=1), x.ndim)
    multiplier, scale = block_scales(block_amax(magnitudes, block), format, x.dtype, g)
    data = to_data(wide, spread(multiplier, x.shape, block), format, bits)
    return (data, scale) if tensor_scale is None else (data, scale, tensor_scale)


def both_reference(x, group_sizes, *, format, blocks, amax_axes=(), origin=()):
    """(data, scale, data, scale) in both `blocks`."""
    return tuple(
        part
        for block in blocks
        for part in _reference(x, group_sizes, format=format, block=block, has_multiplier=False)
    )


def plan_blocks(query: Query) -> Plan:
    """The layout of the rows, each participant's whole."""
    given = query.operand_specs[0]
    kept = PartitionSpec(given[0], None, *given[2:])
    for block in query.options.get("blocks") or (query.options["block"],):
        check_blocks("grouped_quantize", query.shapes[0], block, kept, query.mesh_shape)
    query = dataclasses.replace(query, result_specs=None)
    plan = plan_by_rule(query, query.rule, query.whole, query.summed)
    spec = plan.operand_specs[0]
    used = {*spec_axes(spec), *(query.resource.all_axes() if query.resource else ())}
    return dataclasses.replace(
        plan,
        options={
            "amax_axes": spec_axes(spec[1:]),
            "origin": tuple(map(entry_axes, spec)),
        },
        idle_axes=tuple(axis for axis in entry_axes(given[1]) if axis not in used),
    )


def _why_not(x, group_sizes, *rest, format: TensorFormat, block, **options) -> str | None:
    """What keeps these types from the kernels, or None."""
    del rest, options
    if x.shape[0] != 1 or group_sizes.shape[1] == 0:
        return f"a device must hold one participant with groups; it holds {group_sizes.shape}"
    if x.ndim < 3 or any(b > 1 for b in block[2:-1]):
        return f"blocks must lie along the rows or the last of other dimensions; they are {block}"
    return why_no_kernel(x, format, block)


def _why_not_both(x, group_sizes, *, format, blocks, **options) -> str | None:
    del options
    reasons = [_why_not(x, group_sizes, format=format, block=block) for block in blocks]
    return next(filter(None, reasons), None)


def _triton(function: str, supports) -> tuple[Kernel, ...]:
    return (Kernel.triton("expertmesh.core.kernels.triton.grouped_quantize", function, supports),)


def _op(ndim: int, two_level: bool, blocks: bool, given: bool, key: bool, twice: bool) -> Op:
    def terms(dims: Names, group: str, word: str):
        groups = (dims[0], group)
        third = (groups,) if given or two_level else ()
        again = (dims,) if twice else ()
        scale = dims if blocks else groups
        operands = dims, groups, *[groups] * given, *[(word,)] * key
        return (*operands, None, dims, scale, *third, *again)

    roles = ("participants", *["."] * (ndim - 1))
    return Op(
        "grouped_quantize",
        _reference,
        rule_of(*terms(tuple(f"d{i}" for i in range(ndim)), "g", "key")),
        whole=("d1", "g", "key"),
        roles=rule_of(*terms(roles, ".", ".")),
        plan=plan_blocks,
        kernels=_triton("grouped_quantize", _why_not),
    )


def _both_op(ndim: int) -> Op:
    def terms(dims: Names, group: str):
        return (dims, (dims[0], group), None, *[dims] * 4)

    return Op(
        "grouped_quantize_both",
        both_reference,
        rule_of(*terms(tuple(f"d{i}" for i in range(ndim)), "g")),
        whole=("d1", "g"),
        roles=rule_of(*terms(("participants", *["."] * (ndim - 1)), ".")),
        plan=plan_blocks,
        kernels=_triton("grouped_quantize_both", _why_not_both),
    )


def grouped_quantize(
    x: jax.Array,
    group_sizes: jax.Array,
    format: TensorFormat,
    *,
    axis: int = -1,
    multiplier: jax.Array | None = None,
    key: jax.Array | None = None,
    spec: PartitionSpec | None = None,
    debug: bool = False,
) -> QuantizedArray:
    """Quantizes the rows of each group for a grouped GEMM.

    Args:
      x: float32, bfloat16 or float16 [P, C, *K].
      group_sizes: int32[P, G], rows of each group, sum at most C.
      format: from a recipe; `format.block[0]` must be 1.
      axis: the dimension that the GEMM contracts: -1, or 1, the rows, for the weight's gradient. Then the first row of
        every group must be a multiple of `format.block[1]` (`alignment_of(recipe)`).
      multiplier: float32[P, G], in place of max / amax; only without blocks.
      key: for stochastic formats, else unused, as of `quantize`.
      spec: where `x` is, for Auto axes under a MeshResource; None: P over (dp, fsdp, ep).
      debug: under `jax.experimental.checkify.checkify`, group starts that are no multiples of the block are errors.

    Returns:
      A QuantizedArray; `scale` without blocks, or `tensor_scale`, is float32[P, G], and then `group_sizes` is kept.
      Rows after the last group have data 0, whatever `x` holds there. An empty group's scale is that of amax 0.

    Raises:
      As `quantize`; ValueError: `group_sizes` of another shape; TypeError: they are not integers.

    Under sharding P and the dimensions after the rows keep their axes; the amax of a group is maximised over those that
    do not shard P (one number per group). An axis that shards the rows is a RuntimeWarning: they are gathered over it.
    """
    of = x, group_sizes, format, axis, multiplier, key, spec, debug
    return _quantize("grouped_quantize", *of)[0]


def quantizes_both_at_once(last: TensorFormat, rows: TensorFormat) -> bool:
    """Whether copies in these formats are made of one read."""
    return last == rows and last.block is not None and last.dtype != "float4_e2m1fn"


def grouped_quantize_both(
    x, group_sizes, formats: tuple[TensorFormat, TensorFormat], *, keys=(None, None), spec=None
) -> tuple[QuantizedArray, QuantizedArray]:
    """(`grouped_quantize` by the first format along the last dimension, by the second along the rows).

    Where both are one 8-bit format, `x` is read once; without blocks both have the same data.

    Args:
      x, group_sizes, spec: as of `grouped_quantize`.
      keys: one for each format.
    """
    last, rows = formats
    if quantized_once(last, rows):
        of = x, group_sizes, last, x.ndim - 1, None, None, spec, False
        first, _, second = _quantize("grouped_quantize", *of, twice=True)
        return first, second
    if not quantizes_both_at_once(last, rows):
        along = zip(formats, (x.ndim - 1, 1), keys, strict=True)
        first, second = (
            grouped_quantize(x, group_sizes, format, axis=axis, key=key, spec=spec)
            for format, axis, key in along
        )
        return first, second
    name = "grouped_quantize"
    check_source(name, x, last)
    check_groups(name, x, group_sizes)
    blocks = tuple(block_shape(name, x.shape, last, axis, None, 1) for axis in (x.ndim - 1, 1))
    operands = not_differentiable(x, f"{name}: use grouped_dense"), group_sizes
    rows_spec = None if spec is None else PartitionSpec(*tuple(spec)[:1])
    out = _both_op(x.ndim)(*operands, operand_specs=(spec, rows_spec), format=last, blocks=blocks)
    first, second = (
        QuantizedArray(data, scale, None, None, block, last, x.dtype.name)
        for (data, scale), block in zip((out[:2], out[2:]), blocks, strict=True)
    )
    return first, second


def grouped_quantize_with_amax(
    x, group_sizes, format: TensorFormat, multiplier, *, spec=None, twice: bool = False
):
    """(`grouped_quantize` by a given multiplier; the amax of the groups, float32[P, G]; if `twice` the former as the
    weight's gradient reads it)."""
    of = x, group_sizes, format, -1, multiplier, None, spec, False
    return _quantize("quantize_delayed", *of, twice=twice)


def _quantize(
    name, x, group_sizes, format, axis, multiplier, key, spec, debug, twice: bool = False
):
    """(q; the amax by a given multiplier, else None; q again, if `twice` as the weight's gradient reads it)."""
    check_source(name, x, format)
    check_groups(name, x, group_sizes)
    block = block_shape(name, x.shape, format, axis, None, 1)
    if debug and block and block[1] > 1:
        check_starts(name, group_sizes, block[1])
    operands = [not_differentiable(x, f"{name}: use grouped_dense"), group_sizes]
    if multiplier is not None:
        check_multiplier(name, multiplier, group_sizes.shape, block)
        operands.append(jnp.asarray(multiplier, jnp.float32))
    rows = None if spec is None else PartitionSpec(*tuple(spec)[:1])
    specs = [spec, *[rows] * (len(operands) - 1)]
    if format.stochastic:
        operands.append(key_words(name, key))
        specs.append(None)
    two_level, given = format.scale == "float8_e4m3fn", multiplier is not None
    data, scale, *more = _op(x.ndim, two_level, bool(block), given, format.stochastic, twice)(
        *operands,
        operand_specs=tuple(specs),
        format=format,
        block=block,
        has_multiplier=given,
        twice=twice,
    )
    again = more.pop() if twice else data
    third = more[0] if more else None
    kept = None if block and not two_level else group_sizes
    q = QuantizedArray(data, scale, third if two_level else None, kept, block, format, x.dtype.name)
    return q, None if two_level else third, dataclasses.replace(q, data=again)


def check_groups(name: str, x, group_sizes) -> None:
    check_arrays(name, INTEGERS, group_sizes=group_sizes)
    if x.ndim < 2 or group_sizes.ndim != 2 or x.shape[0] != group_sizes.shape[0]:
        raise ValueError(
            f"{name}: x must be [P, C, *K] and group_sizes [P, G] with the same P; got x {x.shape}, "
            f"group_sizes {group_sizes.shape}; add the dimension P, 1 where nothing is sharded"
        )


def check_starts(name: str, group_sizes, block: int) -> None:
    """A checkify error where a group that is not empty starts within a block."""
    starts = jnp.cumsum(group_sizes, axis=1) - group_sizes
    checkify.debug_check(
        jnp.all((starts % block == 0) | (group_sizes == 0)),
        name
        + ": groups must start at multiples of the block, {block}; got starts {starts}; permute with "
        "alignment_of(recipe)",
        block=jnp.int32(block),
        starts=starts,
    )
