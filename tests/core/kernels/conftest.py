"""Kernels of other GPUs than the one that is there."""

import pytest

from cases.gpus import NAMES, OPTION, as_gpu, has_8_bits


def _of_8_bits(test: str) -> bool:
    return "quant" in test or "mixed" in test


def pytest_generate_tests(metafunc):
    if "capability" in metafunc.fixturenames:
        test = f"{metafunc.module.__name__} {metafunc.function.__name__}"
        given = metafunc.config.getoption(OPTION)
        names = [given] if given else NAMES
        names = [name for name in names if has_8_bits(name) or not _of_8_bits(test)]
        metafunc.parametrize("capability", names, indirect=True)


def pytest_collection_modifyitems(config, items):
    given = config.getoption(OPTION)
    if given and not has_8_bits(given):
        skip = pytest.mark.skip(reason=f"{given} has no numbers of 8 bits")
        for item in items:
            if "kernels" in item.path.parts and _of_8_bits(f"{item.path.stem} {item.name}"):
                item.add_marker(skip)


@pytest.fixture
def capability(request):
    """Hopper's kernels, and those of other GPUs, which run on Hopper too: as compiled for it, or for the others."""
    if request.config.getoption(OPTION):
        yield  # of the whole run
        return
    with as_gpu(request.param):
        yield
