"""A gated activation of rows in groups, quantized along its features and along the rows.

    a = activate(h)                                 as of ops/activation.py, rounded to the dtype of h
    q = grouped_quantize(a, ...) in both directions as of ops/grouped_quantize.py

Dimension key: P participants, C rows per participant, F expert width, G groups per participant.
"""

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.activation import Activation, activate, check_gated, gated_reference
from expertmesh.core.ops.grouped_quantize import (
    BlocksPlan,
    both_reference,
    check_groups,
    grouped_quantize_both,
    quantizes_both_at_once,
)
from expertmesh.core.ops.quantize import block_shape, check_source, why_no_blocks
from expertmesh.core.quantized import QuantizedArray
from expertmesh.core.recipe import TensorFormat
from expertmesh.core.vjp import not_differentiable

__all__ = ["activate_quantize"]


def activate_quantize(
    h: jax.Array,
    group_sizes: jax.Array,
    formats: tuple[TensorFormat, TensorFormat],
    activation: str | Activation,
    *,
    spec: PartitionSpec | None = None,
) -> tuple[QuantizedArray, QuantizedArray]:
    """`grouped_quantize_both(activate(h, activation), group_sizes, formats)`.

    Args:
      h: float32, bfloat16 or float16 [P, C, 2, F] (0 gate, 1 up).
      group_sizes: int32[P, G], rows of each group; those after the last one are zeros, whatever h holds there.
      formats: of the copy along F and of the one along the rows.
      activation: with a gate.
      spec: where the activation [P, C, F] is, for Auto axes under a MeshResource.

    Returns:
      The two copies of [P, C, F]. Where both formats are one of 8 bits with blocks, h is read once and nothing else is
      written: 4 bytes are read and 2 are written per number, in place of 6 and 4. One number in some thousands may be
      rounded otherwise by the kernel ("gelu_exact" has none).

    Raises:
      As `activate` and `grouped_quantize`.
    """
    first, second = formats
    if not quantizes_both_at_once(first, second):
        return grouped_quantize_both(activate(h, activation), group_sizes, formats, spec=spec)
    name = "activate_quantize"
    activation = check_gated(name, h, activation)
    check_source(name, h, first)
    check_groups(name, h, group_sizes)
    shape = (*h.shape[:2], h.shape[3])
    blocks = tuple(block_shape(name, shape, first, axis, None, 1) for axis in (2, 1))
    of_h = None if spec is None else PartitionSpec(*tuple(spec)[:2], None, *tuple(spec)[2:])
    of_rows = None if spec is None else PartitionSpec(*tuple(spec)[:1])
    out = _op(
        not_differentiable(h, f"{name}: use grouped_dense"),
        group_sizes,
        operand_specs=(of_h, of_rows),
        activation=activation,
        format=first,
        blocks=tuple((*block[:2], 1, block[2]) for block in blocks),
    )
    along_f, along_rows = (
        QuantizedArray(data, scale, None, None, block, first, h.dtype.name)
        for (data, scale), block in zip((out[:2], out[2:]), blocks, strict=True)
    )
    return along_f, along_rows


def _reference(h, group_sizes, *, activation, format, blocks, amax_axes=(), origin=()):
    """(data, scale, data, scale) in both `blocks`, which are those of h."""
    a = gated_reference(h, activation=activation)
    blocks = tuple((*block[:2], block[3]) for block in blocks)
    return both_reference(a, group_sizes, format=format, blocks=blocks)


def _why_not(h, group_sizes, *, activation, format, blocks, **options) -> str | None:
    """What keeps these types from the kernel, or None."""
    del format, options
    if activation.function == "gelu_exact":
        return "the erf of gelu_exact and a tile do not fit into registers"
    if h.shape[0] != 1 or group_sizes.shape[1] == 0:
        return f"a device must hold one participant with groups; it holds {group_sizes.shape}"
    if not h.size:
        return "there must be elements"
    return next(filter(None, (why_no_blocks(h, block) for block in blocks)), None)


_SHARDING = "d0 d1 two f, d0 g -> d0 d1 f, d0 d1 f, d0 d1 f, d0 d1 f"
_op = Op(
    "activate_quantize",
    _reference,
    _SHARDING,
    roles="tokens . . tp, tokens . -> tokens . tp, tokens . tp, tokens . tp, tokens . tp",
    plan=BlocksPlan(_SHARDING, whole=("d1", "g", "two")),
    kernels=(Kernel.triton("expertmesh.core.kernels.activate_quantize", "both", _why_not),),
)
