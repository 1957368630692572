"""Gradients of microbatches, summed on the way, against one gradient of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource, accumulate_gradient, global_shard_guard, grouped_gemm
from expertmesh.core.hlo import collectives
from expertmesh.core.testing import magnitudes, relative_error


def data():
    """Three batches of four participants with two groups each."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(6, [0.4, 0.4, 0.2], size=(3, 4))[..., :2].astype(np.int32)
    lhs, dy = magnitudes(rng, (3, 4, 6, 8)), magnitudes(rng, (3, 4, 6, 12))
    rhs = magnitudes(rng, (2, 8, 12))
    return rhs, lhs, sizes, dy


def oracle(lhs, sizes, dy):
    """float64, one row at a time."""
    total = np.zeros((2, 8, 12))
    for b, p in np.ndindex(3, 4):
        for row, g in enumerate(np.repeat([0, 1], sizes[b, p])):
            total[g] += np.outer(lhs[b, p, row].astype(np.float64), dy[b, p, row])
    return total


def gradients(rhs, lhs, sizes, dy, dtype=jnp.float32):
    """Summed over the microbatches of a scan."""

    def step(total, batch):
        lhs, sizes, dy = batch

        def loss(w):
            w = accumulate_gradient(w, total)["w"]
            return jnp.sum(grouped_gemm(lhs.astype(dtype), w, sizes) * dy.astype(dtype))

        return jax.grad(loss)({"w": rhs}), None

    zeros = {"w": jnp.zeros_like(rhs)}
    return jax.lax.scan(step, zeros, (lhs, sizes, dy))[0]["w"]


def test_microbatches_add_up():
    rhs, lhs, sizes, dy = data()
    assert relative_error(jax.jit(gradients)(rhs, lhs, sizes, dy), oracle(lhs, sizes, dy)) < 1e-6


def test_the_value_is_that_of_the_parameters_and_totals_have_no_gradient():
    w, total = jnp.arange(3.0), jnp.array([5.0, 6.0, 7.0])
    y, pull = jax.vjp(lambda w, total: 2 * accumulate_gradient(w, total), w, total)
    np.testing.assert_array_equal(y, [0, 2, 4])
    dw, dtotal = pull(jnp.array([1.0, 10.0, 100.0]))
    np.testing.assert_array_equal(dw, [7, 26, 207])
    np.testing.assert_array_equal(dtotal, 0)


def test_remat_adds_once():
    f = jax.checkpoint(lambda w: jnp.sum(jnp.sin(accumulate_gradient(w, jnp.ones(2)))))
    np.testing.assert_allclose(jax.grad(f)(jnp.zeros(2)), 2)


def test_layers_of_a_scan_have_their_own_totals():
    """Bfloat16 between layers, float32 in the sums: 1/512 is lost beside 1 in bfloat16."""
    w, totals = jnp.ones((3, 1)), jnp.array([[1.0], [2.0], [4.0]])

    def loss(w):
        def layer(x, params):
            return x * accumulate_gradient(*params).astype(jnp.bfloat16), None

        x = jax.lax.scan(layer, jnp.full(1, 2.0**-9, jnp.bfloat16), (w, totals))[0]
        return jnp.sum(x.astype(jnp.float32))

    np.testing.assert_array_equal(jax.grad(loss)(w), totals + 2.0**-9)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda k: k.name)
def test_totals_lie_where_the_parameters_do(kind):
    """Sharded over fsdp: the sum is of shards, after the reduce-scatter; nothing else crosses for it."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(kind,), devices=jax.devices()[:4])
    rhs, lhs, sizes, dy = data()
    specs = P(None, "fsdp"), P(None, "fsdp"), P(None, "fsdp"), P(None, "fsdp")
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((rhs, lhs, sizes, dy), specs, strict=True)
    ]
    with global_shard_guard(MeshResource(fsdp_resource="fsdp") if kind == AxisType.Auto else None):
        program = jax.jit(gradients).lower(*placed).compile()
        total = program(*placed)
    assert relative_error(total, oracle(lhs, sizes, dy)) < 1e-6
    assert total.sharding.is_equivalent_to(placed[0].sharding, 3)
    found = {(c.kind, c.shapes) for c in collectives(program.as_text())}
    assert found <= {("all-gather", ("f32[2,8,12]",)), ("reduce-scatter", ("f32[2,2,12]",))}
    assert ("reduce-scatter", ("f32[2,2,12]",)) in found


@pytest.mark.parametrize(
    "params, totals, error, words",
    [
        ({"a": np.zeros(2)}, {"b": np.zeros(2)}, ValueError, ["structure", "zeros_like"]),
        (np.zeros(2, np.float32), np.zeros(3, np.float32), ValueError, ["(3,)", "(2,)"]),
        (jnp.zeros(2, "bfloat16"), jnp.zeros(2, "bfloat16"), TypeError, ["bfloat16", "master"]),
        (jnp.zeros(2), jnp.zeros(2, "float16"), TypeError, ["got float32 and float16"]),
        (np.zeros(2, np.int32), np.zeros(2, np.int32), TypeError, ["int32"]),
    ],
)
def test_errors(params, totals, error, words):
    with pytest.raises(error) as info:
        accumulate_gradient(params, totals)
    assert all(word in str(info.value) for word in ["accumulate_gradient", *words])
