"""QuantizedArray: 8- or 4-bit data with the scales that turn it back into numbers."""

import dataclasses

import jax

from expertmesh.core.recipe import TensorFormat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A pytree: an argument or result of jit, a scan carry, a residual, a checkpoint's leaf.

    `dequantized = data * scale * tensor_scale`, each scale repeated over the elements that share it.

    Attributes:
      data: [..., in the shape of what was quantized], of `format.dtype`.
      scale: with blocks, `ceil(shape / block)` of `format.scale`'s dtype. Without: float32[] of a tensor, [E] of experts,
        [P, G] of groups of rows.
      tensor_scale: float32, in the shape that `scale` has without blocks; None unless `format.scale` has two levels.
      group_sizes: int[P, G] of grouped rows whose scales are per group; else None.
      block: elements of each dimension that share a scale; () without blocks (static).
      format: (static).
      dtype: what dequantizing gives: the dtype of what was quantized (static).
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
