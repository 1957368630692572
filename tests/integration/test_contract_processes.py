"""Every op keeps its contract over the devices of several processes: values, gradients, layouts, no retrace."""

import time

import jax
import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.any_device]

MODES = ("explicit", "resource", "auto", "manual")


def meshes():
    """Those of all devices: 8 virtual ones, or 4 GPUs."""
    return ((2, 2),) if jax.device_count() == 4 else ((2, 4), (8, 1))


def settings(processes):
    """Each exchange in both, in many ways in 2; each other op in 2 or in 4, in one: every process compiles it again."""
    import cases.core
    import cases.ep
    import cases.flax_moe
    from expertmesh.core.testing import covering_settings

    def cover(cases, **only):
        every = {
            "mode": MODES,
            "mesh": meshes(),
            "transform": ("jit", "grad"),
            "dtype": ("float32",),
            "size": ("regular", "odd"),
        }
        return covering_settings(cases, seed=processes, **(every | only))

    def once(cases, mode):
        one = dict(mode=(mode,), mesh=meshes()[:1], layout=("several",), size=("odd",))
        pulled = cover([case for case in cases if case.wrt], transform=("grad",), **one)
        return pulled + cover([case for case in cases if not case.wrt], transform=("jit",), **one)

    ops, exchanges = cases.core.CASES, [*cases.ep.CASES, *cases.flax_moe.CASES]
    if processes == 2:
        return once([op for i, op in enumerate(ops) if i % 4], "resource") + cover(exchanges)
    return once(ops[::4] + exchanges, "explicit")


def check_every_op():
    """Runs in each process: the settings that failed, with their messages."""
    from expertmesh.core.testing import check_op

    assert jax.process_count() > 1
    failed = {}
    for case, setting in settings(jax.process_count()):
        start = time.monotonic()
        try:
            check_op(case, setting)
        except AssertionError as error:  # alike in all processes; another error ends the run
            failed[f"{case.name}-{setting}"] = str(error)
        print(f"{time.monotonic() - start:6.2f} s {case.name}-{setting}", flush=True)
    return failed


def test_the_settings_cover_each_op():
    import cases.core

    two, four = settings(2), settings(4)
    names = {case.name for case, _ in two + four}
    assert names >= {case.name for case in cases.core.CASES}
    exchanges = [(case.name, setting) for case, setting in two if case.exchanges]
    exchanged = {name for name, _ in exchanges}
    assert exchanged and exchanged <= {case.name for case, _ in four}
    for name in exchanged:
        assert {setting.mode for of, setting in exchanges if of == name} == set(MODES)
    assert {setting.mesh for _, setting in exchanges} == set(meshes())


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.default_jax)])
def test_every_op(multiprocess, processes):
    results = multiprocess(
        "integration.test_contract_processes:check_every_op",
        processes=processes,
        devices=jax.device_count() // processes,
        timeout=600,
    )
    assert results == [{}] * processes
