"""bootstrap and the overflow error where the EP group crosses processes: the same words in every process."""

import pytest

pytestmark = pytest.mark.multiprocess


def check_group():
    """Runs in each process, which holds half of every EP group."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from expertmesh.ep import EpConfig, bootstrap, find_overflow, prepare, raise_overflow

    devices = np.array(jax.devices()).reshape(2, 2).T
    assert len({device.process_index for device in devices[0]}) == 2
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    sharding = NamedSharding(
        Mesh(devices, ("dp", "ep"), axis_types=kinds), PartitionSpec(("dp", "ep"))
    )
    tokens = jax.ShapeDtypeStruct((32, 4), jnp.bfloat16, sharding=sharding)
    group = bootstrap(EpConfig(num_experts=4, axis="ep"), tokens, top_k=2)

    config = EpConfig(num_experts=4, axis="ep", capacity=10, overflow="error")
    topk = np.full((32, 1), -1, np.int32)
    topk[20:, 0] = 3  # the last 12 tokens: of both ranks of group 1, to its rank 1
    idx = jax.make_array_from_callback(topk.shape, sharding, lambda at: topk[at])
    overflow = jax.jit(lambda i: find_overflow(prepare(i, config)))(idx)
    try:
        raise_overflow(overflow)
    except RuntimeError as error:
        return [group.ep_size, group.num_participants, str(error)]
    return [group.ep_size, group.num_participants, "no error"]


def test_two_processes(multiprocess):
    first, second = multiprocess(
        "ep.test_processes:check_group", processes=2, devices=2, timeout=120
    )
    assert first == second
    assert first[:2] == [2, 4]
    assert "demand=12 rows, capacity=10, at rank 1 of EP group 1" in first[2]
    assert "2 choices dropped" in first[2]
