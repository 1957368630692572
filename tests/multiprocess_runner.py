"""Runs one function in several processes joined by jax.distributed: gloo on CPU, NCCL on GPUs."""

import contextlib
import importlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

TESTS = pathlib.Path(__file__).resolve().parent
PACKAGES = TESTS.parent / "packages"
LOG_TAIL = 6000
# Most of a test's time is the compiler's; what a program computes does not hang on it. XLA:CPU's older emitter of fused
# loops compiles a block's gradient in 0.65 s, the newer one in 1.5 s (jax 0.11.2, 2026-11-22; 0.12 has the newer only).
# A program in several parts, for several cores, is a seventh more work, and each core has its own tests.
COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def on_gpu() -> bool:
    """Whether JAX_PLATFORMS puts CUDA first."""
    return os.environ.get("JAX_PLATFORMS", "").startswith("cuda")


def run_processes(
    target: str,
    processes: int = 2,
    devices: int = 1,
    timeout: float = 240,
    killed: int | None = None,
    **kwargs,
):
    """Calls `target` with `kwargs` in `processes` processes of `devices` devices each.

    Args:
      target: "module:function", the module's name as seen from tests/ (such as "ep.mp_cases:run").
      processes: how many processes join.
      devices: virtual CPU devices of each, or GPUs of each where JAX_PLATFORMS puts CUDA first.
      timeout: seconds until all of them must have ended.
      killed: the process, not 0, that ends itself by SIGKILL; its result is None. The others do not wait for it.
      **kwargs: JSON values for the function.

    Returns:
      What the function returned, as JSON values, one per process by process id.

    Raises:
      AssertionError: if a process fails or time runs out; with the end of each process's output.
        The first failure ends the others.
    """
    environments = [_environment(rank, processes, devices) for rank in range(processes)]
    with tempfile.TemporaryDirectory() as folder:
        job = {"target": target, "kwargs": kwargs, "processes": processes, "port": free_port()}
        job["killed"] = killed
        logs = [pathlib.Path(folder, f"log{rank}") for rank in range(processes)]
        results = [pathlib.Path(folder, f"result{rank}") for rank in range(processes)]
        workers: list[subprocess.Popen] = []
        try:
            for rank, environment in enumerate(environments):
                task = json.dumps(job | {"rank": rank, "result": str(results[rank])})
                with logs[rank].open("wb") as log:
                    worker = subprocess.Popen(
                        [sys.executable, __file__, task],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                workers.append(worker)
            wanted = [-signal.SIGKILL if rank == killed else 0 for rank in range(processes)]
            codes = _wait(workers, wanted, timeout)
            if codes != wanted:
                time.sleep(0.5)  # peers of the one that failed first often say more
                raise AssertionError(_report(target, timeout, codes, logs))
            return [
                None if rank == killed else json.loads(result.read_text())
                for rank, result in enumerate(results)
            ]
        finally:
            for worker in workers:
                _kill_group(worker)


def _wait(workers, wanted, timeout):
    """Exit statuses when all have ended, when one is not as wanted, or when time is up."""
    end = time.monotonic() + timeout
    while True:
        codes = [worker.poll() for worker in workers]
        wrong = any(code not in (None, want) for code, want in zip(codes, wanted, strict=True))
        if wrong or None not in codes or time.monotonic() > end:
            return codes
        time.sleep(0.02)


def _report(target, timeout, codes, logs):
    lines = [f"{target} failed or ran past {timeout} s"]
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        state = "still running" if code is None else f"exit {code}"
        lines += [f"--- process {rank} ({state})", log.read_text(errors="replace")[-LOG_TAIL:]]
    return "\n".join(lines)


def _kill_group(worker):
    """Ends the worker and whatever it started; the group outlives a worker that left children."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


def _environment(rank, processes, devices):
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "COV_")) and name != "XLA_FLAGS"
    }
    paths = [str(TESTS)] + [str(path) for path in sorted(PACKAGES.glob("*/src"))]
    inherited = os.environ.get("PYTHONPATH", "")
    paths += [os.path.abspath(path) for path in inherited.split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if on_gpu():
        visible = visible_gpus()
        if len(visible) < processes * devices:
            import pytest

            pytest.skip(f"needs {processes * devices} GPUs, {len(visible)} visible")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[rank * devices : (rank + 1) * devices]
        )
    else:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = COMPILE_QUICKLY
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
        environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    return environment


def visible_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by nvidia-smi: jax would take memory on each."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu for gpu in listed.split(",") if gpu]
    result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(i) for i, _ in enumerate(line for line in result.stdout.splitlines() if line)]


def free_port() -> int:
    """A port that nothing listens on, nor one that connections get: of those a run beside this one takes some."""
    while True:
        port = random.SystemRandom().randrange(15000, 30000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def _work(task):
    import jax

    jax.distributed.initialize(
        f"127.0.0.1:{task['port']}", task["processes"], task["rank"], initialization_timeout=120
    )
    module, function = task["target"].split(":")
    result = getattr(importlib.import_module(module), function)(**task["kwargs"])
    pathlib.Path(task["result"]).write_text(json.dumps(result))
    if task["killed"] is not None:
        os._exit(0)  # JAX's shutdown would wait for the one that is gone
    jax.distributed.shutdown()


if __name__ == "__main__":
    try:
        _work(json.loads(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit waits for the peers in jax.distributed's shutdown barrier.
        os._exit(1)
