"""A gated activation of rows in groups, or its gradient, quantized along its features and along the rows.

    a = activate(h)                                 as of ops/activation.py, rounded to the dtype of h
    d_h = the gradient of h for the cotangent d_a   likewise
    q = grouped_quantize(a or d_h, ...) in both directions as of ops/grouped_quantize.py

Dimension key: P participants, C rows per participant, F expert width, G groups per participant.
"""

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.activation import (
    Activation,
    activate_at,
    check_gated,
    gated_grad_op,
    gated_grad_reference,
    gated_reference,
    with_pair,
)
from expertmesh.core.ops.grouped_quantize import (
    both_reference,
    check_groups,
    grouped_quantize_both,
    plan_blocks,
    quantizes_both_at_once,
)
from expertmesh.core.ops.quantize import block_shape, check_source, why_no_blocks
from expertmesh.core.quantized import QuantizedArray
from expertmesh.core.recipe import TensorFormat
from expertmesh.core.vjp import not_differentiable

__all__ = ["activate_grad_quantize", "activate_quantize"]


def activate_quantize(
    h: jax.Array,
    group_sizes: jax.Array,
    formats: tuple[TensorFormat, TensorFormat],
    activation: str | Activation,
    *,
    spec: PartitionSpec | None = None,
    zero_rest: bool = True,
) -> tuple[QuantizedArray, QuantizedArray]:
    """`grouped_quantize_both(activate(h, activation), group_sizes, formats)`.

    Args:
      h: float32, bfloat16 or float16 [P, C, 2, F] (0 gate, 1 up).
      group_sizes: int32[P, G], rows of each group; those after the last one are zeros, whatever h holds there.
      formats: of the copy along F and of the one along the rows.
      activation: with a gate.
      spec: where the activation [P, C, F] is, for Auto axes under a MeshResource.
      zero_rest: False if nobody reads the rows after the last group, as no grouped product does: their data and scales
        may then be anything.

    Returns:
      The two copies of [P, C, F]. Where both formats are one of 8 bits with blocks, h is read once and nothing else is
      written: 4 bytes are read and 2 are written per number, in place of 6 and 4. One number in some thousands may be
      rounded otherwise by the kernel ("gelu_exact" has none).

    Raises:
      As `activate` and `grouped_quantize`.
    """
    first, second = formats
    if not quantizes_both_at_once(first, second):
        return grouped_quantize_both(
            activate_at(h, activation, spec), group_sizes, formats, spec=spec
        )
    name = "activate_quantize"
    activation = check_gated(name, h, activation)
    of_h = spec and with_pair(spec)
    shape = (*h.shape[:2], h.shape[3])
    options = dict(activation=activation, zero_rest=zero_rest)
    return _copies(name, _op, (h,), (of_h,), group_sizes, shape, first, options)


def activate_grad_quantize(
    h: jax.Array,
    d_out: jax.Array,
    group_sizes: jax.Array,
    formats: tuple[TensorFormat, TensorFormat],
    activation: str | Activation,
    *,
    spec: PartitionSpec | None = None,
    zero_rest: bool = True,
) -> tuple[QuantizedArray, QuantizedArray]:
    """`grouped_quantize_both(d_h, group_sizes, formats)` of the gradient d_h of `activate(h, activation)`.

    Args:
      h: float32, bfloat16 or float16 [P, C, 2, F] (0 gate, 1 up).
      d_out: float[P, C, F], the activation's cotangent.
      group_sizes: int32[P, G], rows of each group; those after the last one are zeros, whatever h and d_out hold there.
      formats: of the copy along F and of the one along the rows.
      activation: with a gate.
      spec: where h is, for Auto axes under a MeshResource.
      zero_rest: as of `activate_quantize`.

    Returns:
      The two copies of [P, C, 2, F]. Where both formats are one of 8 bits with blocks, h and d_out are read once and
      nothing else is written: 3 bytes are read and 2 are written per number of h, in place of 5 and 4. One number in
      some thousands may be rounded otherwise by the kernel ("gelu_exact" has none).

    Raises:
      As `activate` and `grouped_quantize`; ValueError: `d_out` of another shape.
    """
    first, second = formats
    name = "activate_grad_quantize"
    activation = check_gated(name, h, activation)
    if d_out.shape != (*h.shape[:2], h.shape[3]):
        raise ValueError(
            f"{name}: d_out must have the shape of the activation, {(*h.shape[:2], h.shape[3])}; got {d_out.shape}; "
            "reshape it"
        )
    of_d = None if spec is None else PartitionSpec(*tuple(spec)[:2], *tuple(spec)[3:])
    if not quantizes_both_at_once(first, second):
        d_h = gated_grad_op(h, d_out, operand_specs=(spec, of_d), activation=activation)
        return grouped_quantize_both(d_h, group_sizes, formats, spec=spec)
    operands, options = (h, d_out), dict(activation=activation, zero_rest=zero_rest)
    return _copies(name, _grad_op, operands, (spec, of_d), group_sizes, h.shape, first, options)


