"""Recipes: the roles of their formats, names, Transformer Engine's objects, the context, what runs emulated."""

import dataclasses
import enum
import re
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from expertmesh.core import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    TensorFormat,
    as_recipe,
    autocast,
    current_recipe,
    features,
    is_supported,
    required_alignment,
    support,
)
from expertmesh.core.quantization.recipe import quantized_once

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def test_roles():
    """dy is e5m2 in hybrid recipes; 1-D formats along each contraction; squares of the weight for both."""
    hybrid = DelayedScaling().formats()
    assert (hybrid.x.dtype, hybrid.weight_dgrad.dtype) == (E4M3, E4M3)
    assert (hybrid.grad_dgrad.dtype, hybrid.grad_wgrad.dtype) == (E5M2, E5M2)
    assert Float8CurrentScaling(fp8_format=Format.E4M3).formats().grad_wgrad.dtype == E4M3
    block = Float8BlockScaling().formats()
    assert (block.x.block, block.weight.block, block.grad_wgrad.block) == (
        (1, 128),
        (128, 128),
        (1, 128),
    )
    assert block.x.scale == "power_of_2" and block.grad_dgrad.dtype == E4M3
    assert Float8BlockScaling(power_2_scale=False).formats().weight.scale == "float32"
    assert MXFP8BlockScaling().formats().weight == MXFP8BlockScaling().formats().x
    nv = NVFP4BlockScaling().formats()
    assert [f.name for f in dataclasses.fields(nv) if getattr(nv, f.name).hadamard] == [
        "x_wgrad",
        "grad_wgrad",
    ]
    assert [f.name for f in dataclasses.fields(nv) if getattr(nv, f.name).stochastic] == [
        "grad_dgrad",
        "grad_wgrad",
    ]
    assert nv.weight.block == nv.weight_dgrad.block == (16, 16)
    plain = NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    )
    assert set(vars(plain.formats()).values()) == {plain.formats().x}


def test_the_fields_of_recipes():
    """A new field goes behind these and has a default."""
    fields = {
        cls.__name__: [(f.name, f.default) for f in dataclasses.fields(cls)]
        for cls in RECIPES.values()
    }
    assert fields == {
        "DelayedScaling": [
            ("margin", 0),
            ("fp8_format", Format.HYBRID),
            ("amax_history_len", 1024),
            ("amax_compute_algo", "max"),
            ("use_split_accumulator", False),
        ],
        "Float8CurrentScaling": [
            ("fp8_format", Format.HYBRID),
            ("use_split_accumulator", False),
        ],
        "Float8BlockScaling": [
            ("fp8_format", Format.E4M3),
            ("power_2_scale", True),
            ("amax_epsilon", 0.0),
        ],
        "MXFP8BlockScaling": [("fp8_format", Format.E4M3)],
        "NVFP4BlockScaling": [
            ("disable_stochastic_rounding", False),
            ("disable_rht", False),
            ("disable_2d_quantization", False),
        ],
    }


def test_options_reach_the_formats():
    assert TensorFormat(dtype=E4M3) == TensorFormat(
        dtype=E4M3,
        block=None,
        scale="float32",
        amax_epsilon=0.0,
        hadamard=False,
        stochastic=False,
    )
    assert MXFP8BlockScaling().formats().x == TensorFormat(
        dtype=E4M3, block=(1, 32), scale="float8_e8m0fnu"
    )
    assert DelayedScaling(fp8_format=Format.E4M3).formats().grad_wgrad.dtype == E4M3
    floored = Float8BlockScaling(amax_epsilon=0.5).formats()
    assert {f.amax_epsilon for f in vars(floored).values()} == {0.5}
    assert DelayedScaling(amax_history_len=1).amax_history_len == 1
    for recipe in (DelayedScaling, Float8CurrentScaling):
        assert recipe(use_split_accumulator=True).formats().x.use_split_accumulator
        assert not recipe().formats().x.use_split_accumulator


