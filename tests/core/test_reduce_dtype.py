"""The dtype of a weight gradient's reduction over devices, and that nothing else is rounded for it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import full
from cases.lowered import sums
from expertmesh.core import dense, gemm, grouped_dense, grouped_gemm

# Two devices whose parts are 257, which no bfloat16 is, and -256.
ROWS = np.array([256, 1, -256, 0])


def placed(x, *spec):
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Explicit,))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def multiply(function, *sizes):
    """Of (x, w), with rows in one group where there are groups."""
    sizes = [placed(np.full((2, 1), size, np.int32), "fsdp") for size in sizes]
    return lambda x, w, **options: function(x, w, *sizes, **options)


def gradient(function, x, w, dy, **options):
    """Lowered."""
    return jax.jit(
        lambda x, w, dy: jax.vjp(lambda w: function(x, w, **options), w)[1](dy)[0]
    ).lower(x, w, dy)


@pytest.mark.parametrize("rest", [(), ("fsdp",)], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("function", [gemm, grouped_gemm], ids=lambda f: f.__name__)
def test_parts_are_rounded_and_added(function, rest):
    """float32: 257 - 256 = 1; bfloat16: 256 - 256."""
    grouped = function is grouped_gemm
    x = ROWS.reshape(2, 2, 1) * np.ones(4)
    x, dy = (placed(jnp.asarray(a, jnp.bfloat16), "fsdp") for a in (x, np.ones((2, 2, 3))))
    w = placed(jnp.ones((1,) * grouped + (4, 3)), *(None,) * grouped * bool(rest), *rest)
    call = multiply(function, *[2] * grouped)
    kind, size = ("reduce_scatter", 2) if rest else ("all_reduce", 4)
    for dtype, name, want in ((jnp.bfloat16, "bf16", 0), ("float32", "f32", 1)):
        lowered = gradient(call, x, w, dy, reduce_dtype=dtype)
        assert sums(lowered.as_text()) == [(kind, f"{'1x' * grouped}{size}x3x{name}")]
        d_w = lowered.compile()(x, w, dy)
        assert d_w.dtype == w.dtype
        np.testing.assert_array_equal(d_w, np.full(w.shape, want))
    default = gradient(call, x, w, dy).as_text()
    assert default == gradient(call, x, w, dy, reduce_dtype="float32").as_text()


@pytest.mark.parametrize("recipe", [full("fp8_current"), "fp8_block"])
@pytest.mark.parametrize("function", [dense, grouped_dense], ids=lambda f: f.__name__)
def test_quantized_layers(function, recipe):
    """By what is lowered."""
    grouped = function is grouped_dense
    x, dy = (placed(jnp.ones((2, 128, width), jnp.bfloat16), "fsdp") for width in (128, 256))
    w = placed(jnp.ones((1,) * grouped + (128, 256)))
    call = partial(multiply(function, *[128] * grouped), recipe=recipe)
    found = sums(gradient(call, x, w, dy, reduce_dtype="bfloat16").as_text())
    narrow = [each for each in found if each[1].endswith("bf16")]
    assert narrow == [("all_reduce", f"{'1x' * grouped}128x256xbf16")], found


def test_sums_of_results_stay_wide():
    """Over an axis that splits the contraction."""
    x = placed(jnp.asarray(ROWS[None], jnp.bfloat16), None, "fsdp")
    w = placed(jnp.ones((4, 3), jnp.bfloat16), "fsdp")
    y = jax.jit(partial(gemm, reduce_dtype="bfloat16"))(x, w)
    np.testing.assert_array_equal(y, np.ones((1, 3)))


@pytest.mark.parametrize("function", [gemm, grouped_gemm], ids=lambda f: f.__name__)
def test_errors(function):
    words = rf"{function.__name__}: reduce_dtype must be .*got reduce_dtype=float8_e5m2; use"
    x, w, *sizes = jnp.ones((2, 4)), jnp.ones((4, 3))
    if function is grouped_gemm:
        w, sizes = w[None], [jnp.array([2])]
    with pytest.raises(ValueError, match=words):
        function(x, w, *sizes, reduce_dtype="float8_e5m2")