def _copies(name, op, operands, specs, group_sizes, shape, format, options):
    """What the op gives, as two QuantizedArrays of this shape."""
    h = operands[0]
    check_source(name, h, format)
    check_groups(name, h, group_sizes)
    blocks = tuple(block_shape(name, shape, format, axis, None, 1) for axis in (len(shape) - 1, 1))
    of_groups = None if specs[0] is None else PartitionSpec(*tuple(specs[0])[:1])
    out = op(
        *(not_differentiable(x, f"{name}: use grouped_dense") for x in operands),
        group_sizes,
        operand_specs=(*specs, of_groups),
        format=format,
        **options,
        # Of h, by which the op is laid out.
        blocks=tuple((*block[:2], 1, block[-1]) for block in blocks),
    )
    along_f, along_rows = (
        QuantizedArray(data, scale, None, None, block, format, h.dtype.name)
        for (data, scale), block in zip((out[:2], out[2:]), blocks, strict=True)
    )
    return along_f, along_rows


def _reference(
    h, group_sizes, *, activation, format, blocks, zero_rest=True, amax_axes=(), origin=()
):
    """(data, scale, data, scale) in both `blocks`, which are those of h."""
    a = gated_reference(h, activation=activation)
    blocks = tuple((*block[:2], block[3]) for block in blocks)
    return both_reference(a, group_sizes, format=format, blocks=blocks)


def _grad_reference(
    h, d_out, group_sizes, *, activation, format, blocks, zero_rest=True, **options
):
    """(data, scale, data, scale) in both `blocks`."""
    d_h = gated_grad_reference(h, d_out, activation=activation)
    return both_reference(d_h, group_sizes, format=format, blocks=blocks, **options)


def _why_not(h, *rest, activation, blocks, **options) -> str | None:
    """What keeps these types from the kernel, or None."""
    del options
    group_sizes = rest[-1]
    if activation.function == "gelu_exact":
        return f"{activation.function} and a tile do not fit into registers"
    if h.shape[0] != 1 or group_sizes.shape[1] == 0:
        return f"a device must hold one participant with groups; it holds {group_sizes.shape}"
    if not h.size:
        return "there must be elements"
    return next(filter(None, (why_no_blocks(h, block) for block in blocks)), None)


def _kernels(function: str) -> tuple[Kernel, ...]:
    return (Kernel.triton("expertmesh.core.kernels.activate_quantize", function, _why_not),)


_op = Op(
    "activate_quantize",
    _reference,
    "d0 d1 two f, d0 g -> d0 d1 f, d0 d1 f, d0 d1 f, d0 d1 f",
    whole=("d1", "g", "two"),
    roles="participants . . tp, participants . -> " + ", ".join(["participants . tp"] * 4),
    plan=plan_blocks,
    kernels=_kernels("both"),
)
_grad_op = Op(
    "activate_grad_quantize",
    _grad_reference,
    "d0 d1 two f, d0 d1 f, d0 g -> " + ", ".join(["d0 d1 two f"] * 4),
    whole=("d1", "g", "two"),
    roles="participants . . tp, participants . tp, participants . -> "
    + ", ".join(["participants . . tp"] * 4),
    plan=plan_blocks,
    kernels=_kernels("gradient_both"),
)
