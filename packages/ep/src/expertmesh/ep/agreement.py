"""Checks on the hosts that all processes of a job are there and run the same exchange; devices would only wait."""

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from expertmesh.core.processes import gather_texts, say, texts_of_all
from expertmesh.ep import hosts

__all__ = ["check_processes", "wait_for"]

_PHASE = "phase"


def wait_for[T](results: T, *, phase: str, timeout: float = 60.0) -> T:
    """Waits for the results of a jitted call; if they do not come, says which processes are behind. Call it outside
    jit.

    Devices that exchange wait for each other, in XLA's collectives without end: one process that is gone, or hangs in
    its input, hangs all. Each process records its phase here. If its devices do not answer, the call compares phases
    and names the processes that are behind.

    Args:
      results: a pytree of arrays.
      phase: a name for these results, the same in all processes, such as f"step {n}".
      timeout: seconds.

    Returns:
      The results, ready.

    Raises:
      RuntimeError: they are not ready in time, or failed: names the phase, and each process that has not come to it,
        with the phase that it was last in, its host and its devices.

    Costs one message to JAX's coordination service. Call it in all processes, as often as you want to know.
    """
    say(_PHASE, json.dumps([phase, socket.gethostname()]))
    end = time.monotonic() + timeout
    failed: list[Exception] = []
    waiter = threading.Thread(target=_wait, args=(results, failed), daemon=True)
    waiter.start()
    waiter.join(timeout)
    if not waiter.is_alive() and not failed:
        return results
    behind = _processes_behind(phase, end)
    who = ", ".join(behind) or "no process is behind; look at all logs"
    what = f"failed: {failed[0]}" if failed else f"not ready after {timeout:g} s"
    raise RuntimeError(
        f"wait_for: every process must take part in {phase!r}; its results are {what}; waiting for: {who}; "
        "start the job anew from its last checkpoint"
    )


def _wait(results: Any, failed: list[Exception]) -> None:
    try:
        jax.block_until_ready(results)
    except Exception as error:  # of the runtime, as where a peer's connection is closed
        failed.append(error)


def _processes_behind(phase: str, end: float) -> list[str]:
    """Those that have not come to a phase until then; a failure may be seen before the others have."""
    while True:
        try:
            texts = texts_of_all(_PHASE)
        except jax.errors.JaxRuntimeError:  # whom they are told to is gone
            return [_describe(0)]
        said = [json.loads(text) if text else None for text in texts]
        behind = {p: last for p, last in enumerate(said) if last is None or last[0] != phase}
        if not behind or time.monotonic() > end:
            return [_describe(p, *(last or ())) for p, last in behind.items()]
        time.sleep(0.1)


def check_processes(function: str, facts: Mapping[str, str], *, timeout: float) -> None:
    """Raises in all processes alike unless all call it in time, with the same facts.

    Raises:
      RuntimeError: names `function`, and each process that has said nothing, with its host and devices.
      ValueError: names `function`, and what differs from process 0.
    """
    said = gather_texts(function, json.dumps(dict(facts)), timeout=timeout)
    if missing := [process for process, text in enumerate(said) if text is None]:
        raise RuntimeError(
            f"{function}: every process must take part; waited {timeout:g} s for "
            f"{', '.join(map(_describe, missing))}; look at the log there, and start the job anew"
        )
    differences = _differences([json.loads(text or "") for text in said])
    if differences:
        raise ValueError(
            f"{function}: all processes must mean the same exchange; got {'; '.join(differences)}; "
            "start the same script with the same options and versions everywhere"
        )


def _describe(process: int, phase: str | None = None, name: str | None = None) -> str:
    """Where a process is, and when it was last heard of."""
    owned = {n: d for n, d in enumerate(jax.devices()) if d.process_index == process}
    host = ", ".join({str(hosts.host_of(device)) for device in owned.values()})
    numbers = ", ".join(map(str, owned))
    heard = f", last in {phase!r} on {name}" if phase else ""
    return f"process {process} (host {host}, devices {numbers} of the job{heard})"


def _differences(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """What a process says otherwise than process 0, the first process for each fact."""
    found = []
    for name, value in facts[0].items():
        others = ((p, f.get(name, "nothing")) for p, f in enumerate(facts) if f.get(name) != value)
        if other := next(others, None):
            found.append(f"{name}={value} in process 0, {other[1]} in process {other[0]}")
    return found