def test_one_copy_serves_both_gemms_where_formats_are_equal_and_of_tensors():
    tensor, block = TensorFormat(dtype=E4M3), TensorFormat(dtype=E4M3, block=(1, 128))
    assert quantized_once(tensor, tensor)
    assert not quantized_once(tensor, TensorFormat(dtype=E5M2))
    assert not quantized_once(block, block)


@pytest.mark.parametrize("role", ["grad_dgrad", "grad_wgrad"])
def test_one_gradient_rounded_at_random_makes_a_layer_need_a_key(role):
    formats = NVFP4BlockScaling(disable_stochastic_rounding=True).formats()
    assert not formats.is_stochastic
    random = dataclasses.replace(getattr(formats, role), stochastic=True)
    assert dataclasses.replace(formats, **{role: random}).is_stochastic


@pytest.mark.parametrize(
    "name, rows", list(zip([None, *RECIPES], [1, 16, 16, 128, 32, 16], strict=True))
)
def test_names_and_alignment(name, rows):
    recipe = as_recipe(name)
    assert recipe is None or recipe == RECIPES[name]() == as_recipe(type(recipe).__name__)
    assert as_recipe(recipe) is recipe and hash(recipe) == hash(as_recipe(name))
    assert required_alignment(recipe) == required_alignment(name) == rows


class TheirFormat(enum.Enum):
    E4M3 = (448, 448)
    HYBRID = (448, 57344)


def theirs(name, **attributes):
    """An object like Transformer Engine's: its class name, its attributes."""
    return type(name, (), {"fp8_format": TheirFormat.E4M3, **attributes})()


