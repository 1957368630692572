"""EP groups over processes: the same words of bootstrap and the overflow error in each, the same rows by two levels."""

import functools

import pytest

from cases.covering import full
from multiprocess_runner import run_processes

pytestmark = pytest.mark.multiprocess
# What the last of two processes prepares otherwise.
OTHERWISE = (
    {"alignment": 8},
    {"num_experts": 16},
    {"overflow": "error"},
    {"debug": True},
    {"capacity": 32},
)


def be_two():
    """Runs in each of two processes what the tests of two look at: one start, by name."""
    found = {"group": check_group(), "another": start_otherwise()}
    found |= {str(fields): prepare_otherwise(fields) for fields in OTHERWISE}
    return found | {"late": start_otherwise(late=True)}  # at last, as one does not wait


@pytest.fixture(scope="module")
def of_two():
    """What each of the two returned."""
    return run_processes("ep.test_processes:be_two", processes=2, devices=2, timeout=240)


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


def test_two_processes(of_two):
    first, second = (found["group"] for found in of_two)
    assert first == second
    assert first[:2] == [2, 4]
    assert "demand=12 rows, capacity=10, at rank 1 of EP group 1" in first[2]
    assert "2 choices dropped" in first[2]


def check_two_levels(shape, steps):
    """Runs in each process: random skewed steps by two levels and by one, of numbers whose sums are exact."""
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from ep.exchange_oracle import routing
    from expertmesh.ep import EpConfig, combine, dispatch, hosts, prepare

    hosts.host_of = lambda device: device.process_index  # XLA knows that all are on one host
    axis = ("host", "ep")
    mesh = jax.make_mesh(tuple(shape), axis, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    auto = EpConfig(num_experts=16, axis=axis, alignment=8, num_groups=8, group_topk=2)

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    def differ(topk_idx, x):
        two = prepare(topk_idx, EpConfig.from_dict(auto.to_dict() | {"transport": "two_level"}))
        one = prepare(topk_idx, EpConfig.from_dict(auto.to_dict() | {"transport": "all_to_all"}))
        results = []
        for handle in (two, one):
            rows, pull = jax.vjp(functools.partial(dispatch, handle), x)
            results += [(rows, combine(handle, rows * 2), pull(rows)[0], handle.source)]
        return sum(jnp.sum(a != b) for a, b in zip(*results, strict=True)), jnp.sum(results[0][1])

    step = jax.jit(differ)
    wrong, moved = 0, 0
    for seed in range(steps):
        kind = ("skewed", "holes", "uniform", "one")[seed % 4]
        rng = np.random.default_rng(seed)
        x = rng.integers(1, 9, (96, 5)).astype(jnp.bfloat16)
        different, total = step(put(routing(kind, 96, 4, 16, seed)), put(x))
        wrong, moved = wrong + int(different), moved + float(total)
    handle = jax.eval_shape(functools.partial(prepare, config=auto), put(routing("one", 96, 4, 16)))
    return [handle.transport, wrong, moved > 0]


@pytest.mark.parametrize(
    "processes, shape, steps, transport",
    [
        (2, (2, 4), 12, "two_level"),
        full(4, (4, 2), 200, "two_level"),
        full(8, (4, 2), 200, "auto"),  # each process is a host, so the inner axis is over hosts too
    ],
)
def test_two_levels_are_one_exchange(multiprocess, processes, shape, steps, transport):
    results = multiprocess(
        "ep.test_processes:check_two_levels",
        processes=processes,
        devices=8 // processes,
        timeout=400,
        shape=shape,
        steps=steps,
    )
    assert results == [[transport, 0, True]] * processes


def start_otherwise(late=False):
    """Runs in each process: what bootstrap says where the last one differs, or does not come in time."""
    import time

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from expertmesh.ep import EpConfig, bootstrap

    last = jax.process_index() == jax.process_count() - 1
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    tokens = jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=sharding)
    config = EpConfig(num_experts=4, axis="ep", transport="all_to_all")
    said = [bootstrap(config, tokens, top_k=2).transport]
    other = EpConfig(num_experts=4, axis="ep", capacity=16, alignment=8 if last else 4)
    if last and late:
        time.sleep(2)
        return said
    try:
        bootstrap(other, tokens, top_k=1 if last else 2, timeout=1 if late else 60)
    except (ValueError, RuntimeError) as error:
        said.append(f"{type(error).__name__}: {error}")
    if not late:  # it has forgotten nothing that it must not
        said.append(bootstrap(config, tokens, top_k=2).transport)
    return said


@pytest.mark.parametrize(
    "late, words",
    [
        (
            False,
            [
                "ValueError: bootstrap: all processes must mean the same exchange",
                "alignment=4 in process 0, 8 in process 1",
                "top_k=2 in process 0, 1 in process 1",
            ],
        ),
        (True, ["RuntimeError", "waited 1 s for process 1 (host 0, devices 2, 3 of the job)"]),
    ],
)
def test_bootstrap_says_which_process_is_another(of_two, late, words):
    results = [found["late" if late else "another"] for found in of_two]
    assert results[0][0] == "all_to_all" and (late or results[0] == results[1])
    assert all(word in results[0][1] for word in words), results[0]
    assert late or results[0][2] == "all_to_all"
    assert "capacity" not in results[0][1]  # which is the same


@functools.cache
def step_of_configs():
    """A step's function of its config: each process compiles it once for each."""
    import jax
    import jax.numpy as jnp

    from expertmesh.ep import combine, dispatch, find_overflow, prepare

    def step(idx, x, config):
        handle = prepare(idx, config)
        out = combine(handle, dispatch(handle, x))
        return jnp.sum(out), jnp.sum(handle.num_dropped), find_overflow(handle)

    return jax.jit(step, static_argnums=2)


