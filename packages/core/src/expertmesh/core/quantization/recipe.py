"""Recipes: in which number format, and with which scales, each operand of a layer's three GEMMs is quantized.

Names and defaults are Transformer Engine's; `as_recipe` takes its objects too. The tensors of a layer are `x`
(tokens), `weight` and `grad` (the output's cotangent). Each enters two of the three GEMMs, and a format with
blocks of one row is applied once for each of them, along the dimension that this GEMM contracts:

| GEMM | operands | contraction |
|---|---|---|
| forward y = x W | x, weight | K, the last dimension of x |
| dgrad dx = dy W^T | grad, weight | N |
| wgrad dW = x^T dy | x, grad | tokens |
"""

import abc
import contextlib
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from expertmesh.core.config import field_names

# A user context is part of jit's key: a function traced under one recipe is traced again under another.
_context = jax.make_user_context(default_value=None)


class Format(enum.Enum):
    """8-bit formats of (x and weight, grad)."""

    E4M3 = ("float8_e4m3fn", "float8_e4m3fn")
    E5M2 = ("float8_e5m2", "float8_e5m2")
    HYBRID = ("float8_e4m3fn", "float8_e5m2")


_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
_SCALES = ("float32", "power_of_2", "float8_e8m0fnu", "float8_e4m3fn")