def q_params(power_2_scale=True, amax_epsilon=0.0):
    params = types.SimpleNamespace(power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    return {f"fp8_quant_{part}": params for part in ("fwd_inp", "fwd_weight", "bwd_grad")}


ITS_GEMMS = {
    f"fp8_gemm_{which}": types.SimpleNamespace(use_split_accumulator=which == "fprop")
    for which in ("fprop", "dgrad", "wgrad")
}
E4M3_SPLIT = dict(fp8_format=Format.E4M3, use_split_accumulator=True)


@pytest.mark.parametrize(
    "obj, want",
    [
        (
            theirs("DelayedScaling", margin=1, amax_history_len=4, amax_compute_algo="max"),
            DelayedScaling(margin=1, amax_history_len=4, fp8_format=Format.E4M3),
        ),
        (
            theirs("Float8CurrentScaling", fp8_format=TheirFormat.HYBRID),
            Float8CurrentScaling(),
        ),
        *(
            (theirs(cls.__name__, **ITS_GEMMS), cls(**E4M3_SPLIT))
            for cls in (DelayedScaling, Float8CurrentScaling)
        ),
        (theirs("MXFP8BlockScaling", margin=0), MXFP8BlockScaling()),
        (theirs("Float8BlockScaling", **ITS_GEMMS), Float8BlockScaling()),
        (
            theirs("NVFP4BlockScaling", disable_rht=True, nvfp4_4over6="none"),
            NVFP4BlockScaling(disable_rht=True),
        ),
        (
            theirs("Float8BlockScaling", w_block_scaling_dim=2, **q_params(False, 0.5)),
            Float8BlockScaling(power_2_scale=False, amax_epsilon=0.5),
        ),
    ],
)
def test_objects_of_transformer_engine(obj, want):
    assert as_recipe(obj) == want


@pytest.mark.parametrize(
    "obj, error, words",
    [
        ("fp9", ValueError, ["'fp9'", "mxfp8", "MXFP8BlockScaling"]),
        (3, TypeError, ["3", "NVFP4BlockScaling"]),
        (MXFP8BlockScaling, TypeError, ["MXFP8BlockScaling"]),
        (theirs("MXFP8BlockScaling", margin=2), ValueError, ["margin=2", "0"]),
        (theirs("DelayedScaling", reduce_amax=False), ValueError, ["reduce_amax=False"]),
        (theirs("DelayedScaling", amax_compute_algo=max), ValueError, ["amax_compute_algo"]),
        (
            theirs("Float8BlockScaling", x_block_scaling_dim=2),
            ValueError,
            ["x_block_scaling_dim=2"],
        ),
        (
            theirs(
                "Float8BlockScaling",
                **q_params() | {"fp8_quant_bwd_grad": q_params(False)["fp8_quant_fwd_inp"]},
            ),
            ValueError,
            ["fp8_quant_*"],
        ),
        (theirs("NVFP4BlockScaling", nvfp4_4over6="all"), ValueError, ["nvfp4_4over6='all'"]),
    ],
)
def test_what_is_no_recipe(obj, error, words):
    with pytest.raises(error) as info:
        as_recipe(obj)
    assert all(word in str(info.value) for word in words)


@pytest.mark.parametrize(
    "option, default, other",
    [
        ("scaling_factor_compute_algo", None, max),
        ("reduce_amax", True, False),
        ("backward_override", None, "high_precision"),
        ("use_power_2_scales", False, True),
        ("x_block_scaling_dim", 1, 2),
        ("w_block_scaling_dim", 2, 1),
        ("grad_block_scaling_dim", 1, 2),
        ("row_scaled_activation", False, True),
        ("nvfp4_4over6", "none", "all"),
    ],
)
def test_options_without_a_counterpart_are_taken_at_their_default(option, default, other):
    assert as_recipe(theirs("MXFP8BlockScaling", **{option: default})) == MXFP8BlockScaling()
    with pytest.raises(ValueError, match=option):
        as_recipe(theirs("MXFP8BlockScaling", **{option: other}))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: MXFP8BlockScaling(fp8_format=Format.E5M2), ValueError, ["float8_e5m2", "itself"]),
        (lambda: Float8CurrentScaling(fp8_format="E4M3"), TypeError, ["'E4M3'", "Format.HYBRID"]),
        (lambda: DelayedScaling(amax_history_len=0), ValueError, ["amax_history_len=0"]),
        (lambda: DelayedScaling(amax_history_len=1.5), ValueError, ["amax_history_len=1.5"]),
        (lambda: DelayedScaling(margin=-1), ValueError, ["margin=-1"]),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), ValueError, ["float8_e5m2", "itself"]),
        (lambda: Float8BlockScaling(fp8_format=Format.E5M2), ValueError, ["itself"]),
        (lambda: DelayedScaling(amax_compute_algo="mean"), ValueError, ["'mean'", "most_recent"]),
        (lambda: Float8BlockScaling(amax_epsilon=-1.0), ValueError, ["amax_epsilon=-1.0"]),
        (lambda: TensorFormat(dtype="int8"), ValueError, ["'int8'", E4M3]),
        (lambda: TensorFormat(dtype=E4M3, scale="e8m0"), ValueError, ["'e8m0'", "power_of_2"]),
        (lambda: TensorFormat(dtype=E4M3, scale="power_of_2"), ValueError, ["float32"]),
        (lambda: TensorFormat(dtype="float4_e2m1fn"), ValueError, ["4 bits", "float8_e4m3fn"]),
        (lambda: TensorFormat(dtype=E4M3, block=(0, 8)), ValueError, ["(0, 8)", "positive"]),
        (lambda: TensorFormat(dtype=E4M3, block=[1, 8]), ValueError, ["[1, 8]", "positive"]),
        (lambda: TensorFormat(dtype=E4M3, block=(8,)), ValueError, ["(8,)", "two"]),
        (lambda: TensorFormat(dtype=E4M3, block=(1, 8.0)), ValueError, ["(1, 8.0)", "integers"]),
        (lambda: TensorFormat(dtype=E4M3, amax_epsilon=-1.0), ValueError, ["amax_epsilon=-1.0"]),
        (lambda: TensorFormat(dtype=E4M3, stochastic=True), ValueError, ["stochastically"]),
        (lambda: TensorFormat(dtype=E4M3, hadamard=True), ValueError, ["1 x 16"]),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error) as info:
        make()
    assert all(word in str(info.value) for word in words)


