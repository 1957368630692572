"""The MoE block in ten lines: on one device, GPU or CPU."""

import jax

from expertmesh.flax_moe import MoEConfig, init_params, moe

config = MoEConfig(num_experts=8, top_k=2, expert_dim=512)  # recipe="fp8_block"
params = init_params(jax.random.key(0), 256, config)  # a dict of arrays
x = jax.random.normal(jax.random.key(1), (4, 128, 256))  # batch, sequence, width
out = jax.jit(moe)(params, x, config)  # routes, computes, combines
print(out.y.shape, out.tokens_per_expert, "dropped", out.num_dropped)
grads = jax.jit(jax.grad(lambda p: moe(p, x, config).y.sum()))(params)
