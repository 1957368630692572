"""What the processes of test_multiprocess_runner.py run."""

import os
import signal
import subprocess
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def total():
    """Sum over all devices of (process id + 1), by an all-reduce."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    local = jnp.full((jax.local_device_count(),), jax.process_index() + 1.0)
    values = jax.make_array_from_process_local_data(sharding, local)
    return {
        "process": jax.process_index(),
        "devices": [jax.local_device_count(), jax.device_count()],
        "total": float(
            jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(values)
        ),
    }


def fails(rank):
    if jax.process_index() == rank:
        raise RuntimeError(f"planned failure of process {rank}")
    return total()


def is_killed(rank):
    total()
    if jax.process_index() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # with process 0 the coordinator ends, and with it those that still need it
    return "lives"


def leaves_a_child(pid_file):
    """Process 0 starts a child and sleeps; process 1 fails once both run."""
    if jax.process_index() == 0:
        child = subprocess.Popen(["sleep", "600"])
        with open(f"{pid_file}.tmp", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        os.replace(f"{pid_file}.tmp", pid_file)
        time.sleep(600)
    while not os.path.exists(pid_file):
        time.sleep(0.05)
    raise RuntimeError("planned failure beside a child")
