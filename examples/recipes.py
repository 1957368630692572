"""The block among the conventions of MaxText, levanter and Hugging Face; docs/recipes.md goes through it.

python examples/recipes.py       runs each at a small size
"""

import dataclasses
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import (
    Float8BlockScaling,
    MeshResource,
    QuantizedArray,
    QuantizedWeight,
    activate,
    dequantize,
    global_shard_guard,
    grouped_dense,
    update_expert_bias,
)
from expertmesh.ep import EpConfig, combine, dispatch, dispatch_weights, prepare
from expertmesh.flax_moe import (
    LogicalAxes,
    MoEConfig,
    checkpoint,
    hf,
    merge_wi,
    moe,
    param_specs,
    split_wi,
)
from expertmesh.flax_moe.nnx import MoEBlock

BIAS_RATE = 1e-3


@nnx.jit
def nnx_step(block: MoEBlock, x: jax.Array, target: jax.Array):
    """A loss, the gradients of what is an nnx.Param, and the bias moved, by value."""

    def loss(block):
        out = block(x)
        return jnp.mean(jnp.square(out.y - target)) + out.aux_loss, out.tokens_per_expert

    (value, counts), grads = nnx.value_and_grad(loss, has_aux=True)(block)
    block.expert_bias[...] = update_expert_bias(block.expert_bias[...], counts, BIAS_RATE)
    return value, grads


def to_maxtext(params, expert_bias=None) -> dict:
    """MaxText's tree of a layer's block, `MoeBlock_0` and, where there are any, `shared_experts`."""
    split = split_wi(params)
    gate = {"kernel": split.pop("gate_kernel")}
    if expert_bias is not None:
        gate["bias"] = expert_bias
    shared = {
        name: {"kernel": split.pop(f"shared_{name}")}
        for name in ("wi_0", "wi_1", "wo")
        if f"shared_{name}" in split
    }
    tree = {"MoeBlock_0": {"gate": gate, **split}}
    return tree | ({"shared_experts": shared} if shared else {})


def from_maxtext(tree):
    """The parameters and the expert bias (or None) of one layer, `prefuse_moe_weights` or not."""
    block = dict(tree["MoeBlock_0"])
    gate = block.pop("gate")
    shared = {f"shared_{name}": w["kernel"] for name, w in tree.get("shared_experts", {}).items()}
    params = {"gate_kernel": gate["kernel"], **block, **shared}
    if "wi" in params:  # [E, D, 2 F]
        params["wi_0"], params["wi_1"] = jnp.split(params.pop("wi"), 2, axis=-1)
    return merge_wi(params), gate.get("bias")


def move_layers(tree, source: int, destination: int):
    """Moves the layers of scanned arrays; those of a routing bias, which is no nnx.Param, are first in MaxText."""

    def move(path, w):
        is_bias = jax.tree_util.keystr(path).endswith("['gate']['bias']")
        return w if is_bias else jnp.moveaxis(w, source, destination)

    return jax.tree_util.tree_map_with_path(move, tree)


def to_maxtext_layers(params, expert_bias=None):
    """MaxText's tree of scanned layers, of ours whose layers are the first dimension."""
    return move_layers(jax.vmap(to_maxtext)(params, expert_bias), 0, 1)


def from_maxtext_layers(tree):
    """The parameters and the expert biases [L, E] (or None) of scanned layers, layers first."""
    return jax.vmap(from_maxtext)(move_layers(tree, 1, 0))


