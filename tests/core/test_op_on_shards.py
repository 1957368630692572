"""Op under transformations on meshes: what a factor's kind, a given spec or a kernel means there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import Kernel, MeshResource, Op, Plan, differentiable, gemm, global_shard_guard
from expertmesh.core.mesh import current_resource

SUM = Op("sum", lambda x: jnp.sum(x, axis=0), "t k -> k", summed=("t",), roles="tokens . -> .")


def on_mesh(kind, x, *spec):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(kind,))
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("mode", ["explicit", "resource", "auto"])
def test_vmap_of_a_sum_over_shards(mode):
    x = np.arange(2 * 3 * 16 * 4, dtype=np.float32).reshape(2, 3, 16, 4)
    placed = on_mesh(
        AxisType.Explicit if mode == "explicit" else AxisType.Auto, x, None, None, "dp"
    )
    with global_shard_guard(MeshResource(dp_resource="dp") if mode == "resource" else None):
        np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(SUM)))(placed), x.sum(2))


def test_vmap_over_what_an_explicit_axis_splits():
    x = on_mesh(AxisType.Explicit, jnp.ones((8, 4, 16)), "dp")
    with pytest.raises(ValueError, match="sum: .*vmap maps must not .*'dp'.*make it a dimension"):
        jax.jit(jax.vmap(SUM))(x)
    whole = jax.sharding.reshard(x, NamedSharding(x.sharding.mesh, P()))
    np.testing.assert_array_equal(jax.vmap(SUM)(whole), x.sum(1))


def test_a_kernels_results_vary_like_its_operands():
    """A custom call forgets over which axes its operands differ; shard_map refuses its result then."""

    def launch(x):
        return jax.pure_callback(
            lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )

    op = Op("double", lambda x: 2 * x, "... -> ...", kernels=(Kernel("host", "cpu", launch),))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    f = jax.jit(jax.shard_map(lambda x: op(x), mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    np.testing.assert_array_equal(f(jnp.arange(8.0)), 2 * np.arange(8.0))


def test_a_plans_options_replace_the_calls():
    op = Op(
        "scale",
        lambda x, *, factor: factor * x,
        "t -> t",
        plan=lambda query: Plan(query.operand_specs, query.operand_specs, options={"factor": 3}),
    )
    np.testing.assert_array_equal(op(on_mesh(AxisType.Explicit, np.ones(8), "dp"), factor=2), 3)
    np.testing.assert_array_equal(op(np.ones(8), factor=2), 2)


def in_shard_map(function, *specs, out):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))


def test_the_gradient_of_an_operand_that_every_shard_has_is_summed():
    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    gradient = in_shard_map(
        lambda x, w: jax.grad(lambda w: gemm(x, w).sum())(w), P("a"), P(), out=P()
    )
    np.testing.assert_array_equal(
        gradient(x, np.ones((2, 3), np.float32)), np.repeat(x.sum(0)[:, None], 3, 1)
    )


def test_a_constant_cotangent_varies_like_its_primal():
    f = differentiable(lambda x: (jnp.sum(x), None), lambda _, ct: (jnp.full(2, 5.0),))
    gradient = in_shard_map(jax.grad(f), P("a"), out=P("a"))
    np.testing.assert_array_equal(gradient(np.ones(16, np.float32)), np.full(16, 5))


def test_a_resource_is_that_of_the_call_however_often_it_is_traced():
    seen, resource = [], MeshResource(dp_resource="dp")

    def reference(x):
        seen.append(current_resource())
        return jnp.sum(x, axis=0)

    op = Op("sum", reference, "t k -> k", summed=("t",), roles="tokens . -> .")

    @jax.jit
    def inside(x):
        with global_shard_guard(resource):
            return op(x)

    x = np.arange(2 * 16 * 4, dtype=np.float32).reshape(2, 16, 4)
    batched = jax.vmap(inside)(on_mesh(AxisType.Auto, x, None, "dp"))
    np.testing.assert_array_equal(batched, x.sum(1))
    assert set(seen) == {resource}
