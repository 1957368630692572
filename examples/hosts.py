"""Experts over the GPUs of all hosts: a job of several processes, its checks, and three steps.

    sbatch examples/slurm.sbatch examples/hosts.py        Slurm: a process for each GPU
    kubectl apply -f examples/kubernetes.yaml             Kubernetes: a pod for each host, with all of its GPUs

A token crosses hosts once for each host that it needs, and copies of hot experts make ranks level.
"""

import argparse
import os

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from expertmesh.core import MeshResource
from expertmesh.ep import bootstrap, raise_overflow, wait_for
from expertmesh.flax_moe import MoEConfig, init_params, moe, param_specs

AXES = ("host", "ep")  # the axis over hosts first: transport "auto" is then "two_level"
RESOURCE = MeshResource(ep_resource=AXES)
D = 256


def join(environ) -> int:
    """Joins the job's other processes; returns its number of hosts."""
    if "SLURM_PROCID" in environ:  # JAX reads Slurm's variables
        jax.distributed.initialize()
        return int(environ["SLURM_STEP_NUM_NODES"])
    if "JOB_COMPLETION_INDEX" in environ:  # of an indexed Job; the others are in the manifest
        jax.distributed.initialize(
            coordinator_address=environ["COORDINATOR"],
            num_processes=int(environ["NUM_PODS"]),
            process_id=int(environ["JOB_COMPLETION_INDEX"]),
        )
        return int(environ["NUM_PODS"])
    return 1


def loss(params, x, config):
    out = moe(params, x, config)
    return jnp.mean(jnp.square(out.y - x)) + out.aux_loss, out.overflow


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    num_hosts = join(os.environ)
    mesh = jax.make_mesh((num_hosts, jax.device_count() // num_hosts), AXES)  # Explicit axes
    config = MoEConfig(
        num_experts=2 * mesh.size,
        top_k=2,
        expert_dim=512,
        aux_loss_coeff=1e-2,
        transport=options.transport,
        num_spare_experts=1,
        capacity_factor=1.25,
        overflow="error",
    )
    tokens = NamedSharding(mesh, PartitionSpec(AXES))
    x = jax.jit(
        lambda: jax.random.normal(jax.random.key(1), (2 * mesh.size, 128, D)), out_shardings=tokens
    )()
    # Finds a process that is late, or was started otherwise, before any device waits for it.
    group = bootstrap(config.exchange(axis=AXES), x, top_k=config.top_k)
    specs = param_specs(config, RESOURCE)
    params = jax.jit(
        lambda: init_params(jax.random.key(0), D, config),
        out_shardings={name: NamedSharding(mesh, spec) for name, spec in specs.items()},
    )()
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
    for n in range(options.steps):
        (value, overflow), grads = wait_for(step(params, x, config), phase=f"step {n}")
        raise_overflow(overflow)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        if jax.process_index() == 0:
            print(f"step {n}: loss {value:.4f}, EP {group.ep_size} over {num_hosts} hosts")


if __name__ == "__main__":
    main()