def moe_mlp(x, selected_experts, combine_weights, w_gate_up, w_down, *, axis="expert"):
    """levanter's experts as a function: x [T, D], both choices [T, K], w_gate_up [E, D, 2 I], w_down [E, I, D].

    Returns [T, D] and the number of dropped choices. The caller routes; experts are sharded over `axis`.
    """
    E, D, I2 = w_gate_up.shape
    handle = prepare(selected_experts, EpConfig(num_experts=E, axis=axis))
    rows = dispatch(handle, x)
    hidden = grouped_dense(rows, w_gate_up.reshape(E, D, 2, I2 // 2), handle.group_sizes)
    out = grouped_dense(activate(hidden, "silu"), w_down, handle.group_sizes)
    weights = dispatch_weights(handle, combine_weights)
    out = (out.astype(jnp.float32) * weights[..., None]).astype(x.dtype)
    return combine(handle, out), handle.num_dropped.sum()


def from_levanter(router, w_gate, w_up, w_down) -> dict:
    """The parameters of `moe` from those of a levanter block: router [D, E], [E, D, I], [E, D, I], [E, I, D]."""
    return merge_wi({"gate_kernel": router, "wi_0": w_gate, "wi_1": w_up, "wo": w_down})


def load_model(folder, mesh, layers=None, keep_fp8=False):
    """The MoE layers of a Hugging Face model on a mesh (fsdp, ep), each with its config and expert bias."""
    files = checkpoint.Checkpoint(folder)
    config = hf.moe_config(files.config)
    resource = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
    shardings = {k: NamedSharding(mesh, spec) for k, spec in param_specs(config, resource).items()}
    for layer in hf.moe_layers(files.config) if layers is None else layers:
        params, bias = checkpoint.load_sharded(
            files, files.config, layer, shardings, keep_fp8=keep_fp8, progress=print
        )
        yield config, params, bias


def sparse_mixer(logits, jitter):
    """The two choices of each token and their weights, as Phi-3.5-MoE makes them outside of training, for `moe`.

    A choice is the best of those that are left; its weight is its share of the softmax of all that are nearly as good.
    """
    experts, left = jnp.arange(logits.shape[-1]), jnp.ones(logits.shape, bool)
    choices, weights = [], []
    for _ in range(2):
        best = jnp.max(logits, axis=-1, where=left, initial=-jnp.inf, keepdims=True)
        near = left & (best - logits <= 2 * jitter * jnp.maximum(jnp.abs(logits), best))
        p = jax.nn.softmax(jnp.where(near, logits, -jnp.inf))
        choices.append(jnp.argmax(jnp.where(left, logits, -jnp.inf), axis=-1))
        chosen = experts == choices[-1][..., None]
        weights.append(jnp.sum(jnp.where(chosen, p, 0), axis=-1))
        left &= ~chosen
    return {"topk_idx": jnp.stack(choices, -1), "topk_weights": jnp.stack(weights, -1)}


def in_fp8(config, params, x, bias=None):
    """`moe` of weights that are kept in 8 bits; no copy in 16 bits is made of what the forward reads in 8."""
    config = dataclasses.replace(config, recipe=Float8BlockScaling(power_2_scale=False))
    kept = {name: w for name, w in params.items() if isinstance(w, QuantizedArray)}
    wide = {name: dequantize(w) for name, w in kept.items()}
    kernels = {name: QuantizedWeight(w) for name, w in kept.items()}
    return moe(params | wide, x, config, expert_bias=bias, weights_quantized=kernels)


def save_model(folder, hf_config, layers, fp8=False):
    """A checkpoint of MoE layers, {number: (params, expert_bias)}, under Hugging Face's names."""
    tensors = []
    for number, (params, bias) in layers.items():
        tensors += checkpoint.export_tensors(
            params, hf_config, number, expert_bias=bias, dtype=jnp.bfloat16, fp8=fp8
        )
    checkpoint.write_checkpoint(folder, tensors, hf_config, progress=print)


def nnx_example():
    """A step on a mesh of four names, whose axes are Auto, laid out by a framework's logical axis rules."""
    sizes = dict(num_experts=8, top_k=2, expert_dim=8, dtype=jnp.float32)
    config = MoEConfig(**sizes, score_function="sigmoid", use_expert_bias=True, aux_loss_coeff=1e-2)
    mesh = jax.make_mesh(
        (1, jax.device_count() // 2, 2, 1) if jax.device_count() > 1 else (1, 1, 1, 1),
        ("data", "fsdp", "expert", "tensor"),
        axis_types=(AxisType.Auto,) * 4,
    )
    x = jax.random.normal(jax.random.key(0), (8, 4, 16))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert"))))
    roles = dict(dp_resource="data", fsdp_resource="fsdp", tp_resource="tensor")
    rules = (("exp", "expert"), ("embed", "fsdp"), ("mlp", "tensor"))
    with (
        jax.set_mesh(mesh),
        global_shard_guard(MeshResource(ep_resource="expert", **roles)),
        nnx.logical_axis_rules(rules),
    ):
        block = MoEBlock(16, config, rngs=nnx.Rngs(0), logical_axes=LogicalAxes())
        value, grads = nnx_step(block, x, jnp.ones_like(x))
    return block, x, value, grads


def levanter_example():
    """Operands of `moe_mlp`, and the same on a mesh (data, expert)."""
    ranks = 2 if jax.device_count() > 1 else 1
    mesh = jax.make_mesh(
        (jax.device_count() // ranks, ranks),
        ("data", "expert"),
        axis_types=(AxisType.Explicit,) * 2,
    )
    specs = [PartitionSpec(("data", "expert"))] * 3 + [PartitionSpec("expert", "data")] * 2
    T, D, E, F, K = 32, 16, 4, 8, 2
    keys = jax.random.split(jax.random.key(0), 4)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[0], (T, E))), K)
    x = jax.random.normal(keys[1], (T, D))
    w_gate_up = jax.random.normal(keys[2], (E, D, 2 * F)) * D**-0.5
    w_down = jax.random.normal(keys[3], (E, F, D)) * F**-0.5
    arrays = (x, chosen, weights, w_gate_up, w_down)
    layouts = [NamedSharding(mesh, spec) for spec in specs]
    return arrays, tuple(map(jax.device_put, arrays, layouts))


if __name__ == "__main__":
    print("NNX:", nnx_example()[2])
    print("levanter: dropped", jax.jit(moe_mlp)(*levanter_example()[1])[1])