def _is_block(block: object) -> bool:
    return (
        isinstance(block, tuple)
        and len(block) == 2
        and all(isinstance(b, int) and b > 0 for b in block)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """How one operand of one GEMM is quantized. A value; part of the type of a QuantizedArray.

    Attributes:
      dtype: of the data: "float8_e4m3fn", "float8_e5m2" or "float4_e2m1fn".
      block: how many elements (across, along) the contraction share a scale; None: all of the tensor, or of one expert
        or group.
      scale: what a scale may be: "float32", "power_of_2" (a float32 without mantissa), "float8_e8m0fnu", or
        "float8_e4m3fn" (with one more float32 scale for the tensor, expert or group).
      amax_epsilon: lower bound of the amax from which a "float32" or "power_of_2" block scale is computed.
      hadamard: whether blocks of 16 along the contraction are rotated first; both operands of a GEMM or none.
      stochastic: whether rounding is stochastic, by a key; 4 bits only.
      use_split_accumulator: of x: whether the forward's GEMM adds products of 128 of its contraction in float32, not in
        the tensor cores' accumulator; without blocks only. GEMMs of blocks always add so, and so do those of gradients.

    Raises:
      ValueError: an unknown dtype or kind of scale, or a combination that has no meaning: a tensor's scale that is not
        float32, two levels for other than 4 bits, a rotation of blocks that are not 1 x 16.
    """

    dtype: str
    block: tuple[int, int] | None = None
    scale: str = "float32"
    amax_epsilon: float = 0.0
    hadamard: bool = False
    stochastic: bool = False
    use_split_accumulator: bool = False

    def __post_init__(self) -> None:
        def require(ok: bool, rule: str, remedy: str) -> None:
            if not ok:
                raise ValueError(f"TensorFormat: {rule}; got {self}; {remedy}")

        require(self.dtype in _DTYPES, f"dtype must be one of {', '.join(_DTYPES)}", "choose one")
        require(self.scale in _SCALES, f"scale must be one of {', '.join(_SCALES)}", "choose one")
        four_bits = self.dtype == "float4_e2m1fn"
        require(
            (self.scale == "float8_e4m3fn") == four_bits,
            "4 bits, and no others, must have scales in float8_e4m3fn",
            "change the scale or the dtype",
        )
        require(
            self.scale == "float32" if self.block is None else _is_block(self.block),
            "a block must be two positive integers; without one the scale must be float32",
            "write for example block=(1, 128)",
        )
        require(
            not self.hadamard or self.block == (1, 16),
            "rotated blocks must be 1 x 16",
            "set hadamard=False",
        )
        require(
            not self.stochastic or four_bits, "only 4 bits round stochastically", "round nearest"
        )
        require(
            0 <= self.amax_epsilon < float("inf"),
            "amax_epsilon must be finite and at least 0",
            "pass 0.0 for none",
        )
        require(
            self.block is None or not self.use_split_accumulator,
            "products of blocks are always added in float32",
            "set use_split_accumulator=False",
        )


def quantized_once(first: TensorFormat, second: TensorFormat) -> bool:
    """Whether data in the first format are those in the second, whatever dimension a GEMM contracts."""
    return first == second and first.block is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFormats:
    """The format of each operand of each GEMM."""

    x: TensorFormat
    weight: TensorFormat
    grad_dgrad: TensorFormat
    weight_dgrad: TensorFormat
    x_wgrad: TensorFormat
    grad_wgrad: TensorFormat

    @property
    def is_stochastic(self) -> bool:
        """Whether gradients are rounded stochastically."""
        return self.grad_dgrad.stochastic or self.grad_wgrad.stochastic


class Recipe(abc.ABC):
    """How a layer's operands are quantized. Derive frozen dataclasses from it: a recipe is part of jit's key."""

    @abc.abstractmethod
    def formats(self) -> LayerFormats:
        """The format of each operand of each GEMM."""

    def to_dict(self) -> dict[str, Any]:
        """A dict from which `as_recipe` makes this recipe: its name in RECIPES under "recipe", and its fields.

        Raises:
          TypeError: a recipe of your own, which has no such name.
        """
        names = [name for name, cls in RECIPES.items() if cls is type(self)]
        if not names:
            raise TypeError(
                f"Recipe.to_dict: the recipe must be one of {', '.join(RECIPES)}; got {self}; "
                "keep the code that makes it"
            )
        fields = {name: getattr(self, name) for name in field_names(type(self))}
        options = {k: v.name if isinstance(v, Format) else v for k, v in fields.items()}
        return {"recipe": names[0], **options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor (per group and expert in grouped ops), from its amax.

    In a block whose tokens are on one device, tokens that have a row are one tensor, and so are their cotangents.

    Attributes:
      fp8_format: of x and the weight, and of grad.
      use_split_accumulator: of the forward, as in `TensorFormat`; Transformer Engine's `fp8_gemm_fprop` has it.
    """

    fp8_format: Format = Format.HYBRID
    use_split_accumulator: bool = False

    def __post_init__(self) -> None:
        _check_format(self)

    def formats(self) -> LayerFormats:
        forward, backward = (TensorFormat(dtype=dtype) for dtype in self.fp8_format.value)
        forward = dataclasses.replace(forward, use_split_accumulator=self.use_split_accumulator)
        return _by_role(forward, forward, backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amax history of earlier steps; x and weight only.

    `grad` is scaled by its own amax, as under Float8CurrentScaling. The backward alone knows the amax of a cotangent,
    and it can return nothing but cotangents, so no later step could use that amax.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    use_split_accumulator: bool = False

    def __post_init__(self) -> None:
        _check_format(self)
        _require(self, _is_count(self.margin, 0), "margin must be an integer, at least 0")
        _require(self, _is_count(self.amax_history_len, 1), "amax_history_len must be at least 1")
        _require(
            self,
            self.amax_compute_algo in ("max", "most_recent"),
            "amax_compute_algo must be 'max' or 'most_recent'",
        )

    def formats(self) -> LayerFormats:
        options: dict[str, Any] = dict(use_split_accumulator=self.use_split_accumulator)
        return Float8CurrentScaling(fp8_format=self.fp8_format, **options).formats()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """Blocks of 1 x 128 for x and grad, of 128 x 128 for weights."""

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_format(self)
        _require(
            self,
            0 <= self.amax_epsilon < float("inf"),
            "amax_epsilon must be finite and at least 0",
        )

    def formats(self) -> LayerFormats:
        scale = "power_of_2" if self.power_2_scale else "float32"
        forward, backward = (
            TensorFormat(dtype=dtype, block=(1, 128), scale=scale, amax_epsilon=self.amax_epsilon)
            for dtype in self.fp8_format.value
        )
        return _by_role(forward, dataclasses.replace(forward, block=(128, 128)), backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """Blocks of 1 x 32 with scales that are powers of two, of one byte."""

    fp8_format: Format = Format.E4M3

    def __post_init__(self) -> None:
        _check_format(self)

    def formats(self) -> LayerFormats:
        forward, backward = (
            TensorFormat(dtype=dtype, block=(1, 32), scale="float8_e8m0fnu")
            for dtype in self.fp8_format.value
        )
        return _by_role(forward, forward, backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """Four bits, blocks of 1 x 16 (16 x 16 for weights) with 8-bit scales under one float32 scale."""

    disable_stochastic_rounding: bool = False
    disable_rht: bool = False
    disable_2d_quantization: bool = False

    def formats(self) -> LayerFormats:
        plain = TensorFormat(dtype="float4_e2m1fn", block=(1, 16), scale="float8_e4m3fn")
        square = dataclasses.replace(plain, block=(16, 16))
        weight = plain if self.disable_2d_quantization else square
        rotated = dataclasses.replace(plain, hadamard=not self.disable_rht)
        stochastic = not self.disable_stochastic_rounding
        return LayerFormats(
            x=plain,
            weight=weight,
            grad_dgrad=dataclasses.replace(plain, stochastic=stochastic),
            weight_dgrad=weight,
            x_wgrad=rotated,
            grad_wgrad=dataclasses.replace(rotated, stochastic=stochastic),
        )


def _require(recipe: Recipe, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"{type(recipe).__name__}: {rule}; got {recipe}; change it")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _check_format(recipe: Any) -> None:
    if not isinstance(recipe.fp8_format, Format):
        raise TypeError(
            f"{type(recipe).__name__}: fp8_format must be a Format; got fp8_format={recipe.fp8_format!r}; "
            "pass for example Format.HYBRID"
        )
    _require(
        recipe,
        recipe.fp8_format != Format.E5M2,
        "x and weight must not both be float8_e5m2, which no GEMM multiplies with itself",
    )


def _by_role(x: TensorFormat, weight: TensorFormat, grad: TensorFormat) -> LayerFormats:
    return LayerFormats(
        x=x, weight=weight, grad_dgrad=grad, weight_dgrad=weight, x_wgrad=x, grad_wgrad=grad
    )


RECIPES: Mapping[str, type[Recipe]] = types.MappingProxyType(
    {
        "fp8_delayed": DelayedScaling,
        "fp8_current": Float8CurrentScaling,
        "fp8_block": Float8BlockScaling,
        "mxfp8": MXFP8BlockScaling,
        "nvfp4": NVFP4BlockScaling,
    }
)


def as_recipe(obj: Any) -> Recipe | None:
    """Converts a name or another library's object to a recipe.

    Args:
      obj: a recipe; None; a name from `RECIPES` or the name of a recipe's class, for its defaults; a dict as
        `Recipe.to_dict` returns it, with such a name under "recipe" and options; or an object of Transformer Engine's
        class of the same name, read by its attributes.

    Returns:
      A recipe, None for None.

    Raises:
      ValueError: an unknown name or option; a Transformer Engine recipe with an option that has no counterpart here.
      TypeError: an object of another class.
    """
    if obj is None or isinstance(obj, Recipe):
        return obj
    if isinstance(obj, str):
        return _named(obj)()
    if isinstance(obj, Mapping):
        return _of_options(**obj)
    classes = _classes()
    if type(obj).__name__ not in classes or isinstance(obj, type):
        raise TypeError(
            f"as_recipe: a recipe must be one of {', '.join(classes)}, or a name; got {obj!r}; "
            "pass for example Float8BlockScaling()"
        )
    return _translated(obj, classes[type(obj).__name__])


def _classes() -> dict[str, type[Recipe]]:
    return {cls.__name__: cls for cls in RECIPES.values()}


def _named(name: object) -> type[Recipe]:
    known = {**RECIPES, **_classes()}
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"as_recipe: a name must be one of {', '.join(known)}; got {name!r}; choose one of these"
        )
    return known[name]


def _of_options(recipe: object = None, **options: Any) -> Recipe:
    if recipe is None:
        raise ValueError(
            f"as_recipe: a dict must have a name under 'recipe'; got {', '.join(options) or 'nothing'}; add for "
            "example recipe='fp8_block'"
        )
    cls: type[Any] = _named(recipe)
    names = [field.name for field in dataclasses.fields(cls)]
    if unknown := [name for name in options if name not in names]:
        raise ValueError(
            f"as_recipe: options of {cls.__name__} must be of {', '.join(names)}; got also {', '.join(unknown)}; "
            "remove or rename them"
        )
    if options.get("fp8_format") in Format.__members__:
        options["fp8_format"] = Format[options["fp8_format"]]
    made: Recipe = cls(**options)
    return made


# Options of Transformer Engine's recipes without a counterpart, and the value that means what is done here. Those of
# attention are not looked at, nor those of the accumulator of other GEMMs than per-tensor FP8's forward: it is split.
_ONLY: Mapping[str, object] = {
    "scaling_factor_compute_algo": None,
    "reduce_amax": True,
    "backward_override": None,
    "use_power_2_scales": False,
    "x_block_scaling_dim": 1,
    "w_block_scaling_dim": 2,
    "grad_block_scaling_dim": 1,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
}


def _translated(obj: Any, cls: type[Any]) -> Recipe:
    def refuse(option: str, value: object, want: object) -> None:
        raise ValueError(
            f"as_recipe: {cls.__name__}.{option} must be {want!r}; got {option}={value!r}; leave it at its default"
        )

    for option, want in _ONLY.items():
        if getattr(obj, option, want) != want:
            refuse(option, getattr(obj, option), want)
    names = {field.name for field in dataclasses.fields(cls)}
    if "margin" not in names and getattr(obj, "margin", 0) != 0:
        refuse("margin", obj.margin, 0)
    options = {name: getattr(obj, name) for name in names if hasattr(obj, name)}
    if "fp8_format" in options:
        options["fp8_format"] = Format[options["fp8_format"].name]
    if "use_split_accumulator" in names and hasattr(obj, "fp8_gemm_fprop"):
        options["use_split_accumulator"] = bool(obj.fp8_gemm_fprop.use_split_accumulator)
    if cls is Float8BlockScaling:
        options |= _block_options(obj, refuse)
    recipe: Recipe = cls(**options)
    return recipe


def _block_options(obj: Any, refuse: Callable[[str, object, object], None]) -> dict[str, Any]:
    """Of x, which those of the weight and the gradients must equal."""
    parts = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    found = [
        (getattr(obj, part).power_2_scale, getattr(obj, part).amax_epsilon)
        for part in parts
        if hasattr(obj, part)
    ]
    if not found:
        return {}
    if len(set(found)) > 1:
        refuse("fp8_quant_*", found, found[0])
    return dict(zip(("power_2_scale", "amax_epsilon"), found[0], strict=True))


def required_alignment(recipe: Recipe | str | None) -> int:
    """The number of rows that each group must start at a multiple of, for the weight gradients of a grouped layer.

    1 without a recipe, 16 for scales per tensor and for NVFP4BlockScaling, 32 for MXFP8BlockScaling, 128 for
    Float8BlockScaling. For any block format this is the block; recipes by name as in `as_recipe`.
    """
    recipe = as_recipe(recipe)
    if recipe is None:
        return 1
    block = recipe.formats().x_wgrad.block
    # NVIDIA's GEMMs take 8-bit operands by 16 numbers along the contraction.
    return 16 if block is None else block[1]


@contextlib.contextmanager
def autocast(recipe: Recipe | str | None) -> Iterator[Recipe | None]:
    """Puts `recipe` in context: anything that `as_recipe` takes, or None for no recipe.

    The previous recipe is restored on exit, also after an exception. The recipe is part of jit's cache key.
    """
    recipe = as_recipe(recipe)
    with _context(recipe):
        yield recipe


def current_recipe() -> Recipe | None:
    """The recipe of the innermost `autocast`, or None."""
    recipe: Recipe | None = _context.value
    return recipe
