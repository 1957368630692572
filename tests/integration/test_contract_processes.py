"""Every op keeps its contract over the devices of several processes: values, gradients, layouts, no retrace."""

import time

import jax
import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.any_device]

MODES = ("explicit", "resource", "auto", "manual")


def meshes():
    """Those of all devices: 8 virtual ones, or 4 GPUs."""
    return ((2, 2),) if jax.device_count() == 4 else ((2, 4), (8, 1))


def once(cases, mode, transform, mesh=0):
    from expertmesh.core.testing import covering_settings

    return covering_settings(
        cases,
        mode=(mode,),
        mesh=(meshes()[mesh % len(meshes())],),
        layout=("several",),
        transform=(transform,),
        dtype=("float32",),
        size=("odd" if mode == "resource" else "regular",),
    )


def settings(processes):
    """In 2 processes every exchange, and a quarter of the ops; in 4 a transport and the block.

    Every process compiles all of it again; all ops: `many_settings`.
    """
    import cases.core
    import cases.ep
    import cases.flax_moe

    ops, exchanges = cases.core.CASES, [*cases.ep.CASES, *cases.flax_moe.CASES]
    if processes != 2:
        return once([cases.ep.CASES[-1], *cases.flax_moe.CASES], "explicit", "grad")
    return [
        *once([op for op in ops if op.wrt][::6], "resource", "grad"),
        *once(ops[1::6], "explicit", "jit"),
        *once(exchanges[::2], "explicit", "grad"),
        *once(exchanges[1::2], "resource", "grad", mesh=1),
        *once(exchanges[::2], "auto", "grad", mesh=1),
        *once(exchanges[1::2], "manual", "grad"),
    ]


def many_settings():
    """Every op in two modes, with gradients; every exchange in each pair of mode, mesh, transform and size."""
    import cases.core
    import cases.ep
    import cases.flax_moe
    from expertmesh.core.testing import covering_settings

    pulled = [op for op in cases.core.CASES if op.wrt]
    others = [op for op in cases.core.CASES if not op.wrt]
    return [
        *(each for mode in ("resource", "explicit") for each in once(pulled, mode, "grad")),
        *(each for mode in ("resource", "explicit") for each in once(others, mode, "jit")),
        *covering_settings(
            [*cases.ep.CASES, *cases.flax_moe.CASES],
            mode=MODES,
            mesh=meshes(),
            transform=("jit", "grad"),
            dtype=("float32",),
            size=("regular", "odd"),
        ),
    ]


def check_every_op():
    return check(settings(jax.process_count()))


def check_many_settings():
    return check(many_settings())


def check(cases_and_settings):
    """Runs in each process: the settings that failed, with their messages."""
    from expertmesh.core.testing import check_op

    assert jax.process_count() > 1
    failed = {}
    for case, setting in cases_and_settings:
        start = time.monotonic()
        try:
            check_op(case, setting)
        except AssertionError as error:  # alike in all processes; another error ends the run
            failed[f"{case.name}-{setting}"] = str(error)
        print(f"{time.monotonic() - start:6.2f} s {case.name}-{setting}", flush=True)
    return failed


@pytest.mark.skipif("jax.device_count() < 4", reason="needs 4 GPUs, or 8 virtual devices")
def test_the_settings_cover_each_op():
    import cases.core
    import cases.ep
    import cases.flax_moe

    two, four = settings(2), settings(4)
    exchanging = [*cases.ep.CASES, *cases.flax_moe.CASES]
    assert {case.name for case, _ in two} >= {case.name for case in exchanging}
    every = [*cases.core.CASES, *exchanging]
    assert {case.name for case, _ in many_settings()} == {case.name for case in every}
    exchanges = [(case.name, setting) for case, setting in two if case.exchanges]
    for factor, values in {"mode": MODES, "mesh": meshes()}.items():
        assert {getattr(setting, factor) for _, setting in exchanges} == set(values)
    assert {"moe"} < {case.name for case, _ in four if case.exchanges}


# In `make test`: conformance/test_processes.py and the main job.
@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_ops_and_exchanges(multiprocess, processes):
    assert run(multiprocess, processes, check_every_op) == [{}] * processes


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 4])
def test_many_settings(multiprocess, processes):
    assert run(multiprocess, processes, check_many_settings) == [{}] * processes


def run(multiprocess, processes, function):
    return multiprocess(
        f"integration.test_contract_processes:{function.__name__}",
        processes=processes,
        devices=jax.device_count() // processes,
        timeout=1200,
    )
