"""Settings that JAX reads once, so they are in the environment before anything imports it."""

import gc
import os

from multiprocess_runner import COMPILE_QUICKLY, on_gpu, run_processes, visible_gpus

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Several test processes share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Tests take the first GPUs: each worker of xdist begins with two others.
if on_gpu() and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    gpus = visible_gpus()
    first = 2 * int(worker.removeprefix("gw")) % max(len(gpus), 1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
# A run compiles few programs twice, and to keep one costs a quarter of its compilation. With JAX_COMPILATION_CACHE_DIR
# set, the next run finds them.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import pytest  # noqa: E402

from cases.gpus import HERE, NAMES, OPTION, as_gpu  # noqa: E402

if not on_gpu():
    os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)
# What Triton's interpreter runs needs no GPU.
INTERPRETED = "TRITON_INTERPRET" in os.environ


def pytest_addoption(parser):
    parser.addoption(OPTION, help=f"kernels are those of another GPU: {', '.join(NAMES[1:])}")


@pytest.fixture(scope="session", autouse=True)
def of_gpu(request):
    """Kernels of the GPU that the option names, in all tests of the run."""
    with as_gpu(request.config.getoption(OPTION) or HERE):
        yield


def pytest_configure():
    if INTERPRETED:
        from cases import interpreted

        interpreted.install()


def pytest_collection_modifyitems(items):
    # Files that take long in one piece begin first, so that no worker is left alone with one at the end.
    items.sort(key=lambda item: not {"integration", "train"} & set(item.path.parts))
    if on_gpu():
        items.sort(key=lambda item: item.get_closest_marker("multiprocess") is None)
    if on_gpu() or INTERPRETED:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device (JAX_PLATFORMS=cuda,cpu)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish():
    """Python's collector goes less often through the many long-lived objects of pytest and JAX."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def multiprocess():
    """`run_processes` of multiprocess_runner.py."""
    return run_processes
