"""QuantizedArray as a pytree: arguments, carries, checkpoints; parts that do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedArray,
    dequantize,
    grouped_quantize,
    quantize,
)
from expertmesh.core.quantization.quantized import named

FORMATS = [
    Float8CurrentScaling().formats().x,
    MXFP8BlockScaling().formats().x,
    NVFP4BlockScaling().formats().x,
]


def arrays():
    x = np.arange(-96, 96, dtype=np.float32).reshape(3, 64) / 8
    return [quantize(x, format) for format in FORMATS]


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_arguments_results_and_carries():
    """The second call of a jitted function of equal types is not traced again."""
    traces = []

    @jax.jit
    def function(qs):
        traces.append(qs)
        return jax.lax.scan(lambda carry, _: (carry, dequantize(carry[0])), qs, None, length=2)

    first, values = function(arrays())
    again, _ = function(first)
    assert_equal(again, arrays())
    assert len(traces) == 1
    np.testing.assert_array_equal(values[1], dequantize(arrays()[0]))


def test_scanned_over_layers():
    """One layer of stacked arrays at a time."""
    x = np.arange(2 * 3 * 64, dtype=np.float32).reshape(2, 3, 64)
    stacked = jax.vmap(lambda x: quantize(x, FORMATS[-1]))(x)
    _, values = jax.lax.scan(lambda c, q: (c, dequantize(q)), 0, stacked)
    np.testing.assert_array_equal(values[1], dequantize(quantize(x[1], FORMATS[-1])))


def test_checkpoints(tmp_path):
    """Through orbax, 4-bit data too."""
    ocp = pytest.importorskip("orbax.checkpoint")
    state = {str(i): q for i, q in enumerate(arrays())}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        assert_equal(checkpointer.restore(tmp_path / "state", state), state)


def test_parts_that_do_not_fit():
    current, mx, nv = arrays()
    grouped = grouped_quantize(np.ones((2, 4, 8), np.float32), np.ones((2, 3), int), FORMATS[0])
    cases = [
        (mx, dict(scale=mx.scale[:1]), ValueError, ["scale", "(3, 2)", "(1, 2)"]),
        (mx, dict(scale=jnp.ones((3, 2))), TypeError, ["scale", "float8_e8m0fnu", "float32"]),
        (mx, dict(data=current.data[:, :32]), ValueError, ["(3, 1)"]),
        (mx, dict(block=()), ValueError, ["block=()"]),
        (current, dict(scale=jnp.ones(2)), ValueError, ["leading", "(2,)"]),
        (current, dict(data=nv.data), TypeError, ["data", "float8_e4m3fn", "float4_e2m1fn"]),
        (nv, dict(tensor_scale=None), TypeError, ["tensor_scale", "float32", "None"]),
        (current, dict(tensor_scale=current.scale), TypeError, ["tensor_scale"]),
        (grouped, dict(group_sizes=grouped.group_sizes[:1]), ValueError, ["group_sizes", "(1, 3)"]),
    ]
    for q, change, error, words in cases:
        with pytest.raises(error) as info:
            dequantize(dataclasses.replace(q, **change))
        assert all(word in str(info.value) for word in ["dequantize", *words])
    with pytest.raises(TypeError, match="dequantize: the operand must be a QuantizedArray"):
        dequantize(jnp.ones(3))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_what_a_policy_keeps_by_name(dtype):
    """Each number of a format, with its subnormals and its largest, is there in the backward."""
    count = jnp.finfo(dtype).bits
    codes = jnp.arange(2**count).astype(jnp.uint8 if count == 8 else jnp.uint4)
    numbers = jax.lax.bitcast_convert_type(codes, dtype)
    q = QuantizedArray(numbers, jnp.ones(()))

    def product(x):
        (kept,) = named((q,), ["some", "other"])
        return x * kept.data.astype(jnp.float32)

    x = jnp.ones(2**count)
    policy = jax.checkpoint_policies.save_only_these_names("other")
    _, pull = jax.vjp(jax.checkpoint(product, policy=policy), x)
    np.testing.assert_array_equal(pull(x)[0], numbers.astype(jnp.float32))
