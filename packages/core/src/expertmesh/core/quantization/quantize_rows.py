"""Quantization of rows in groups: each group's numbers are those of `quantize` of its rows alone.

    scale[p, g] = amax(rows of group g of participant p) / max          formats without blocks
    blocks restart at row 0 of a participant                            formats with blocks

Rows are contiguous by group, and padding rows enter no amax (`ops/groups.py`). Dimension key: P participants, C rows
per participant, G groups per participant.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from expertmesh.core import _jax
from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import INTEGERS, check_arrays
from expertmesh.core.ops.gather_rows import exists, select_rows
from expertmesh.core.ops.groups import (
    cleared,
    each_participant,
    expand_trailing,
    of_rows,
    row_groups,
)
from expertmesh.core.ops.row_map import RowMap, move_rows
from expertmesh.core.quantization.quantize import (
    BlockPlan,
    block_shape,
    check_multiplier,
    check_source,
    dequantize_values,
    key_words,
    plain,
    quantize_unsupported,
    quantized_array,
    random_bits,
)
from expertmesh.core.quantization.quantized import QuantizedArray, quantized_like
from expertmesh.core.quantization.recipe import TensorFormat, quantized_once
from expertmesh.core.vjp import not_differentiable

__all__ = ["grouped_quantize"]

# Of the copy along the features, and of the one along the rows; None for no copy.
Formats = tuple[TensorFormat | None, TensorFormat | None]


def _group_amax(
    magnitudes: jax.Array, groups_PC: jax.Array, num_groups: int, axes: tuple[str, ...]
) -> jax.Array:
    """int32[P, G]; padding rows enter none."""
    rows_PC = jnp.max(magnitudes, axis=tuple(range(2, magnitudes.ndim)), initial=0)
    amax_PG = each_participant(
        lambda rows, groups: jnp.zeros(num_groups, jnp.int32).at[groups].max(rows, mode="drop")
    )(rows_PC, groups_PC)
    return jax.lax.pmax(amax_PG, axes) if axes else amax_PG


class Copies(NamedTuple):
    """Rows in up to two directions.

    Attributes:
      along_features, along_rows: a QuantizedArray in blocks along the last dimension, and along the rows; None where
        not asked for.
      amax: float32[P, G] of the groups by a given multiplier, else None.
      d_weights: float32[P, C], the gradient of routing weights where the rows are one's too, else None.
    """

    along_features: Any
    along_rows: Any
    amax: Any
    d_weights: Any = None


def reference(
    source: "Rows",
    group_sizes: jax.Array,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    *,
    format: TensorFormat,
    blocks: tuple[tuple[int, ...], ...],
    directions: tuple[int, ...],
    amax_axes: tuple[str, ...] = (),
    origin: tuple[tuple[str, ...], ...] = (),
) -> Copies:
    """Copies, of which `directions` says those that are wanted: 0 and 1."""
    x = cleared(source.rows(), group_sizes)
    num_groups = group_sizes.shape[1]
    groups_PC = row_groups(group_sizes, x.shape[1])
    bits = None if key is None else random_bits(key, x.shape, origin)

    def quantized(block: tuple[int, ...]) -> tuple[QuantizedArray, jax.Array | None]:
        return quantized_array(
            x,
            format,
            block,
            multiplier,
            bits,
            amax=lambda magnitudes: _group_amax(magnitudes, groups_PC, num_groups, amax_axes),
            of_elements=lambda values_PG: expand_trailing(of_rows(values_PG, groups_PC), x.ndim),
            # A group starts with a block, so a block's first row says whose it is.
            of_blocks=lambda values_PG: expand_trailing(
                of_rows(values_PG, groups_PC[:, :: block[1]], fill=1), x.ndim
            ),
        )

    copies = {block: quantized(block) for block in {blocks[i]: None for i in directions}}
    first, second = (copies[blocks[i]][0] if i in directions else None for i in (0, 1))
    return Copies(first, second, copies[blocks[directions[0]]][1], source.d_weights())


def _results_like(
    source: "Rows",
    group_sizes: jax.Array,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    *,
    format: TensorFormat,
    blocks: tuple[tuple[int, ...], ...],
    directions: tuple[int, ...],
) -> Copies:
    del key
    first, second = (
        quantized_like(source.shape, source.base.dtype, format, blocks[i], group_sizes.shape)
        if i in directions
        else None
        for i in (0, 1)
    )
    return Copies(first, second, multiplier, source.d_weights_like())


def _unsupported(
    source: "Rows",
    group_sizes: jax.Array,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    *,
    format: TensorFormat,
    blocks: tuple[tuple[int, ...], ...],
    directions: tuple[int, ...],
    **options: Any,
) -> str | None:
    """What keeps these types from the kernels, or None."""
    del multiplier, key, options
    x = source.base
    if x.ndim < 3 or any(b > 1 for i in directions for b in blocks[i][2:-1]):
        return f"blocks must lie along the rows or the last of other dimensions; they are {blocks}"
    reasons = (quantize_unsupported(x, format, blocks[i]) for i in directions)
    return participant_unsupported(x, group_sizes) or next(filter(None, reasons), None)


def participant_unsupported(x: Any, group_sizes: jax.Array) -> str | None:
    """What keeps kernels, which take one participant, from these rows, or None."""
    if x.shape[0] == 1 and group_sizes.shape[1]:
        return None
    return f"a device must hold one participant with groups; it holds {group_sizes.shape}"


quantize_rows_op = Op(
    "grouped_quantize",
    reference,
    "p n ..., p g, p g, key -> p n ..., p n ..., p g, p n",
    whole=("n", "g", "key", "s", "j"),  # the last two: of `Moved`
    roles="participants . ., participants ., participants ., . "
    "-> participants . ., participants . ., participants ., participants .",
    plan=BlockPlan("grouped_quantize"),
    kernels=(
        Kernel.triton("expertmesh.core.kernels.grouped_quantize", "grouped_quantize", _unsupported),
    ),
    results_like=_results_like,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows to quantize; a subclass makes them of other arrays, which are read in their place.

    Attributes:
      base: the array that the op's term names, or that in 8 bits; here the rows.
      op: `quantize_rows_op`, or one with the sharding and the kernels of a subclass.
    """

    base: Any
    op: ClassVar[Op] = quantize_rows_op

    @property
    def ndim(self) -> int:
        return int(self.base.ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return tuple(self.base.shape)

    @property
    def block(self) -> tuple[int, ...]:
        """Of what is read, if it is in blocks of its own."""
        return getattr(self.base, "block", ())

    def per_leaf(self, of_data: tuple[Any, ...], of_groups: Any) -> tuple[tuple[Any, ...], ...]:
        """As of a QuantizedArray."""
        if not isinstance(self.base, QuantizedArray):
            return (of_data,)
        return self.base.per_leaf(of_data, of_groups)

    def rows(self) -> jax.Array:
        """The rows [P, C, ...], inside of an op."""
        return self._numbers()

    def _numbers(self) -> jax.Array:
        """Of `base`, inside of an op."""
        q = self.base
        numbers: jax.Array = q
        if isinstance(q, QuantizedArray):
            numbers = dequantize_values(q.data, q.scale, block=q.block, dtype=q.dtype)
        return numbers

    def _numbers_apart(self, spec: PartitionSpec | None) -> jax.Array:
        """Of `base`, for rows at `spec`, by an op of their own."""
        out: jax.Array = plain(self.base, spec=spec and self.base_spec(spec))
        return out

    def d_weights(self) -> jax.Array | None:
        """float32[P, C], the gradient of routing weights, inside of an op; None without."""
        return None

    def d_weights_like(self) -> jax.Array | None:
        """An array of the shape of `d_weights`; None without."""
        return None

    def apart(
        self, group_sizes: jax.Array, spec: PartitionSpec | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The rows at `spec` and `d_weights`, by an op of their own."""
        del group_sizes
        return self._numbers_apart(spec), None

    def base_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Where `base` is, for rows at `spec`."""
        return spec

    def fuses(self, formats: Formats) -> bool:
        """Whether rows in these formats are made and quantized at once."""
        del formats
        return True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moved(Rows):
    """`move_rows(base, row_map)`: rows of tokens [P, S, D], which a pass that quantizes them, or a grouped GEMM, reads
    where they are. Tokens may be quantized, in blocks along D or with the scales of their rows' groups, all one (see
    `quantize_moved`). Copies of them are undefined in padding rows."""

    row_map: RowMap

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.row_map.source.shape, *self.base.shape[2:])

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def index(self) -> jax.Array:
        """int32[P, C], the token of each row; -1 where there is none, whatever the map says."""
        index = self.row_map.source_row
        return jnp.where(exists(index, self.base.shape[1]), index, -1)

    def per_leaf(self, of_data: tuple[Any, ...], of_groups: Any) -> tuple[tuple[Any, ...], ...]:
        # Only the rule has names for the tokens and for the places of one.
        s, j = ("s", "j") if of_groups == "g" else (of_groups, of_groups)
        leading, rank = of_data[:1], self.row_map.row.ndim
        of_tokens = (*leading, s, *of_data[2:])
        of_base = super().per_leaf(of_tokens, of_groups)
        return *of_base, (*leading, s, j)[:rank], of_data[:2]

    def rows(self) -> Any:
        select, source_row = each_participant(select_rows), self.row_map.source_row
        return with_rows(self.base, lambda rows: select(rows, source_row))

    def apart(
        self, group_sizes: jax.Array, spec: PartitionSpec | None
    ) -> tuple[jax.Array, jax.Array | None]:
        del group_sizes, spec
        return move_rows(self.base, self.row_map), None

    def fuses(self, formats: Formats) -> bool:
        return quantizes_moved(*formats)


def quantize_rows(
    name: str,
    source: Rows,
    group_sizes: jax.Array,
    formats: Formats,
    *,
    multiplier: jax.Array | None = None,
    keys: tuple[jax.Array | None, jax.Array | None] = (None, None),
    spec: PartitionSpec | None = None,
) -> Copies:
    """Copies of rows in groups, of one read where one kernel can write them all.

    Args:
      name: of the caller, for errors.
      source: of rows [P, C, *K].
      group_sizes: int32[P, G], rows of each group.
      formats, keys: of the copy along the features and of the one along the rows; no format, no copy.
      multiplier: float32[P, G], in place of max / amax; only without blocks.
      spec: where the rows are, for Auto axes under a MeshResource.
    """
    if not source.fuses(formats):
        rows, d_weights = source.apart(group_sizes, spec)
        options: dict[str, Any] = dict(multiplier=multiplier, keys=keys, spec=spec)
        copies = quantize_rows(name, Rows(rows), group_sizes, formats, **options)
        return copies._replace(d_weights=d_weights)
    run: Callable[..., Copies] = partial(
        _quantize_at_once, name, source, group_sizes, multiplier, spec
    )
    along_features, along_rows = formats
    if along_features is None or along_rows is None:
        at = int(along_features is None)
        return run(formats[at], keys[at], directions=(at,))
    if quantized_once(along_features, along_rows) or quantizes_both_at_once(*formats):
        return run(along_features, keys[0], directions=(0, 1))
    first, second = (run(formats[i], keys[i], directions=(i,)) for i in (0, 1))
    return first._replace(along_rows=second.along_rows)


def _quantize_at_once(
    name: str,
    source: Rows,
    group_sizes: jax.Array,
    multiplier: jax.Array | None,
    spec: PartitionSpec | None,
    format: TensorFormat,
    key: jax.Array | None,
    *,
    directions: tuple[int, ...],
) -> Copies:
    group_sizes = checked_groups(name, source.shape, group_sizes)
    axes = len(source.shape) - 1, 1
    blocks = tuple(
        block_shape(name, source.shape, format, axes[i], None, 1) if i in directions else source.block
        for i in (0, 1)
    )  # fmt: skip
    if multiplier is not None:
        check_multiplier(name, multiplier, group_sizes.shape, blocks[directions[0]])
        multiplier = jnp.asarray(multiplier, jnp.float32)
    of_groups = None if spec is None else PartitionSpec(*tuple(spec)[:1])
    copies: Copies = source.op(
        jax.tree.map(partial(not_differentiable, remedy=f"{name}: use grouped_dense"), source),
        group_sizes,
        multiplier,
        key_words(name, key) if format.stochastic else None,
        operand_specs=(spec and source.base_spec(spec), of_groups, of_groups, None),
        format=format,
        blocks=blocks,
        directions=directions,
    )
    first, second = (q and with_groups(q, group_sizes) for q in copies[:2])
    return copies._replace(along_features=first, along_rows=second)


def with_groups(q: QuantizedArray, group_sizes: jax.Array) -> QuantizedArray:
    """The array with the sizes of its groups, if groups have scales."""
    if q.format.block is not None and q.format.scale != "float8_e4m3fn":
        return q
    return dataclasses.replace(q, group_sizes=group_sizes)


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
        every group must be a multiple of `format.block[1]` (`required_alignment(recipe)`).
      multiplier: float32[P, G], in place of max / amax; only without blocks.
      key: for stochastic formats, else unused, as of `quantize`.
      spec: where `x` is, for Auto axes under a MeshResource; None: P over (dp, fsdp, ep).
      debug: under `jax.experimental.checkify.checkify`, group starts that are no multiples of the block are errors.

    Returns:
      A QuantizedArray; `scale` without blocks, or `tensor_scale`, is float32[P, G], and then `group_sizes` is kept.
      Padding rows have data 0, whatever `x` holds there. An empty group's scale is that of amax 0.

    Raises:
      As `quantize`; ValueError: `group_sizes` of another shape; TypeError: they are not integers.

    Under sharding P and the dimensions after the rows keep their axes; the amax of a group is maximised over those that
    do not shard P (one number per group). An axis that shards the rows is a RuntimeWarning: they are gathered over it.
    """
    name = "grouped_quantize"
    check_source(name, x, format)
    along_rows = format.block is not None and x.ndim > 2 and axis in (1, 1 - x.ndim)
    if format.block is not None and not along_rows and axis not in (-1, x.ndim - 1):
        raise ValueError(
            f"{name}: axis must be the last dimension, or 1, the rows; got x {x.shape}, axis={axis}; "
            "pass that of the contraction"
        )
    if debug and format.block is not None and along_rows:
        check_starts(name, group_sizes, format.block[1])
    formats = (None, format) if along_rows else (format, None)
    options: dict[str, Any] = dict(multiplier=multiplier, keys=(key, key), spec=spec)
    out: QuantizedArray = quantize_rows(name, Rows(x), group_sizes, formats, **options)[along_rows]
    return out


def is_moved(*operands: Any) -> bool:
    """Whether one of the operands is `Moved`."""
    return any(isinstance(x, Moved) for x in operands)


def written(x: Any) -> Any:
    """An operand, inside of an op: rows that are `Moved` as an array, or quantized."""
    return x.rows() if isinstance(x, Moved) else x


def tokens_of(x: Any) -> Any:
    """What an operand is read from: the tokens of rows that are `Moved`."""
    return x.base if isinstance(x, Moved) else x


def index_of(x: Any, source: jax.Array) -> jax.Array:
    """int32[P, C], the row of `tokens_of(x)` that each row is; `source`: of rows that are not `Moved`, what a kernel
    takes in its place, which says the same of those that hold no token."""
    return x.row_map.source_row if isinstance(x, Moved) else source


def with_rows(x: Any, move: Callable[[jax.Array], jax.Array]) -> Any:
    """An array with its rows moved, or one quantized with its data moved, and its scales if they are of blocks."""
    if not isinstance(x, QuantizedArray):
        return move(x)
    scale = move(x.scale) if x.block else x.scale
    return dataclasses.replace(x, data=move(x.data), scale=scale)


def quantizes_both_at_once(last: TensorFormat | None, rows: TensorFormat | None) -> bool:
    """Whether copies in these formats are made of one read."""
    if last is None or last != rows:
        return False
    return last.block is not None and last.dtype != "float4_e2m1fn"


def per_group(last: TensorFormat | None, rows: TensorFormat | None) -> bool:
    """Whether copies in these formats, or the one that is wanted, are one format with a scale per group."""
    wanted = {format for format in (last, rows) if format is not None}
    return len(wanted) == 1 and all(format.block is None for format in wanted)


def quantizes_moved(last: TensorFormat | None, rows: TensorFormat | None) -> bool:
    """Whether rows that are `Moved` are quantized in these formats where their tokens are: without blocks by a given
    multiplier, or as tokens, with one scale.
    """
    alone = last is None and quantizes_both_at_once(rows, rows)
    return per_group(last, rows) or quantizes_both_at_once(last, rows) or alone


# NVIDIA H100, 2026-11-27: columns up to which a grouped GEMM loses less, finding its rows, than their copy takes.
WIDTH_IN_PLACE = 1024


def read_in_place(format: TensorFormat, width: int) -> bool:
    """Whether a grouped GEMM with so many columns reads quantized rows where their tokens are.

    Then a token is quantized once, and its rows are written along the rows alone. Every 256 columns read them again,
    and find them more slowly than rows that lie side by side.
    """
    narrow = format.block == (1, 128) and not format.stochastic and width <= WIDTH_IN_PLACE
    return narrow and _jax.runs_hopper_kernels()


def grouped_quantize_both(
    x: Any, group_sizes: jax.Array, formats: Formats, **options: Any
) -> Copies:
    """`quantize_rows` of x, an array or `Rows`, after the errors of `grouped_quantize` and in its name.

    Where both formats are one 8-bit format, rows are read once; without blocks both copies have the same data.

    Args:
      group_sizes, formats, options: as of `quantize_rows`.
    """
    name, source = "grouped_quantize", as_rows(x)
    for format in filter(None, formats):
        check_source(name, source.base, format, quantized=True)
    return quantize_rows(name, source, group_sizes, formats, **options)


def as_rows(x: Any) -> Rows:
    """The source of rows that x is, or that an array is."""
    return x if isinstance(x, Rows) else Rows(x)


def checked_groups(name: str, shape: Sequence[int], group_sizes: jax.Array) -> jax.Array:
    """int32[P, G]; an error that names `name` unless rows of this shape can have these groups."""
    check_arrays(name, INTEGERS, group_sizes=group_sizes)
    if len(shape) < 2 or group_sizes.ndim != 2 or shape[0] != group_sizes.shape[0]:
        raise ValueError(
            f"{name}: x must be [P, C, *K] and group_sizes [P, G] with the same P; got x {tuple(shape)}, "
            f"group_sizes {group_sizes.shape}; add the dimension P, 1 where nothing is sharded"
        )
    if group_sizes.shape[1] == 0:
        raise ValueError(
            f"{name}: there must be a group; got group_sizes {group_sizes.shape}; pass one of 0 rows"
        )
    return group_sizes.astype(jnp.int32)  # sums of fewer bits wrap


def check_starts(name: str, group_sizes: jax.Array, block: int) -> None:
    """A checkify error where a group that is not empty starts within a block."""
    starts = jnp.cumsum(group_sizes, axis=1) - group_sizes
    checkify.debug_check(
        jnp.all((starts % block == 0) | (group_sizes == 0)),
        name
        + ": groups must start at multiples of the block, {block}; got starts {starts}; permute with "
        "required_alignment(recipe)",
        block=jnp.int32(block),
        starts=starts,
    )
