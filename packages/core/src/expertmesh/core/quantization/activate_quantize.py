"""A gated activation of rows in groups, or its gradient, quantized along its features and along the rows.

    a = activate(h)                                 as of ops/activation.py, rounded to the dtype of h
    d_h = the gradient of h for the cotangent d_a   likewise
    q = grouped_quantize(a or d_h, ...) in both directions as of quantization/quantize_rows.py

With routing weights a, d_h, and d_weights are those of ops/activate_rows.py: a row that holds no token is zeros. h may
be quantized along its features, as it is where a backward keeps it in 8 bits.

Dimension key: P participants, C rows per participant, F expert width, G groups per participant.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.activate_rows import (
    activate_rows_grad_op,
    activate_rows_grad_reference,
    activate_rows_op,
    activate_rows_reference,
)
from expertmesh.core.ops.activation import (
    Activation,
    activation_op,
    check_gated,
    function_unsupported,
    gated_grad_op,
    gated_grad_reference,
    gated_reference,
    with_pair,
)
from expertmesh.core.quantization.quantize import blocks_unsupported, check_source
from expertmesh.core.quantization.quantize_rows import (
    Copies,
    Formats,
    Rows,
    participant_unsupported,
    per_group,
    quantize_rows,
    quantize_rows_op,
    quantizes_both_at_once,
)
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import TensorFormat

__all__ = ["activate_grad_quantize", "activate_quantize"]


def activate_quantize(
    h: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    formats: tuple[TensorFormat, TensorFormat],
    activation: str | Activation,
    *,
    weights: jax.Array | None = None,
    row_source: jax.Array | None = None,
    spec: PartitionSpec | None = None,
) -> Copies:
    """`grouped_quantize_both(activate(h, activation), group_sizes, formats)`, times the rows' weights if given.

    Args:
      h: float32, bfloat16 or float16 [P, C, 2, F] (0 gate, 1 up), or these quantized along F.
      group_sizes: int32[P, G], rows of each group.
      formats: of the copy along F and of the one along the rows.
      activation: with a gate.
      weights, row_source: float32[P, C] and int[P, C], both or none: a row's weight, and where its token comes from;
        negative where it holds none, whatever h and its weight hold.
      spec: where the activation [P, C, F] is, for Auto axes under a MeshResource.

    Returns:
      Copies of [P, C, F], undefined in padding rows. Where both formats are one of 8 bits with blocks, h is read once
      and nothing else is written: 4 bytes are read and 2 are written per number, in place of 6 and 4. One number in
      some thousands may be rounded otherwise by the kernel ("gelu_exact" has none). With weights and one format without
      blocks the pass that makes the rows finds their amax: 6 bytes are read and 4 are written, in place of 8 and 4.

    Raises:
      As `activate` and `grouped_quantize`.
    """
    name = "activate_quantize"
    activation = check_gated(name, h, activation, quantized=True)
    source = Activated(h, weights, row_source, activation)
    return _copies(name, source, group_sizes, formats, spec)


def activate_grad_quantize(
    h: jax.Array | QuantizedArray,
    d_out: jax.Array,
    group_sizes: jax.Array,
    formats: tuple[TensorFormat, TensorFormat],
    activation: str | Activation,
    *,
    weights: jax.Array | None = None,
    row_source: jax.Array | None = None,
    spec: PartitionSpec | None = None,
) -> Copies:
    """`grouped_quantize_both(d_h, group_sizes, formats)` of the gradient d_h of `activate(h, activation)`.

    Args:
      h: float32, bfloat16 or float16 [P, C, 2, F] (0 gate, 1 up), or these quantized along F.
      d_out: float[P, C, F], the activation's cotangent.
      group_sizes: int32[P, G], rows of each group.
      formats: of the copy along F and of the one along the rows.
      activation: with a gate.
      weights, row_source: as of `activate_quantize`; d_out is then the cotangent of the weighted activation.
      spec: where h is, for Auto axes under a MeshResource.

    Returns:
      Copies of [P, C, 2, F], undefined in padding rows, and with weights their gradient. Where both formats are one of
      8 bits with blocks, h and d_out are read once and nothing else is written: 3 bytes are read and 2 are written per
      number of h, in place of 5 and 4. One number in some thousands may be rounded otherwise by the kernel
      ("gelu_exact" has none). With weights and one format without blocks the amax is found where the rows are made.

    Raises:
      As `activate` and `grouped_quantize`; ValueError: `d_out` of another shape.
    """
    name = "activate_grad_quantize"
    activation = check_gated(name, h, activation, quantized=True)
    if d_out.shape != (*h.shape[:2], h.shape[3]):
        raise ValueError(
            f"{name}: d_out must have the shape of the activation, {(*h.shape[:2], h.shape[3])}; got {d_out.shape}; "
            "reshape it"
        )
    source = ActivatedGrad(h, weights, row_source, activation, d_out)
    return _copies(name, source, group_sizes, formats, spec)


def _copies(
    name: str,
    source: "Activated",
    group_sizes: jax.Array,
    formats: tuple[TensorFormat, TensorFormat],
    spec: PartitionSpec | None,
) -> Copies:
    for format in formats:
        check_source(name, source.base, format, quantized=True)
    return quantize_rows(name, source, group_sizes, formats, spec=spec)


def in_blocks_unsupported(activation: Activation) -> str | None:
    """What keeps an activation from kernels that quantize it in blocks, or None."""
    if activation.function == "gelu_exact":
        return f"{activation.function} and a tile do not fit into registers"
    return function_unsupported(activation)


def activate_quantize_unsupported(
    source: "Activated",
    group_sizes: jax.Array,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    *,
    blocks: tuple[tuple[int, ...], ...],
    **options: Any,
) -> str | None:
    """What keeps these types from the kernel, or None."""
    del multiplier, key, options
    of_function = in_blocks_unsupported if blocks[0] else function_unsupported
    if reason := of_function(source.activation):
        return reason
    if not source.base.size:
        return "there must be elements"
    # Those of h.
    in_h = [(*block[:2], 1, block[-1]) if block else () for block in blocks]
    if source.block and source.block != in_h[0]:
        return f"h must be in blocks of what is made of it, {in_h[0]}; it is in {source.block}"
    reasons = (blocks_unsupported(source.base, block) for block in in_h)
    return participant_unsupported(source.base, group_sizes) or next(filter(None, reasons), None)


_activate_op = dataclasses.replace(
    quantize_rows_op,
    name="activate_quantize",
    sharding="p n two f, p g, p g, key -> p n f, p n f, p g, p n",
    whole=("n", "g", "key", "two"),
    roles="participants . . tp, participants ., participants ., . "
    "-> participants . tp, participants . tp, participants ., participants .",
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.activate_quantize",
            "activate_quantize",
            activate_quantize_unsupported,
        ),
    ),
)
_activate_grad_op = dataclasses.replace(
    _activate_op,
    name="activate_grad_quantize",
    sharding="p n two f, p g, p g, key -> p n two f, p n two f, p g, p n",
    summed=("f",),
    roles="participants . . tp, participants ., participants ., . "
    "-> participants . . tp, participants . . tp, participants ., participants .",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Activated(Rows):
    """`activate(base, activation)`, times `weights` in rows whose `row_source` is not negative, if these are given."""

    weights: jax.Array | None
    row_source: jax.Array | None
    activation: Activation = dataclasses.field(metadata=dict(static=True))
    op: ClassVar[Op] = _activate_op

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.base.shape[:2], self.base.shape[-1])

    def per_leaf(self, of_data: tuple[Any, ...], of_groups: Any) -> tuple[tuple[Any, ...], ...]:
        return *super().per_leaf(of_data, of_groups), *self._of_routing(of_data)

    def _of_routing(self, of_data: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        return () if self.weights is None else (of_data[:2], of_data[:2])

    def rows(self) -> jax.Array:
        if self.weights is None:
            return gated_reference(self._numbers(), activation=self.activation)
        operands: Any = self._numbers(), self.weights, self.row_source, None
        return activate_rows_reference(*operands, activation=self.activation)

    def apart(
        self, group_sizes: jax.Array, spec: PartitionSpec | None
    ) -> tuple[jax.Array, jax.Array | None]:
        if self.weights is None:
            of_h = spec and self.base_spec(spec)
            options: dict[str, Any] = dict(activation=self.activation, operand_specs=(of_h,))
            return activation_op(self._numbers_apart(spec), **options), None
        operands = self._numbers_apart(spec), self.weights, self.row_source, group_sizes
        specs = None
        if spec is not None:
            of_rows = PartitionSpec(*spec[:2])
            specs = self.base_spec(spec), of_rows, of_rows, PartitionSpec(*spec[:1])
        a = activate_rows_op(*operands, activation=self.activation, operand_specs=specs)
        return a, None

    def base_spec(self, spec: PartitionSpec) -> PartitionSpec:
        return with_pair(spec) if self.activation.gated else spec

    def fuses(self, formats: Formats) -> bool:
        if not self.activation.gated:
            return False
        # With a scale per group it finds each row's amax where it writes the row.
        return quantizes_both_at_once(*formats) or self.weights is not None and per_group(*formats)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivatedGrad(Activated):
    """The gradient of `base` for the cotangent `d_out` of the rows of `Activated`."""

    d_out: jax.Array
    op: ClassVar[Op] = _activate_grad_op

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    def per_leaf(self, of_data: tuple[Any, ...], of_groups: Any) -> tuple[tuple[Any, ...], ...]:
        return *super().per_leaf(of_data, of_groups), (*of_data[:2], *of_data[3:])

    def _gradients(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        operands: Any = self._numbers(), self.d_out, self.weights, self.row_source, None
        return activate_rows_grad_reference(*operands, activation=self.activation)

    def rows(self) -> jax.Array:
        if self.weights is None:
            return gated_grad_reference(self._numbers(), self.d_out, activation=self.activation)
        return self._gradients()[0]

    def d_weights(self) -> jax.Array | None:
        return None if self.weights is None else self._gradients()[1]

    def d_weights_like(self) -> jax.Array | None:
        return self.weights

    def apart(
        self, group_sizes: jax.Array, spec: PartitionSpec | None
    ) -> tuple[jax.Array, jax.Array | None]:
        if self.weights is None:
            specs = spec and (spec, PartitionSpec(*spec[:2], *spec[3:]))
            options = dict(operand_specs=specs, activation=self.activation)
            return gated_grad_op(self._numbers_apart(spec), self.d_out, **options), None
        return self.with_activation(group_sizes, spec)[:2]

    def with_activation(
        self, group_sizes: jax.Array, spec: PartitionSpec | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(the rows at `spec`, `d_weights`, those of `Activated`) by an op of their own; there must be weights."""
        operands = self._numbers_apart(spec), self.d_out, self.weights, self.row_source, group_sizes
        specs = None
        if spec is not None:
            of_d, of_rows = PartitionSpec(*spec[:2], *spec[-1:]), PartitionSpec(*spec[:2])
            specs = spec, of_d, of_rows, of_rows, PartitionSpec(*spec[:1])
        out: tuple[jax.Array, jax.Array, jax.Array] = activate_rows_grad_op(
            *operands, operand_specs=specs, activation=self.activation
        )
        return out

    def base_spec(self, spec: PartitionSpec) -> PartitionSpec:
        return spec
