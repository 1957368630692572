import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from expertmesh.core import hlo

pytestmark = pytest.mark.aot


def compiled(f, mesh, out_specs):
    """`f` over shards of bfloat16[1024, 256], whose rows are split over the whole mesh."""
    rows = PartitionSpec(mesh.axis_names)
    local = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=out_specs, check_vma=False)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16, sharding=NamedSharding(mesh, rows))
    return jax.jit(local).lower(x).compile()


def test_gather_in_one_axis_and_sum_over_the_other(h100_mesh):
    mesh = h100_mesh({"fsdp": 2, "ep": 8})

    def f(x):
        y = jax.lax.all_gather(x, "ep", tiled=True)
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32), 0), "fsdp")

    program = compiled(f, mesh, PartitionSpec())
    hosts = (tuple(range(8)), tuple(range(8, 16)))
    across = tuple((i, i + 8) for i in range(8))
    assert [found[:3] for found in hlo.collectives(program.as_text())] == [
        ("all-gather", ("bf16[512,256]",), hosts),
        ("all-reduce", ("f32[256]",), across),
    ]
    assert program.memory_analysis().temp_size_in_bytes < 1 << 20


def test_asynchronous_exchange(h100_mesh):
    """The ragged exchange, which XLA has no CPU code for."""
    mesh = h100_mesh({"ep": 4})

    def f(x):
        sizes = jnp.full(4, 64, jnp.int32)
        offsets = jnp.arange(4, dtype=jnp.int32) * 64
        at = jnp.full(4, jax.lax.axis_index("ep") * 64, jnp.int32)
        return jax.lax.ragged_all_to_all(x, x, offsets, sizes, at, sizes, axis_name="ep")

    program = compiled(f, mesh, PartitionSpec("ep"))
    (found,) = hlo.collectives(program.as_text())
    assert found[:3] == ("ragged-all-to-all", ("bf16[256,256]",), ((0, 1, 2, 3),))
