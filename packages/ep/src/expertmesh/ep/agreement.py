"""Checks on the hosts that all processes of a job are there and run the same exchange; devices would only wait."""

import json
import socket
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from expertmesh.core.mesh import current_resource
from expertmesh.core.processes import gather_texts, say, texts_of_all
from expertmesh.core.support import platform_of
from expertmesh.ep import hosts
from expertmesh.ep.config import EpConfig
from expertmesh.ep.transports import unlinked
from expertmesh.ep.transports.choice import Exchange
from expertmesh.ep.transports.names import parse
from expertmesh.ep.version import __version__

__all__ = [
    "CHECKSUM_BITS",
    "check_processes",
    "checksum",
    "facts_of",
    "say_prepared",
    "versions",
    "wait_for",
]

CHECKSUM_BITS = 30
_PHASE, _PREPARED = "phase", "prepare"
_REMEDY = "start the same script with the same options and versions everywhere"


def facts_of(
    config: EpConfig, shape: Sequence[int], top_k: int, mesh: Mapping[str, int] | None
) -> dict[str, str]:
    """What must be the same in all processes of an exchange: options, sizes and versions, as texts.

    Args:
      config: EpConfig.
      shape: of the tokens, without their features.
      top_k: K.
      mesh: size of each axis; None where there is none.
    """
    values: dict[str, object] = config.to_dict() | {
        "top_k": top_k,
        "tokens": tuple(shape),
        "mesh": mesh and dict(mesh),
        "resource": current_resource(),
        "nvlink": _nvlink(config),
    }
    return {name: repr(value) for name, value in values.items()} | versions()


def versions() -> dict[str, str]:
    """Of what must be the same in all processes of a job."""
    return {"jax": jax.__version__, "expertmesh": __version__}


def _nvlink(config: EpConfig) -> str | None:
    """What "auto" makes of the links that this process sees; None where nothing depends on them."""
    platform = platform_of()
    if not parse(config.transport).chooses or platform != "cuda":
        return None
    return "linked" if unlinked(Exchange(platform=platform)) is None else "not known to be linked"


def checksum(facts: Mapping[str, str]) -> int:
    """Of CHECKSUM_BITS bits, the same for the same facts."""
    return zlib.crc32(json.dumps(dict(facts)).encode()) & ((1 << CHECKSUM_BITS) - 1)


def say_prepared(facts: Mapping[str, str]) -> None:
    """Tells `wait_for` of the exchange that is prepared, should it not end."""
    say(_PREPARED, json.dumps(dict(facts)))


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
        with the phase that it was last in, its host and its devices; where all have come, in what the exchanges differ
        that they prepared last.

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
    who = ", ".join(behind) or f"no process is behind; {_prepared()}"
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


def _prepared() -> str:
    """In what the processes' exchanges differ, as each was prepared last."""
    texts = dict(enumerate(texts_of_all(_PREPARED)))
    said = {p: json.loads(text) for p, text in texts.items() if text}
    differences = _differences(said)
    if said:
        differences += [f"none in process {p}" for p in texts if p not in said]
    if not differences:
        return "look at all logs"
    return f"they prepared exchanges that differ in {'; '.join(differences)}; {_REMEDY}"


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


def check_processes(
    function: str, facts: Mapping[str, str], *, what: str = "exchange", timeout: float
) -> None:
    """Raises in all processes alike unless all call it in time, with the same facts about `what`.

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
    differences = _differences({p: json.loads(text or "") for p, text in enumerate(said)})
    if differences:
        raise ValueError(
            f"{function}: all processes must mean the same {what}; got {'; '.join(differences)}; {_REMEDY}"
        )


def _describe(process: int, phase: str | None = None, name: str | None = None) -> str:
    """Where a process is, and when it was last heard of."""
    owned = {n: d for n, d in enumerate(jax.devices()) if d.process_index == process}
    host = ", ".join({str(hosts.host_of(device)) for device in owned.values()})
    numbers = ", ".join(map(str, owned))
    heard = f", last in {phase!r} on {name}" if phase else ""
    return f"process {process} (host {host}, devices {numbers} of the job{heard})"


def _differences(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """What a process says otherwise than the first one, the first such process for each fact, by their numbers."""
    found = []
    first, own = next(iter(facts.items()), (0, {}))
    for name, value in own.items():
        others = ((p, f.get(name, "nothing")) for p, f in facts.items() if f.get(name) != value)
        if other := next(others, None):
            found.append(f"{name}={value} in process {first}, {other[1]} in process {other[0]}")
    return found
