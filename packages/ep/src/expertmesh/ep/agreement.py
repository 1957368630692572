"""Whether the processes of a job are all there, and mean the same exchange, before a device waits for another."""

import json
from collections.abc import Mapping, Sequence

import jax

from expertmesh.core.processes import gather_texts
from expertmesh.ep import hosts


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


def _describe(process: int) -> str:
    owned = {n: d for n, d in enumerate(jax.devices()) if d.process_index == process}
    host = ", ".join({str(hosts.host_of(device)) for device in owned.values()})
    return f"process {process} (host {host}, devices {', '.join(map(str, owned))} of the job)"


def _differences(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """What a process says otherwise than process 0, the first process for each fact."""
    found = []
    for name, value in facts[0].items():
        others = ((p, f.get(name, "nothing")) for p, f in enumerate(facts) if f.get(name) != value)
        if other := next(others, None):
            found.append(f"{name}={value} in process 0, {other[1]} in process {other[0]}")
    return found