def prepare_otherwise(fields):
    """Runs in each process: a first step without bootstrap, the last process with other options."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from expertmesh.ep import EpConfig, raise_overflow

    last = jax.process_index() == jax.process_count() - 1
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    mesh = jax.sharding.Mesh(mesh.devices.T, mesh.axis_names, axis_types=mesh.axis_types)
    sharding = NamedSharding(mesh, PartitionSpec(("dp", "ep")))
    plain = dict(num_experts=8, axis="ep", transport="all_to_all", capacity=16)

    def put(row):
        x = np.broadcast_to(row, (16, row.size))
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    def run(config):
        operands = put(np.int32([1, 6])), put(np.ones(4, np.float32))
        total, dropped, overflow = step_of_configs()(*operands, config)
        try:
            raise_overflow(overflow)
        except RuntimeError as error:
            return [float(total), int(dropped), str(error)]
        return [float(total), int(dropped), "no error"]

    return [run(EpConfig(**plain | (fields if last else {}))), run(EpConfig(**plain))]


@pytest.mark.parametrize("fields", OTHERWISE, ids=str)
def test_a_step_of_processes_that_differ_is_refused(of_two, fields):
    first, second = (found[str(fields)] for found in of_two)
    assert first == second
    (total, dropped, error), after = first
    assert (total, dropped) == (0, 32)  # nothing is exchanged
    assert "raise_overflow: all processes must prepare the same exchange; got another" in error
    assert "at rank 1 of EP group 1" in error and "call bootstrap" in error
    assert after == [128, 0, "no error"]


def wait_for_other_sizes():
    """Runs in each process: the last prepares more choices, and others wait for its collective without end."""
    import time
    from functools import partial

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from expertmesh.ep import EpConfig, prepare, wait_for

    last = jax.process_index() == jax.process_count() - 1
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    step = jax.jit(partial(prepare, config=EpConfig(num_experts=4, axis="ep")))

    def put(top_k):
        return jax.make_array_from_callback(
            (4, top_k), sharding, lambda at: np.zeros((4, top_k), np.int32)[at]
        )

    wait_for(step(put(3)), phase="step 0")  # opens the communicators
    results = jax.eval_shape(step, put(2)) and jnp.zeros(()) if last else step(put(1))
    try:
        wait_for(results, phase="step 1", timeout=3)
    except RuntimeError as error:
        return str(error)
    time.sleep(6)  # as long as the other asks who is behind
    jax.block_until_ready(step(put(1)))  # so that the other can end
    return "no error"


def test_a_step_of_other_sizes_is_named(multiprocess):
    first, second = multiprocess(
        "ep.test_processes:wait_for_other_sizes", processes=2, devices=2, timeout=120
    )
    assert second == "no error"
    assert "waiting for: no process is behind; they prepared exchanges that differ in" in first
    assert "top_k=1 in process 0, 2 in process 1; start the same script" in first


@pytest.mark.parametrize(
    "texts, words",
    [
        ([None, '{"a": "1"}', '{"a": "2"}'], "a=1 in process 1, 2 in process 2; none in process 0"),
        (['{"a": "1"}', None], "differ in none in process 1"),
        (['{"a": "1"}', '{"a": "1"}'], "look at all logs"),
        ([None, None], "look at all logs"),
    ],
)
def test_what_was_prepared_is_named_by_process(texts, words, monkeypatch):
    from expertmesh.ep import agreement

    monkeypatch.setattr(agreement, "texts_of_all", lambda key: texts)
    assert words in agreement._prepared()


def lose_one(how):
    """Runs in each process: steps of an exchange, which the last process leaves, or comes late to, after two."""
    import os
    import signal
    import socket
    import time

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from expertmesh.ep import EpConfig, combine, dispatch, prepare, wait_for

    last = jax.process_index() == jax.process_count() - 1
    mesh = jax.make_mesh((2, 3), ("host", "ep"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(("host", "ep")))
    idx = jax.device_put(jnp.arange(24, dtype=jnp.int32)[:, None] % 6, sharding)
    config = EpConfig(num_experts=6, axis=("host", "ep"), transport="two_level")

    @jax.jit
    def step(idx, x):
        handle = prepare(idx, config)
        return combine(handle, dispatch(handle, x))

    x = jax.device_put(jnp.ones((24, 4)), sharding)
    for n in range(3):
        if last and n == 2 and how == "gone":
            os.kill(os.getpid(), signal.SIGKILL)
        if last and n == 2:
            time.sleep(6)
        began = time.monotonic()
        try:
            x = wait_for(step(idx, x), phase=f"step {n}", timeout=3 if n == 2 else 60)
        except RuntimeError as error:
            took = time.monotonic() - began
            time.sleep(0 if jax.process_index() else 4)  # it has the others' coordination service
            return [n, str(error), took < 5, socket.gethostname()]
    return [n, "all is well", True, socket.gethostname()]


@pytest.mark.parametrize("how", ["gone", pytest.param("late", marks=pytest.mark.full)])
def test_survivors_say_who_is_missing(multiprocess, how):
    results = multiprocess(
        "ep.test_processes:lose_one",
        processes=3,
        devices=2,
        timeout=120,
        killed=2 if how == "gone" else None,
        how=how,
    )
    if how == "late":  # its own step ends, as if nothing had been
        assert results[2][1] == "all is well"
    for n, said, in_time, host in results[:2]:
        assert n == 2 and in_time
        assert "every process must take part in 'step 2'" in said
        assert (
            f"waiting for: process 2 (host 0, devices 4, 5 of the job, last in 'step 1' on {host})"
            in said
        )
