"""A gated activation of rows in groups, or its gradient, quantized along its features and along the rows.

    a = activate(h)                                 as of ops/activation.py, rounded to the dtype of h
    d_h = the gradient of h for the cotangent d_a   likewise
    q = grouped_quantize(a or d_h, ...) in both directions as of quantization/quantize_rows.py

Dimension key: P participants, C rows per participant, F expert width, G groups per participant.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.op import Kernel, Op, leaf_specs
from expertmesh.core.ops.activation import (
    Activation,
    activate_at,
    check_gated,
    function_unsupported,
    gated_grad_op,
    gated_grad_reference,
    gated_reference,
    with_pair,
)
from expertmesh.core.quantization.quantize import check_source, why_no_blocks
from expertmesh.core.quantization.quantize_rows import (
    Rows,
    quantize_rows,
    quantize_rows_op,
    quantizes_both_at_once,
    why_not_one,
)
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import TensorFormat

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
    name = "activate_quantize"
    activation = check_gated(name, h, activation)
    return _copies(name, Activated(h, activation=activation), group_sizes, formats, spec, zero_rest)


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
    name = "activate_grad_quantize"
    activation = check_gated(name, h, activation)
    if d_out.shape != (*h.shape[:2], h.shape[3]):
        raise ValueError(
            f"{name}: d_out must have the shape of the activation, {(*h.shape[:2], h.shape[3])}; got {d_out.shape}; "
            "reshape it"
        )
    source = ActivatedGrad(h, d_out, activation)
    return _copies(name, source, group_sizes, formats, spec, zero_rest)


def _copies(name, source, group_sizes, formats, spec, zero_rest):
    for format in formats:
        check_source(name, source.base, format)
    options = dict(spec=spec, zero_rest=zero_rest)
    return quantize_rows(name, source, group_sizes, formats, **options)[:2]


def _why_not(source, group_sizes, multiplier, key, *, blocks, **options) -> str | None:
    """What keeps these types from the kernel, or None."""
    del multiplier, key, options
    if reason := function_unsupported(source.activation):
        return reason
    if source.activation.function == "gelu_exact":
        return f"{source.activation.function} and a tile do not fit into registers"
    if not source.base.size:
        return "there must be elements"
    # Those of h.
    reasons = (why_no_blocks(source.base, (*block[:2], 1, block[-1])) for block in blocks)
    return why_not_one(source.base, group_sizes) or next(filter(None, reasons), None)


_activate_op = dataclasses.replace(
    quantize_rows_op,
    name="activate_quantize",
    sharding="p n two f, p g, p g, key -> p n f, p n f, p g",
    whole=("n", "g", "key", "two"),
    roles="participants . . tp, participants ., participants ., . "
    "-> participants . tp, participants . tp, participants .",
    kernels=(
        Kernel.triton("expertmesh.core.kernels.activate_quantize", "activate_quantize", _why_not),
    ),
)
_activate_grad_op = dataclasses.replace(
    _activate_op,
    name="activate_grad_quantize",
    sharding="p n two f, p g, p g, key -> p n two f, p n two f, p g",
    roles="participants . . tp, participants ., participants ., . "
    "-> participants . . tp, participants . . tp, participants .",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Activated(Rows):
    """`activate(base, activation)`."""

    activation: Activation = dataclasses.field(kw_only=True, metadata=dict(static=True))
    op: ClassVar[Op] = _activate_op

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.base.shape[:2], *self.base.shape[3:])

    def rows(self) -> jax.Array:
        return gated_reference(self.base, activation=self.activation)

    def apart(self, spec: PartitionSpec | None) -> jax.Array:
        return activate_at(self.base, self.activation, spec)

    def base_spec(self, spec: PartitionSpec) -> PartitionSpec:
        return with_pair(spec)

    def fuses(self, formats) -> bool:
        return quantizes_both_at_once(*formats)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivatedGrad(Rows):
    """The gradient of `base` for the cotangent `d_out` of `activate(base, activation)`."""

    d_out: jax.Array
    activation: Activation = dataclasses.field(metadata=dict(static=True))
    op: ClassVar[Op] = _activate_grad_op

    def per_leaf(self, of_data: tuple[Any, ...], of_groups: Any) -> tuple[tuple[Any, ...], ...]:
        del of_groups
        return of_data, (*of_data[:2], *of_data[3:])

    def rows(self) -> jax.Array:
        return gated_grad_reference(self.base, self.d_out, activation=self.activation)

    def apart(self, spec: PartitionSpec | None) -> jax.Array:
        specs = spec and leaf_specs((self,), (spec,))
        operands = self.base, self.d_out
        return gated_grad_op(*operands, operand_specs=specs, activation=self.activation)

    def fuses(self, formats) -> bool:
        return quantizes_both_at_once(*formats)
