"""Whether all processes of a job were started alike: asked before any device waits for another."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import NamedSharding, PartitionSpec

from expertmesh.ep import EpConfig, bootstrap
from expertmesh.ep.agreement import check_processes, versions
from expertmesh.train.mesh import AXES
from expertmesh.train.options import Options, TrainingError, UsageError
from expertmesh.train.trainer import Trainer

# What may be another in each process; the data are compared by their digest.
OWN = ("data", "out", "log_every", "cpu_devices", "coordinator", "process_id")
TIMEOUT = 60.0


def check_job(
    options: Options,
    trainer: Trainer,
    exchange: EpConfig,
    *,
    tokens: tuple[int, int],
    fingerprint: str,
) -> None:
    """Compares the processes' options, data and versions, and runs one exchange; nothing in a job of one process.

    Call it under `trainer.on_mesh()`.

    Args:
      options: with the values that depend on the devices filled in.
      exchange: of a block.
      tokens: (B, S) of a microbatch.
      fingerprint: digest of the data.

    Raises:
      UsageError: names what differs; in all processes alike.
      TrainingError: names the processes that have not come in time; or the exchange brings wrong values back.
    """
    if jax.process_count() == 1:
        return
    moe = trainer.config.moe
    sharding = NamedSharding(trainer.mesh, PartitionSpec(AXES, None, None))
    shape = (*tokens, trainer.config.model_dim)
    x = jax.ShapeDtypeStruct(shape, moe.dtype, sharding=sharding)
    try:
        check_processes("start", _facts(options, fingerprint), what="run", timeout=TIMEOUT)
        bootstrap(exchange, x, top_k=moe.top_k, timeout=TIMEOUT)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RuntimeError as error:
        raise TrainingError(str(error)) from error


def _facts(options: Options, fingerprint: str) -> dict[str, str]:
    """What must be the same in all processes, as texts by the names of the options."""
    groups = (getattr(options, group.name) for group in dataclasses.fields(options))
    values = {name: value for group in groups for name, value in dataclasses.asdict(group).items()}
    named = {f"--{k.replace('_', '-')}": repr(v) for k, v in values.items() if k not in OWN}
    return named | {"data": fingerprint} | versions()
