"""The tests marked `any_process` again, over the devices of 2 and of 4 processes: one start of each for all of them."""

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


def run_the_suite():
    """Runs in each process, in the same order: they meet in every collective."""
    outcomes = Outcomes()
    options = [
        "-m",
        "any_process and not full",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    pytest.main([*options, str(HERE)], plugins=[outcomes])
    return [outcomes.passed, outcomes.failed]


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_suite_over_several_processes(multiprocess, processes):
    results = multiprocess(
        "conformance.test_processes:run_the_suite",
        processes=processes,
        devices=8 // processes,
        timeout=300,
    )
    assert [failed for _, failed in results] == [{}] * processes
    passed = {passed for passed, _ in results}
    assert len(passed) == 1 and passed.pop() >= 7
