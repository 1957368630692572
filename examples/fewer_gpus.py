"""More model on fewer GPUs: Muon's and Adam's state and layers' inputs in the host's memory, in plain JAX and optax."""

import functools

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import MeshResource, global_shard_guard
from expertmesh.flax_moe import MoEConfig, init_params, moe, param_specs

LAYERS, WIDTH = 2, 128
CONFIG = MoEConfig(num_experts=4, top_k=2, expert_dim=256, aux_loss_coeff=1e-2)
SIZE = 2 if jax.device_count() > 1 else 1
MESH = jax.make_mesh((SIZE,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:SIZE])
RESOURCE = MeshResource(ep_resource="ep")


def matrices(params):
    """The dimensions of experts' matrices; what is None is Adam's."""
    dims = {
        "wi": optax.contrib.MuonDimensionNumbers(-3, -1),  # [E, D, 2, F]: gate and up are apart
        "wo": optax.contrib.MuonDimensionNumbers(-2, -1),  # [E, F, D]
    }
    return {name: dims.get(name) for name in params}


OPTIMIZER = optax.contrib.muon(
    1e-3, consistent_rms=0.2, muon_weight_dimension_numbers=matrices, adam_b2=0.95
)


def layer(params, x):
    x = checkpoint_name(x, "layer_input")
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    out = moe(params, normed, CONFIG)
    return x + out.y, out.aux_loss


def loss(layers, x, y, *, offload):
    """Layers are computed again in the backward, from inputs that wait in the host's memory."""
    names = ["layer_input"]
    policies = jax.checkpoint_policies
    keep = policies.save_only_these_names(*names)
    if offload:
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=names,
            offload_src="device",
            offload_dst="pinned_host",
        )
    total = 0.0
    for params in layers:
        x, aux_loss = jax.checkpoint(layer, policy=keep)(params, x)
        total += aux_loss
    return jnp.mean((x - y) ** 2) + total


def of(tree, kind):
    """Where the leaves of a tree are, in memory of that kind."""
    return jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(kind), tree)


def make_update(params, state):
    """Of a layer like these: while its state is on the device, no other's is. Donated are results, in their order."""
    places = jax.tree.map(lambda leaf: leaf.sharding, (params, state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=places)
    def update(params, state, grads):
        state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def init(key, kind):
    """A layer's parameters, and its state in memory of that kind."""
    specs = param_specs(CONFIG, RESOURCE)
    params = init_params(key, WIDTH, CONFIG)
    params = {k: jax.device_put(p, NamedSharding(MESH, specs[k])) for k, p in params.items()}
    state = OPTIMIZER.init(params)
    return params, jax.device_put(state, of(state, kind))


def train(offload, steps=3):
    """The losses, and the kinds of memory in which the state lies."""
    kind = "pinned_host" if offload else "device"
    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers, states = map(list, zip(*(init(key, kind) for key in keys), strict=True))
    rows = NamedSharding(MESH, PartitionSpec("ep"))
    x, y = (jax.random.normal(jax.random.key(n), (4, 64, WIDTH)) for n in (1, 2))
    x, y = jax.device_put((x, y), rows)
    value_and_grad = jax.jit(jax.value_and_grad(functools.partial(loss, offload=offload)))
    update, losses = make_update(layers[0], states[0]), []
    for _ in range(steps):
        value, grads = value_and_grad(layers, x, y)
        losses.append(float(value))
        for i in range(LAYERS):
            layers[i], states[i] = update(layers[i], states[i], grads[i])
    return losses, {leaf.sharding.memory_kind for leaf in jax.tree.leaves(states)}


if __name__ == "__main__":
    with jax.set_mesh(MESH), global_shard_guard(RESOURCE):
        for offload in (True, False):
            losses, kinds = train(offload)
            print(sorted(kinds), *losses)
