"""gemm against einsum in float64; dtypes on the way and at the end; what crosses devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource, gemm, global_shard_guard
from expertmesh.core.hlo import collectives
from expertmesh.core.testing import magnitudes, relative_error

RESOURCE = MeshResource(dp_resource="dp", fsdp_resource="fsdp", tp_resource="tp")


def mesh_of(kind, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def data(seed=0):
    rng = np.random.default_rng(seed)
    x, w = magnitudes(rng, (8, 6, 16)), magnitudes(rng, (16, 2, 12))
    bias, dy = rng.normal(size=(2, 12)), rng.normal(size=(8, 6, 2, 12))
    return tuple(np.asarray(a, np.float32) for a in (x, w, bias, dy))


def value_and_gradients(x, w, bias, dy):
    y, pull = jax.vjp(gemm, x, w, bias)
    return y, *pull(dy)


def oracle(x, w, bias, dy):
    x, w, bias, dy = (a.astype(np.float64) for a in (x, w, bias, dy))
    return (
        np.einsum("btk,kcn->btcn", x, w) + bias,
        np.einsum("btcn,kcn->btk", dy, w),
        np.einsum("btk,btcn->kcn", x, dy),
        dy.sum((0, 1)),
    )


def test_gradients_equal_einsum():
    operands = data()
    for got, want in zip(value_and_gradients(*operands), oracle(*operands), strict=True):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharding_changes_no_value(kind):
    """Tokens over (dp, fsdp), the weight over fsdp; each gradient lies where its primal does."""
    x, w, bias, dy = data()
    mesh = mesh_of(kind, dp=2, fsdp=4)
    tokens = P(("dp", "fsdp"))
    placed = put(mesh, x, *tokens), put(mesh, w, "fsdp"), put(mesh, bias), put(mesh, dy, *tokens)
    resource = MeshResource(dp_resource="dp", fsdp_resource="fsdp")
    with global_shard_guard(resource if kind == AxisType.Auto else None):
        out = jax.jit(value_and_gradients)(*placed)
    for got, want in zip(out, oracle(x, w, bias, dy), strict=True):
        assert relative_error(got, want) < 1e-6
    for gradient, primal in zip(out[1:], placed, strict=False):
        assert gradient.sharding.is_equivalent_to(primal.sharding, primal.ndim)


def test_partial_sums_cross_devices_in_float32():
    """257 - 256 over two devices: 257 is no bfloat16."""
    mesh = mesh_of(AxisType.Explicit, tp=2)
    x = put(mesh, jnp.array([[256, 1, -256, 0]], jnp.bfloat16), None, "tp")
    w = put(mesh, jnp.ones((4, 3), jnp.bfloat16), "tp")
    np.testing.assert_array_equal(jax.jit(gemm)(x, w), np.ones((1, 3)))


def test_out_dtype():
    x, w = jnp.ones((2, 257), jnp.bfloat16), jnp.ones((257, 3), jnp.bfloat16)
    wide = gemm(x, w, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32 and gemm(x, w).dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide, np.full((2, 3), 257))


def test_gradients_of_a_float32_weight_are_not_rounded():
    """257 ones under bfloat16 activations."""
    x, w = jnp.ones((257, 2), jnp.bfloat16), jnp.ones((2, 3), jnp.float32)
    gradient = jax.grad(lambda w: gemm(x, w).astype(jnp.float32).sum())(w)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, np.full((2, 3), 257))


def test_a_float32_weight_is_cast_to_the_dtype_of_the_tokens():
    """257 is 256 in bfloat16."""
    x, w = jnp.ones((2, 1), jnp.bfloat16), jnp.full((1, 3), 257, jnp.float32)
    y, pull = jax.vjp(lambda x: gemm(x, w, out_dtype=jnp.float32), x)
    np.testing.assert_array_equal(y, np.full((2, 3), 256))
    np.testing.assert_array_equal(pull(jnp.ones((2, 3)))[0], np.full((2, 1), 768, np.float32))


def test_vmap_with_a_given_weight_spec():
    """The weight is used where it is: nothing moves."""
    mesh = mesh_of(AxisType.Auto, dp=2, tp=4)
    rng = np.random.default_rng(1)
    x, w = magnitudes(rng, (3, 8, 16)), magnitudes(rng, (3, 16, 12))
    placed = put(mesh, x, None, "dp"), put(mesh, w, None, None, "tp")
    function = jax.jit(jax.vmap(lambda x, w: gemm(x, w, w_spec=P(None, "tp"))))
    with global_shard_guard(MeshResource(dp_resource="dp", tp_resource="tp")):
        y = function(*placed)
        found = collectives(function.lower(*placed).compile().as_text())
    assert relative_error(y, np.einsum("btk,bkn->btn", x, w, dtype=np.float64)) < 1e-6
    assert not found


@pytest.mark.parametrize(
    "shapes, words",
    [
        (((2, 3), (4, 5)), ["x (2, 3)", "w (4, 5)", "transpose w"]),
        (((2, 3), (3, 5), (4,)), ["(5,)", "(4,)", "reshape"]),
    ],
)
def test_errors(shapes, words):
    with pytest.raises(ValueError) as info:
        gemm(*map(jnp.zeros, shapes))
    assert all(word in str(info.value) for word in ["gemm", *words])
