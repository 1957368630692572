"""Grouped GEMM: row r of group g of participant p is multiplied with its group's weight.

    out[p, r] = lhs[p, r] @ rhs[expert(p, g)] + bias[expert(p, g)],   expert(p, g) = (p % R) * G + g,   R = E // G

Ops that end in `low_rank` add a term to the sums before they are rounded, u[p, r] @ b[expert(p, g)], u being of a rank
that is small beside K and N.

Rows are contiguous by group; those past the last group are padding rows (`ops/groups.py`). Dimension key: P
participants, C rows per participant, K contraction, N output dimensions (any number), E experts (weights), G groups per
participant, R participants that share one set of weights.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core import _jax
from expertmesh.core.linear.apply import apply_linear, layer_of
from expertmesh.core.linear.grouped_plan import plan_grouped
from expertmesh.core.linear.grouped_reference import (
    add_bias_reference,
    bias_grad_reference,
    bias_weights_grad_reference,
    cotangents_reference,
    rows_reference,
    wgrad_reference,
)
from expertmesh.core.linear.layer import Layer, Linear, NonDiffOperands, Specs, Term, Terms
from expertmesh.core.linear.pair import rows_unsupported, unsupported
from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import ANY_FLOATS, FLOATS, INTEGERS, check_arrays
from expertmesh.core.quantization.delayed_scaling import DelayedState, grouped_quantize_delayed_both
from expertmesh.core.quantization.quantize_rows import (
    Copies,
    Moved,
    grouped_quantize_both,
    is_moved,
    tokens_of,
)
from expertmesh.core.quantization.quantized import QuantizedArray, is_plain, is_quantized
from expertmesh.core.quantization.recipe import Recipe
from expertmesh.core.support import eight_bits_unsupported


@dataclasses.dataclass(frozen=True)
class _OnceInASum:
    """A GEMM with a term, which of the devices whose results are added the first one alone adds.

    Attributes:
      gemm: `gemm(rows, weight, group_sizes, u, b, **options)`.
    """

    gemm: Callable[..., jax.Array]

    def __call__(
        self, *operands: Any, summed_axes: tuple[str, ...] = (), **options: Any
    ) -> jax.Array:
        *others, u, b = operands
        if summed_axes:
            u = jnp.where(jax.lax.axis_index(summed_axes) == 0, u, 0)
        return self.gemm(*others, u, b, **options)


def _kernels(
    function: str,
    plain: Callable[..., str | None],
    quantized: Callable[..., str | None],
    mixed: Callable[..., str | None],
) -> tuple[Kernel, ...]:
    """Of plain operands, of those with rows that are `Moved`, of quantized ones, and of rows that alone are quantized;
    what keeps operands from each."""
    of_modules: dict[str, tuple[Callable[..., str | None], Callable[..., bool]]] = {
        "grouped_gemm": (plain, _are_rows),
        "gathered_gemm": (_OfBases(plain), _are_plain_tokens),
        "quantized_grouped_gemm": (_OfBases(quantized), _are_both_quantized),
        "mixed_grouped_gemm": (mixed, _is_one_quantized),
    }
    return tuple(
        Kernel.triton(f"expertmesh.core.kernels.{module}", function, unsupported, takes)
        for module, (unsupported, takes) in of_modules.items()
    )


def _are_rows(*operands: Any) -> bool:
    return is_plain(*operands) and not is_moved(*operands)


def _are_plain_tokens(*operands: Any) -> bool:
    return is_moved(*operands) and is_plain(*map(tokens_of, operands))


def _are_both_quantized(a: Any, b: Any, *others: Any) -> bool:
    del others
    return is_quantized(tokens_of(a)) and is_quantized(tokens_of(b))


def _is_one_quantized(a: Any, b: Any, *others: Any) -> bool:
    del others
    return is_quantized(tokens_of(a)) != is_quantized(tokens_of(b))


@dataclasses.dataclass(frozen=True)
class _OfBases:
    """What keeps operands from a kernel, of what those that are `Moved` are read from."""

    unsupported: Callable[..., str | None]

    def __call__(self, *operands: Any, **options: Any) -> str | None:
        moved = [x for x in operands if isinstance(x, Moved)]
        if not all(x.row_map.source.size for x in moved):
            return "there must be rows"
        return self.unsupported(*map(tokens_of, operands), **options)


def plain_rows_unsupported(
    x: jax.Array, rhs: Any, group_sizes: jax.Array, *low_rank: jax.Array, **options: Any
) -> str | None:
    """For the forward (x = lhs) and the input gradient (x = dy)."""
    del options
    widths = rhs.shape[1], prod(rhs.shape[2:])
    return _plain_unsupported(x, rhs, group_sizes, rhs.shape[0], widths) or _low_rank_unsupported(
        low_rank, (x.dtype,)
    )


def _plain_weights_unsupported(
    lhs: Any, dy: Any, group_sizes: jax.Array, *, num_experts: int, **options: Any
) -> str | None:
    del options
    widths = lhs.shape[2], prod(dy.shape[2:])
    return _plain_unsupported(lhs, dy, group_sizes, num_experts, widths)


def _plain_unsupported(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, num_experts: int, widths: tuple[int, int]
) -> str | None:
    """What keeps these types from the kernels, or None."""
    capability = _jax.target_capability()
    if capability < 8.0:
        return f"the kernels are for compute capability 8.0 and later; this GPU has {capability}"
    if reason := _participants_unsupported(group_sizes, num_experts):
        return reason
    if a.dtype != b.dtype or a.dtype not in (jnp.bfloat16, jnp.float16):
        return f"operands must both be bfloat16 or float16; they are {a.dtype} and {b.dtype}"
    if a.size == 0 or any(width == 0 or width % 8 for width in widths):
        return f"there must be rows, and widths that are multiples of 8; widths are {widths}"
    return None


def _low_rank_unsupported(low_rank: Sequence[jax.Array], dtypes: tuple[Any, ...]) -> str | None:
    """What keeps a term, if there is one, from kernels that take it in these dtypes, or None."""
    if not low_rank:
        return None
    u, b = low_rank
    if u.dtype != b.dtype or u.dtype not in dtypes:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        return f"a term of low rank must be {names} here; it is of {u.dtype} and {b.dtype}"
    return None if u.shape[-1] else "a term of low rank must have a rank"


def quantized_rows_unsupported(
    rows: QuantizedArray,
    rhs: QuantizedArray,
    group_sizes: jax.Array,
    *low_rank: jax.Array,
    out_dtype: DTypeLike,
    **options: Any,
) -> str | None:
    del options
    return (
        _participants_unsupported(group_sizes, rhs.shape[0])
        or rows_unsupported(rows, rhs, rhs.shape[1:], out_dtype)
        or _low_rank_unsupported(low_rank, (jnp.bfloat16, jnp.float16))
    )


def _quantized_weights_unsupported(
    lhs: QuantizedArray,
    dy: QuantizedArray,
    group_sizes: jax.Array,
    *,
    num_experts: int,
    out_dtype: DTypeLike,
) -> str | None:
    widths = lhs.shape[2], prod(dy.shape[2:])
    return _participants_unsupported(group_sizes, num_experts) or unsupported(
        lhs, dy, widths, (1, 1), out_dtype
    )


def _cotangents_unsupported(
    dy: jax.Array, b: jax.Array, group_sizes: jax.Array, u: jax.Array
) -> str | None:
    if u.dtype != dy.dtype:
        return f"rows and inner rows must be of one dtype; they are {dy.dtype} and {u.dtype}"
    return plain_rows_unsupported(dy, b, group_sizes)


def _mixed_rows_unsupported(
    rows: Any, rhs: Any, group_sizes: jax.Array, *, out_dtype: DTypeLike, **options: Any
) -> str | None:
    del options
    widths = rhs.shape[1], prod(rhs.shape[2:])
    return _mixed_unsupported(rows, rhs, group_sizes, rhs.shape[0], widths, out_dtype)


def _mixed_weights_unsupported(
    lhs: Any, dy: Any, group_sizes: jax.Array, *, num_experts: int, out_dtype: DTypeLike
) -> str | None:
    q, thin = (dy, lhs) if is_quantized(tokens_of(dy)) else (lhs, dy)
    widths = lhs.shape[2], prod(dy.shape[2:])
    return _mixed_unsupported(q, thin, group_sizes, num_experts, widths, out_dtype)


def _mixed_unsupported(
    q: Any,
    other: Any,
    group_sizes: jax.Array,
    num_experts: int,
    widths: tuple[int, int],
    out_dtype: DTypeLike,
) -> str | None:
    """What keeps quantized rows and a plain operand from the kernels, or None."""
    if is_moved(q):
        return "quantized rows of tokens have no kernel with a plain operand: write them"
    if not is_quantized(q):
        return "a quantized weight has no kernel with plain rows: dequantize it"
    if q.tensor_scale is not None or q.format.dtype == "float4_e2m1fn":
        return "there is no kernel for blocks with two levels of scales"
    if q.block and max(q.block) != q.block[-1]:
        return f"blocks must lie along the features; they are {q.block}"
    if reason := eight_bits_unsupported():
        return reason
    if reason := _participants_unsupported(group_sizes, num_experts):
        return reason
    if other.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the plain operand must be bfloat16 or float16; it is {other.dtype}"
    if out_dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the result must be float32, bfloat16 or float16; it is {out_dtype}"
    if q.data.size == 0 or any(width == 0 or width % 8 for width in widths):
        return f"there must be rows, and widths that are multiples of 8; widths are {widths}"
    return None


def _participants_unsupported(group_sizes: jax.Array, num_experts: int) -> str | None:
    if group_sizes.shape == (1, num_experts):
        return None
    return f"a device must hold one participant and its experts; it holds {group_sizes.shape}"


def _bias_unsupported(
    dy: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    *,
    num_experts: int,
    **options: Any,
) -> str | None:
    del weights, options
    return _participants_unsupported(group_sizes, num_experts) or (
        None if dy.size else "there must be elements"
    )


_TERMS = Terms(
    x=Term("p c k", "participants . ."),
    w=Term("e k n...", "experts fsdp ."),
    y=Term("p c n...", "participants . ."),
    groups=(Term("p g", "participants ."),),
    plan=plan_grouped,
)
grouped_gemm_op = _TERMS.gemm(
    "grouped_gemm",
    "xw y",
    partial(rows_reference, contract_rhs=1),
    _kernels("rows", plain_rows_unsupported, quantized_rows_unsupported, _mixed_rows_unsupported),
)
grouped_gemm_dgrad_op = _TERMS.gemm(
    "grouped_gemm_dgrad",
    "yw x",
    partial(rows_reference, contract_rhs=2),
    _kernels(
        "rows_dgrad", plain_rows_unsupported, quantized_rows_unsupported, _mixed_rows_unsupported
    ),
)


def _with_term(op: Op, law: str, b: Term) -> Op:
    """The op of `law`, and a term of low rank with these weights."""
    kernels = (dataclasses.replace(k, launch=_OnceInASum(k.launch)) for k in op.kernels)
    terms = Term("p c r", "participants . ."), b
    reference = _OnceInASum(op.reference)
    return _TERMS.gemm(f"{op.name}_low_rank", law, reference, tuple(kernels), *terms)


grouped_gemm_low_rank_op = _with_term(grouped_gemm_op, "xw y", Term("e r n...", "experts . ."))
grouped_gemm_dgrad_low_rank_op = _with_term(
    grouped_gemm_dgrad_op, "yw x", Term("e k r", "experts fsdp .")
)
grouped_gemm_wgrad_op = _TERMS.gemm(
    "grouped_gemm_wgrad",
    "xy w",
    wgrad_reference,
    _kernels(
        "weights",
        _plain_weights_unsupported,
        _quantized_weights_unsupported,
        _mixed_weights_unsupported,
    ),
)
grouped_cotangents_op = Op(
    "grouped_cotangents",
    cotangents_reference,
    "p c n..., e t n..., p g, p c t -> p c t, e t n...",
    summed=("c", "n...", "p"),
    roles="participants . ., experts . ., participants ., participants . . "
    "-> participants . ., experts . .",
    parameter=1,
    plan=plan_grouped,
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.grouped_cotangents", "cotangents", _cotangents_unsupported
        ),
    ),
)
group_bias_op = Op(
    "group_bias",
    add_bias_reference,
    "p c n..., e n..., p g, p c -> p c n...",
    parameter=1,
    plan=plan_grouped,
)
group_bias_weights_grad_op = Op(
    "group_bias_weights_grad",
    bias_weights_grad_reference,
    "p c n..., e n..., p g -> p c",
    summed=("n...",),
    parameter=1,
    plan=plan_grouped,
)
group_bias_grad_op = Op(
    "group_bias_grad",
    bias_grad_reference,
    "p c n..., p g, p c -> e n...",
    parameter=3,
    plan=plan_grouped,
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.triton.group_bias", "group_bias_grad", _bias_unsupported
        ),
    ),
)


def _x_copies(
    x: Any, group_sizes: jax.Array, state: DelayedState | None, layer: Layer, *, for_wgrad: bool
) -> tuple[QuantizedArray, QuantizedArray, DelayedState | None]:
    formats, spec = layer.formats, layer.resolved[0]
    if state is not None and layer.delayed is not None:
        return grouped_quantize_delayed_both(
            x, group_sizes, state, layer.delayed, spec=spec, twice=for_wgrad
        )
    both = formats.x, formats.x_wgrad if for_wgrad else None
    along_k, along_tokens, *_ = grouped_quantize_both(x, group_sizes, both, spec=spec)
    return along_k, along_tokens, None


def _dy_copies(
    dy: Any,
    group_sizes: jax.Array,
    keys: tuple[jax.Array | None, jax.Array | None],
    layer: Layer,
    *,
    tokens: int | None,
) -> Copies:
    both = layer.formats.grad_dgrad, None if tokens is None else layer.formats.grad_wgrad
    return grouped_quantize_both(dy, group_sizes, both, keys=keys, spec=layer.resolved[2])


GROUPED = Linear(
    name="grouped_dense",
    terms=_TERMS,
    fprop=grouped_gemm_op,
    dgrad=grouped_gemm_dgrad_op,
    wgrad=grouped_gemm_wgrad_op,
    add_bias=group_bias_op,
    bias_grad=group_bias_grad_op,
    row_roles=("participants",),
    quantize_x=_x_copies,
    quantize_dy=_dy_copies,
    cotangents=grouped_cotangents_op,
    fprop_low_rank=grouped_gemm_low_rank_op,
    dgrad_low_rank=grouped_gemm_dgrad_low_rank_op,
)


def grouped_gemm(
    lhs: jax.Array | QuantizedArray,
    rhs: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike = "float32",
    x_spec: PartitionSpec | None = None,
    w_spec: PartitionSpec | None = None,
    out_spec: PartitionSpec | None = None,
    clear_padding: bool = True,
    debug: bool = False,
) -> jax.Array:
    """Multiplies each group of rows with the weight of its expert.

    For P = 1 equivalent to `jax.lax.ragged_dot(lhs[0], rhs, group_sizes[0])` with zeros in padding rows, in memory
    O(C * N).

    Args:
      lhs: float[P, C, K], or [C, K] with one-dimensional `group_sizes` (P = 1). Or `grouped_quantize(..., axis=2)`.
      rhs: float[E, K, *N]; cast to the dtype of `lhs`, its gradient is accumulated and returned in its own. With a
        quantized `lhs`, `quantize(..., axis=1, batch_dims=1)`.
      group_sizes: int32[P, G], rows of each group, sum at most C; E is a multiple of G and P of E / G: participant p
        uses the experts `(p % (E // G)) * G + g`.
      bias: float[E, *N] or None; added to the rows of the groups only.
      out_dtype: dtype of the result, floats of 16 bits or more; None: that of `lhs` (of what it was quantized from).
      reduce_dtype: the dtype of the reduction of `rhs`'s gradient over devices: "float32", "bfloat16" or "float16".
      x_spec, w_spec: where `lhs` and `rhs` are, for Auto axes under a MeshResource; None: P over (dp, fsdp, ep),
        P(ep, fsdp).
      out_spec: where the result is wanted; None: P where that of `lhs` is, N where that of `rhs` is in use.
      clear_padding: False if nobody reads padding rows, those past the last group, of the result and of the gradient of
        `lhs`: they are then undefined. A buffer for the worst case is mostly such rows.
      debug: under `jax.experimental.checkify.checkify`, sizes below 0 or with a sum above C are errors. Off by default:
        such a check is an effect; `flax.linen.scan` refuses it.

    Returns:
      [P, C, *N] (or [C, *N]), accumulated in float32 and rounded once. Padding rows are zeros, whatever `lhs` holds
      there (see `clear_padding`).

    Raises:
      ValueError: ranks, K, group counts or the bias' shape do not fit; a spec with an axis twice or not in the mesh;
        one quantized operand, or two that do not fit: both float8_e5m2, scales of different kinds, blocks that do not
        lie along K, scales of other shapes, K no multiple of 16 (32 in blocks of 32 or in four bits).
      NotImplementedError: quantized operands are differentiated.
      TypeError: an operand is no array of floats; `group_sizes` are not integers.

    Differentiable in `lhs`, `rhs` and `bias`, unless they are quantized (see `grouped_dense`); empty groups have zero
    weight gradients, padding rows zero input gradients.

    Under sharding P keeps its axes, the experts follow the innermost of them (a slice or nothing), and the weight is
    gathered over all other axes that shard P, in the dtype of `lhs`; rows are not gathered. Over axes of the resource's
    role tp the weight is used as it is: by columns `[E, K, N / tp]` (the input gradient is summed over tp) or by rows
    `[E, K / tp, N]` (the result is). A sum is float32 on the way; it is a reduce-scatter where the result is wanted
    sharded over the axis (`out_spec`, the layout of `lhs` for its gradient), else an all-reduce. The weight's gradient
    is reduce-scattered into the weight's own spec, and alone is added in `reduce_dtype` (see `gemm`). An axis that
    shards the C rows, or a parameter without sharding P and without a role, is a RuntimeWarning: it is gathered.
    """
    check_operands("grouped_gemm", lhs, rhs, group_sizes, bias, debug=debug)
    if is_quantized(lhs, rhs) and lhs.ndim == 2:
        raise ValueError(
            f"grouped_gemm: quantized lhs must be [P, C, K]; got lhs {lhs.shape}; make it with "
            "grouped_quantize(x[None], group_sizes[None], ..., axis=2)"
        )
    out: jax.Array = apply_grouped(
        "grouped_gemm",
        lhs,
        rhs,
        group_sizes,
        bias,
        out_dtype=out_dtype,
        reduce_dtype=reduce_dtype,
        specs=(x_spec, w_spec, out_spec),
        clear_padding=clear_padding,
    )
    return out


def apply_grouped(
    name: str,
    x: Any,
    w: Any,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    extra: NonDiffOperands | None = None,
    recipe: Recipe | None = None,
    *,
    specs: Specs,
    **options: Any,
) -> Any:
    """What `grouped_gemm` and `grouped_dense` return; options: of `layer_of`."""
    flat, group_sizes = x.ndim == 2, group_sizes.astype(jnp.int32)  # sums of fewer bits wrap
    if flat:
        x, group_sizes = x[None], group_sizes[None]
        specs = with_participant(specs[0]), specs[1], with_participant(specs[2])
    extra = extra or NonDiffOperands()
    layer = layer_of(name, GROUPED, x, w, extra, recipe, specs=specs, **options)
    return apply_linear(layer, x, w, group_sizes, bias, extra, flat=flat)


def _check_data(name: str, lhs: Any, group_sizes: jax.Array) -> None:
    most = jnp.max(jnp.sum(group_sizes, axis=-1), initial=0)
    least = jnp.min(group_sizes, initial=0)
    checkify.debug_check(
        least >= 0,
        name + ": group_sizes must be at least 0; got a size of {least}; count the rows again",
        least=least,
    )
    checkify.debug_check(
        most <= lhs.shape[-2],
        name
        + ": group_sizes must add up to at most {rows}, the rows; got a sum of {most}; count the rows again, or make "
        "room for more",
        rows=jnp.int32(lhs.shape[-2]),
        most=most,
    )


def with_participant(spec: PartitionSpec | None) -> PartitionSpec | None:
    """Of rows [C, ...] that become those of one participant."""
    return None if spec is None else PartitionSpec(None, *spec)


def check_operands(
    name: str,
    lhs: Any,
    rhs: Any,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    debug: bool = False,
) -> None:
    """Raises where the operands of grouped GEMM `name` do not fit; with `debug` the sizes are checked as they run."""

    check_arrays(name, ANY_FLOATS, quantized=True, lhs=lhs, rhs=rhs)
    check_arrays(name, FLOATS, optional=True, bias=bias)
    check_arrays(name, INTEGERS, group_sizes=group_sizes)
    for what, remedy in _broken_rules(lhs, rhs, group_sizes):
        shapes = f"lhs {lhs.shape}, rhs {rhs.shape}, group_sizes {group_sizes.shape}"
        raise ValueError(f"{name}: {what}; got {shapes}; {remedy}")
    want = rhs.shape[0], *rhs.shape[2:]
    if bias is not None and bias.shape != want:
        raise ValueError(
            f"{name}: bias must be [E, *N] = {want}; got bias {bias.shape}; reshape it"
        )
    if debug:
        _check_data(name, lhs, group_sizes)


def _broken_rules(lhs: Any, rhs: Any, group_sizes: jax.Array) -> Iterator[tuple[str, str]]:
    """What shapes must be and are not, and what to do; ask for no more after one of them."""
    if (lhs.ndim, group_sizes.ndim) not in ((3, 2), (2, 1)) or rhs.ndim < 3:
        yield (
            "lhs must be [P, C, K] with group_sizes [P, G] (or [C, K] with [G]) and rhs [E, K, *N]",
            "reshape the operand that has another rank",
        )
    if lhs.shape[-1] != rhs.shape[1]:
        yield "the last dimension of lhs must equal rhs' second", "transpose rhs"
    num_groups, num_experts = group_sizes.shape[-1], rhs.shape[0]
    if not num_groups or num_experts % num_groups != 0:
        yield (
            "the number of experts (rhs) must be a multiple of the number of groups",
            "pass the group sizes of the experts that a participant holds",
        )
    if lhs.ndim == 2 and num_groups != num_experts:
        yield "without P there must be one group per expert", "add P"
    if lhs.ndim == 3 and (
        lhs.shape[0] != group_sizes.shape[0] or lhs.shape[0] % (num_experts // num_groups) != 0
    ):
        yield (
            "lhs and group_sizes must have one P, a multiple of experts / groups",
            "pass one row of group sizes per participant",
        )
