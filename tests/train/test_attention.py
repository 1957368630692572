"""Attention against loops, the implementation that it takes, and what it sends between devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import hlo
from expertmesh.train import attention
from expertmesh.train.mesh import AXES
from expertmesh.train.step import compiler_options

B, S, H, D = 8, 6, 2, 8
SCALE = 1.7


def heads(seed=0, shape=(B, S, H, D)):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape) for _ in range(3)]


def by_loops(q, k, v):
    """In float64, one head and position after the other."""
    y = np.zeros_like(q)
    for b, s, h in np.ndindex(q.shape[:3]):
        scores = [SCALE * math.fsum(q[b, s, h] * k[b, t, h]) for t in range(s + 1)]
        weights = [math.exp(score - max(scores)) for score in scores]
        for t, weight in enumerate(weights):
            y[b, s, h] += weight / math.fsum(weights) * v[b, t, h]
    return y


def attend(q, k, v):
    return attention.attend(q, k, v, SCALE)


@pytest.mark.default_jax
@pytest.mark.parametrize("dtype, rtol", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
def test_against_loops(dtype, rtol):
    arrays = [jnp.asarray(x, dtype) for x in heads()]
    got = jax.jit(attend)(*arrays)
    assert got.dtype == dtype
    want = by_loops(*(np.asarray(x, np.float64) for x in arrays))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rtol, atol=rtol)


@pytest.mark.default_jax
def test_gradients_against_differences_of_loops():
    arrays, shape = heads(), (1, S, 1, D)
    arrays = [x[:1, :, :1] for x in arrays]
    weight = np.random.default_rng(1).normal(size=shape)

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v) * weight)

    got = jax.grad(loss, argnums=(0, 1, 2))(*(jnp.float32(x) for x in arrays))
    for i, step in enumerate(heads(2, shape)):
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[i] = arrays[i] + sign * 1e-5 * step
            ends.append(np.sum(by_loops(*moved) * weight))
        want = (ends[0] - ends[1]) / 2e-5
        assert np.sum(got[i] * step) == pytest.approx(want, rel=1e-4, abs=1e-5)


@pytest.mark.default_jax
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_nothing_crosses_devices(kind):
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(kind, kind))
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    arrays = [jax.device_put(np.float32(x), rows) for x in heads()]

    def loss(*arrays):
        return jnp.sum(jnp.square(attend(*arrays)), axis=(1, 2, 3))

    def both(*arrays):
        y, pull = jax.vjp(loss, *arrays)
        return y, pull(jnp.ones_like(y))

    with jax.set_mesh(mesh):
        program = jax.jit(both).lower(*arrays).compile()
        y, gradients = program(*arrays)
    assert hlo.collectives(program.as_text()) == []
    assert all(x.sharding.is_equivalent_to(rows, x.ndim) for x in (y, *gradients))
    np.testing.assert_allclose(y, np.square(by_loops(*heads())).sum(axis=(1, 2, 3)), rtol=1e-5)


@pytest.mark.default_jax
@pytest.mark.parametrize("dtype, width", [(jnp.float32, 64), (jnp.bfloat16, 60)])
def test_heads_that_cudnn_lacks_are_left_to_xla(monkeypatch, dtype, width):
    """With a cuDNN that has all that JAX asks of one; without it, as here, every head is."""
    assert attention.implementation("cuda", jnp.bfloat16, 64) == "xla"
    with_cudnn(monkeypatch)
    assert attention.implementation("cuda", dtype, width) == "xla"
    assert attention.implementation("cuda", jnp.bfloat16, 64) == "cudnn"
    assert attention.implementation("cpu", jnp.bfloat16, 64) == "xla"


@pytest.mark.gpu
def test_on_a_gpu():
    """cuDNN against XLA in float32, forward and backward; under the step's options the same bits each time."""
    assert attention.implementation("cuda", jnp.bfloat16, 64) == "cudnn"
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in heads(shape=(4, 256, 4, 64))]

    def both(*arrays):
        y, pull = jax.vjp(attend, *arrays)
        return y, pull(jnp.cos(y))

    program = jax.jit(both, compiler_options=compiler_options("gpu"))
    got, again = program(*arrays), program(*arrays)
    want = jax.jit(both)(*(x.astype(jnp.float32) for x in arrays))
    for a, b, c in zip(*map(jax.tree.leaves, (got, again, want)), strict=True):
        np.testing.assert_array_equal(a, b)
        error = np.linalg.norm(np.float32(a) - np.float32(c)) / np.linalg.norm(np.float32(c))
        assert error < 2e-2


@pytest.mark.gpu
def test_two_calls_of_one_program_on_a_gpu():
    """Whose gradients would else be equal calls: XLA loses one of those under the step's options."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in heads(shape=(4, 256, 4, 64)))

    def twice(q, numbers):
        for number in numbers:
            q = attention.attend(q, k, v, 1.7, number=number)
        return q

    def gradient(numbers, **options):
        loss = lambda q: jnp.sum(jnp.sin(twice(q, numbers).astype(jnp.float32)))  # noqa: E731
        return np.float32(jax.jit(jax.grad(loss), **options)(q))

    got = gradient((0, 1), compiler_options=compiler_options("gpu"))
    want = gradient((0, 0))
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


def with_cudnn(monkeypatch):
    """As where its library is installed: JAX asks for its version before anything else."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
