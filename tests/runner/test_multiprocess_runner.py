import time

import pytest

pytestmark = pytest.mark.multiprocess


@pytest.mark.any_device
@pytest.mark.parametrize("processes, devices", [pytest.param(2, 1, marks=pytest.mark.full), (2, 2)])
def test_processes_share_one_mesh(multiprocess, processes, devices):
    results = multiprocess("runner.cases:total", processes=processes, devices=devices)
    expected = devices * sum(range(1, processes + 1))
    assert [r["process"] for r in results] == list(range(processes))
    assert all(r["devices"] == [devices, processes * devices] for r in results)
    assert all(r["total"] == expected for r in results)


def test_a_failing_process_ends_the_run_early(multiprocess):
    start = time.monotonic()
    with pytest.raises(AssertionError, match="planned failure of process 1"):
        multiprocess("runner.cases:fails", processes=2, timeout=120, rank=1)
    assert time.monotonic() - start < 60


def test_the_others_outlive_one_that_is_killed(multiprocess):
    assert multiprocess("runner.cases:is_killed", killed=1, rank=1) == ["lives", None]


def test_time_out_ends_the_run(multiprocess):
    with pytest.raises(AssertionError, match="still running"):
        multiprocess("runner.cases:total", processes=2, timeout=0.1)


def test_children_of_a_worker_end_too(multiprocess, tmp_path):
    pid_file = tmp_path / "pids"
    with pytest.raises(AssertionError, match="planned failure beside a child"):
        multiprocess("runner.cases:leaves_a_child", processes=2, pid_file=str(pid_file))
    for pid in map(int, pid_file.read_text().split()):
        assert not _runs(pid), pid


def _runs(pid):
    """Whether the process exists and is not a zombie that no one has reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