def test_the_context():
    """Nested, restored after an exception, and part of jit's key."""
    traced = []

    @jax.jit
    def function(x):
        traced.append(current_recipe())
        return x

    assert current_recipe() is None
    with autocast(MXFP8BlockScaling()) as outer:
        function(1.0)
        with pytest.raises(KeyError), autocast("nvfp4"):
            function(1.0)
            with autocast(None):
                assert current_recipe() is None
            raise KeyError
        assert current_recipe() is outer
        function(1.0)
    function(1.0)
    assert current_recipe() is None
    assert traced == [MXFP8BlockScaling(), NVFP4BlockScaling(), None]


class Gpu:
    platform, device_kind = "gpu", "a GPU"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    "feature, device, words",
    [
        ("mxfp8", jax.devices("cpu")[0], "NVIDIA GPU"),
        ("mxfp8", Gpu("9.0"), "compute capability 10.0; the device has 9.0"),
        ("fp8_current", Gpu("8.6"), "compute capability 8.9; the device has 8.6"),
        ("nvfp4", Gpu("9.0"), "compute capability 10.0; the device has 9.0"),
    ],
)
def test_what_runs_emulated(feature, device, words):
    ok, reason = is_supported(feature, device)
    assert not ok and reason.startswith(f"{feature} runs emulated: ") and words in reason


@pytest.mark.parametrize(
    "capability, native",
    [
        ("8.0", []),
        ("8.9", ["fp8_delayed", "fp8_current", "fp8_block"]),
        ("9.0", ["fp8_delayed", "fp8_current", "fp8_block"]),
        ("10.0", ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]),
        ("12.0", ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]),
    ],
)
def test_what_runs_natively(capability, native, monkeypatch):
    monkeypatch.setattr(support, "distribution_unsupported", lambda requirement: None)
    monkeypatch.setattr(support, "launcher_unsupported", lambda: None)
    of_gpu = {name: is_supported(name, Gpu(capability)) for name in RECIPES}
    assert [name for name, (native_there, _) in of_gpu.items() if native_there] == native
    words = "" if capability == "9.0" else f"compiled, not run: .* compute capability {capability}"
    assert all(re.fullmatch(words, of_gpu[name][1]) for name in native)
    monkeypatch.setattr(support, "distribution_unsupported", lambda requirement: "planted")
    for name in native:
        ok, reason = is_supported(name, Gpu(capability))
        assert not ok and "planted" in reason and "pip install" in reason


@dataclasses.dataclass(frozen=True)
class Own(Recipe):
    def formats(self):
        return MXFP8BlockScaling().formats()


def test_a_recipe_without_a_name():
    assert as_recipe(Own()) == Own() and required_alignment(Own()) == 32
    with autocast(Own()):
        assert current_recipe() == Own()
    with pytest.raises(TypeError, match="Own"):
        as_recipe(Own)


def test_emulation_on_a_gpu_is_said_once(monkeypatch):
    x = jnp.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features.warn_if_emulated(MXFP8BlockScaling(), x)
    monkeypatch.setattr(support._jax, "platform", lambda operands: "cuda")
    monkeypatch.setattr(features.jax, "devices", lambda *_: [Gpu("9.0")])
    support.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="mxfp8 runs emulated.*the numbers are the same"):
        features.warn_if_emulated(MXFP8BlockScaling(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features.warn_if_emulated(MXFP8BlockScaling(), x)
    for recipe, words in (
        (NVFP4BlockScaling(), "nvfp4"),
        (Own(), "Own runs emulated: .*no kernel"),
    ):
        with pytest.warns(UserWarning, match=words):
            features.warn_if_emulated(recipe, x)
    support.warn_once.cache_clear()
