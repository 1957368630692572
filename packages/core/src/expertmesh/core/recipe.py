"""Recipes: in which number format, and with which scales, each operand of a layer's three GEMMs is quantized.

Names and defaults are Transformer Engine's; `recipe_of` takes its objects too. The tensors of a layer are `x`
(tokens), `kernel` (weight) and `grad` (the output's cotangent). Each enters two of the three GEMMs, and a format with
blocks of one row is applied once for each of them, along the dimension that this GEMM contracts:

| GEMM | operands | contraction |
|---|---|---|
| forward y = x W | x, kernel | K, the last dimension of x |
| dgrad dx = dy W^T | grad, kernel | N |
| wgrad dW = x^T dy | x, grad | tokens |
"""

import contextlib
import dataclasses
import enum
from collections.abc import Iterator

import jax

# A user context is part of jit's key: a function traced under one recipe is traced again under another.
_context = jax.make_user_context(default_value=None)


class Format(enum.Enum):
    """8-bit formats of (x and kernel, grad)."""

    E4M3 = ("float8_e4m3fn", "float8_e4m3fn")
    E5M2 = ("float8_e5m2", "float8_e5m2")
    HYBRID = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """How one operand of one GEMM is quantized. A value; part of the type of a QuantizedArray.

    Attributes:
      dtype: of the data: "float8_e4m3fn", "float8_e5m2" or "float4_e2m1fn".
      block: how many elements (across, along) the contraction share a scale; None: all of the tensor, or of one expert
        or group.
      scale: what a scale may be: "float32", "power_of_2" (a float32 without mantissa), "float8_e8m0fnu", or
        "float8_e4m3fn" (with one more float32 scale for the tensor, expert or group).
      amax_epsilon: lower bound of the amax that a "float32" or "power_of_2" block scale is made of.
      hadamard: whether blocks of 16 along the contraction are rotated first; both operands of a GEMM or none.
      stochastic: whether rounding is random, by a key.
    """

    dtype: str
    block: tuple[int, int] | None = None
    scale: str = "float32"
    amax_epsilon: float = 0.0
    hadamard: bool = False
    stochastic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFormats:
    """The format of each operand of each GEMM."""

    x: TensorFormat
    kernel: TensorFormat
    grad_dgrad: TensorFormat
    kernel_dgrad: TensorFormat
    x_wgrad: TensorFormat
    grad_wgrad: TensorFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling:
    """One scale per tensor (per group and expert in grouped ops), from its amax."""

    fp8_format: Format = Format.HYBRID

    def formats(self) -> LayerFormats:
        forward, backward = (TensorFormat(dtype=dtype) for dtype in self.fp8_format.value)
        return _by_role(forward, forward, backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """One scale per tensor, from the amax history of earlier steps; x and kernel only.

    `grad` is scaled by its own amax, as by Float8CurrentScaling: the amax of a cotangent is known in the backward only,
    from where no value but a cotangent can be returned.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"

    def formats(self) -> LayerFormats:
        return Float8CurrentScaling(fp8_format=self.fp8_format).formats()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockScaling:
    """Blocks of 1 x 128 for x and grad, of 128 x 128 for kernels."""

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = True
    amax_epsilon: float = 0.0

    def formats(self) -> LayerFormats:
        scale = "power_of_2" if self.power_2_scale else "float32"
        forward, backward = (
            TensorFormat(dtype=dtype, block=(1, 128), scale=scale, amax_epsilon=self.amax_epsilon)
            for dtype in self.fp8_format.value
        )
        return _by_role(forward, dataclasses.replace(forward, block=(128, 128)), backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling:
    """Blocks of 1 x 32 with scales that are powers of two, of one byte."""

    fp8_format: Format = Format.E4M3

    def formats(self) -> LayerFormats:
        forward, backward = (
            TensorFormat(dtype=dtype, block=(1, 32), scale="float8_e8m0fnu")
            for dtype in self.fp8_format.value
        )
        return _by_role(forward, forward, backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling:
    """Four bits, blocks of 1 x 16 (16 x 16 for kernels) with 8-bit scales under one float32 scale."""

    disable_stochastic_rounding: bool = False
    disable_rht: bool = False
    disable_2d_quantization: bool = False

    def formats(self) -> LayerFormats:
        plain = TensorFormat(dtype="float4_e2m1fn", block=(1, 16), scale="float8_e4m3fn")
        square = dataclasses.replace(plain, block=(16, 16))
        kernel = plain if self.disable_2d_quantization else square
        rotated = dataclasses.replace(plain, hadamard=not self.disable_rht)
        stochastic = not self.disable_stochastic_rounding
        return LayerFormats(
            x=plain,
            kernel=kernel,
            grad_dgrad=dataclasses.replace(plain, stochastic=stochastic),
            kernel_dgrad=kernel,
            x_wgrad=rotated,
            grad_wgrad=dataclasses.replace(rotated, stochastic=stochastic),
        )


Recipe = (
    DelayedScaling
    | Float8CurrentScaling
    | Float8BlockScaling
    | MXFP8BlockScaling
    | NVFP4BlockScaling
)


def _by_role(x: TensorFormat, kernel: TensorFormat, grad: TensorFormat) -> LayerFormats:
    return LayerFormats(
        x=x, kernel=kernel, grad_dgrad=grad, kernel_dgrad=kernel, x_wgrad=x, grad_wgrad=grad
    )


@contextlib.contextmanager
def autocast(recipe: Recipe | None) -> Iterator[Recipe | None]:
    """Makes `recipe` the one in context, None for none; restores the former on exit, also after an exception."""
    with _context(recipe):
        yield recipe


def current_recipe() -> Recipe | None:
    """The recipe of the innermost `autocast`, or None."""
    return _context.value
