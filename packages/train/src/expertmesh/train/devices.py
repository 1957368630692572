"""Starting JAX for the main job: the cluster this process belongs to, virtual CPU devices, the cache.

Everything here happens before JAX opens its devices. Environment variables are read here only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from expertmesh.train.options import DeviceOptions, UsageError

VIRTUAL_DEVICES = 8
JOIN_SECONDS = 300  # that processes of a job wait for one that has not joined
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster manager, by the name `jax.distributed.initialize` knows, and its number of processes."""

    method: str
    num_processes: int | None


def start(options: DeviceOptions) -> None:
    """Joins the job's other processes if there are any, and makes JAX ready to open its devices.

    Raises:
      UsageError: if the cluster options do not fit together, or the job's processes do not meet.
    """
    _check(options)
    num_processes = _join(options, detect_cluster(os.environ))
    if options.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    elif jax.config.jax_num_cpu_devices < 0:  # JAX_NUM_CPU_DEVICES is not set
        jax.config.update("jax_num_cpu_devices", max(1, VIRTUAL_DEVICES // num_processes))
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder(os.environ)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def detect_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """The cluster that started this process, from its environment variables."""
    if all(name in environ for name in SLURM):
        return Cluster("slurm", int(environ["SLURM_NTASKS"]))
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Cluster("ompi", int(environ["OMPI_COMM_WORLD_SIZE"]))
    if "PMI_SIZE" in environ and "PMI_RANK" in environ:
        return Cluster("mpi4py", int(environ["PMI_SIZE"]))
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return Cluster("k8s", None)
    return None


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where compiled programs are kept between runs."""
    home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "expertmesh" / "jax"


def _check(options: DeviceOptions) -> None:
    given = {
        "--coordinator": options.coordinator,
        "--num-processes": options.num_processes,
        "--process-id": options.process_id,
    }
    missing = [flag for flag, value in given.items() if value is None]
    alone = options.num_processes == 1 and options.coordinator is None
    if missing and len(missing) < len(given) and not alone:
        raise UsageError(
            "--coordinator, --num-processes and --process-id must be given together; "
            f"got no {' and no '.join(missing)}; add it, or give none of them"
        )
    count, number = options.num_processes, options.process_id
    if count is not None and number is not None and number >= count:
        raise UsageError(
            f"--process-id must be below --num-processes; got process-id={number}, "
            f"num-processes={count}; number the processes from 0 to {count - 1}"
        )


def _join(options: DeviceOptions, cluster: Cluster | None) -> int:
    """Joins the job and returns its number of processes, as far as it is known before the devices are."""
    if options.coordinator is not None:
        print(
            f"process {options.process_id} waits for all {options.num_processes} at {options.coordinator}; after "
            f"{JOIN_SECONDS} s JAX ends it",
            flush=True,
        )
        _initialize(
            initialization_timeout=JOIN_SECONDS,
            coordinator_address=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
        )
        return options.num_processes or 1
    if options.num_processes == 1 or cluster is None or cluster.num_processes == 1:
        return 1
    _initialize(cluster_detection_method=cluster.method)
    return cluster.num_processes or VIRTUAL_DEVICES


def _initialize(**arguments: str | int | None) -> None:
    try:
        jax.distributed.initialize(**arguments)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"the job's processes must meet through jax.distributed; got {given}: {reason}; give "
            "--coordinator, --num-processes and --process-id, or --num-processes 1 to train alone"
        ) from error
