"""The MoE block in your own model: runs on one device, on a laptop's CPU cores, on a cluster."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from expertmesh.core import MeshResource
from expertmesh.flax_moe import MoEConfig, init_params, moe, param_specs

config = MoEConfig(num_experts=8, top_k=2, expert_dim=512, aux_loss_coeff=1e-2)
size = 2 ** (jax.device_count().bit_length() - 1)  # of six devices four, as 8 experts need
ep, devices = min(max(size // 2, 1), config.num_experts), jax.devices()[:size]
mesh = jax.make_mesh((size // ep, ep), ("fsdp", "ep"), devices=devices)  # Explicit axes
resource = MeshResource(fsdp_resource="fsdp", ep_resource="ep")


def place(array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


params = init_params(jax.random.key(0), 256, config)  # gate_kernel, wi, wo
params = jax.tree.map(place, params, param_specs(config, resource))
x = place(jax.random.normal(jax.random.key(1), (2 * size, 128, 256)), PartitionSpec(("fsdp", "ep")))


def loss(params, x):
    out = moe(params, x, config)  # routes, exchanges, computes, combines
    return jnp.mean(jnp.square(out.y - x)) + out.aux_loss


value, grads = jax.jit(jax.value_and_grad(loss))(params, x)  # grads are sharded like params
print(f"loss {value:.4f} on mesh {dict(mesh.shape)}; wi grad {grads['wi'].sharding.spec}")
