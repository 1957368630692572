"""The tests marked `any_process` again, over the devices of 2, 4 and 8 processes: one start of each for all of them."""

import pathlib

import pytest

HERE = pathlib.Path(__file__).resolve().parent


class Outcomes:
    """A pytest plugin that notes what passed and what failed."""

    def __init__(self):
        self.passed, self.failed = 0, {}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)[-2000:]
        self.passed += report.when == "call" and report.passed


def run_the_suite(paths=(HERE,), select="any_process and not full", keyword=""):
    """Runs in each process, in the same order: they meet in every collective."""
    outcomes = Outcomes()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", select, "-k", keyword]
    pytest.main([*options, *map(str, paths)], plugins=[outcomes])
    return [outcomes.passed, outcomes.failed]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "processes", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (4, 8))]
)
def test_the_suite_over_several_processes(multiprocess, processes):
    results = multiprocess(
        "conformance.test_processes:run_the_suite",
        processes=processes,
        devices=8 // processes,
        timeout=300,
        # What is balanced by copies is an exchange, of other choices: in nightly runs.
        keyword="not copies" if processes == 2 else "",
    )
    assert [failed for _, failed in results] == [{}] * processes
    passed = {passed for passed, _ in results}
    assert len(passed) == 1 and passed.pop() >= 7


def run_exchanges_and_the_block(mode):
    block = HERE / "test_block.py::test_every_option_in_each_mode"
    return run_the_suite([HERE / "test_exchange.py", block], "any_device", mode)


# In processes of one GPU each the settings are those of "nvlink": settings.py.
@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", ["explicit", "resource", "manual"])
@pytest.mark.parametrize("processes", [2, 4])
def test_exchanges_by_nvlink_between_processes(multiprocess, processes, mode):
    results = multiprocess(
        "conformance.test_processes:run_exchanges_and_the_block",
        processes=processes,
        devices=1,
        timeout=300,
        mode=mode,
    )
    assert [failed for _, failed in results] == [{}] * processes
    passed = {passed for passed, _ in results}
    assert len(passed) == 1 and passed.pop() >= 14
