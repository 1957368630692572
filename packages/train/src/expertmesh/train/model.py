"""A byte-level decoder language model: pre-norm causal attention and MoE layers, as pure functions.

    x = sum_j shift(onehot(byte), j) @ embed[j]            the byte and the WINDOW - 1 before it
    x = x + attention(norm(x));  x = x + moe(norm(x))      once per layer
    logits = norm(x) @ head

Dimension key: B sequences, S positions, D model width, H heads, d head width (D = H * d), V = 256 bytes,
W = WINDOW bytes seen by the embedding, L layers, E experts, F expert width.

Everything that belongs to a layer (parameters, quantizers' state, quantized weights) is stacked along L, and one
program of a layer is scanned over it, so compile time does not grow with depth. A scan copies to stacks and from them
what its layers keep for the backward; `ModelConfig.unrolled` saves that.

The same code runs without a mesh, with Auto axes and with Explicit axes. Activations are split over
B on both mesh axes. Dense weights are stored split over "fsdp" and gathered where they are used;
the expert weights stay where `param_specs` puts them.

Bytes are looked up by a GEMM with one-hot rows. Its gradient is a GEMM too, so it is deterministic on every platform;
the scatter-add of an indexed lookup is not on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from expertmesh.core import DelayedScaling, MeshResource
from expertmesh.flax_moe import (
    MoEConfig,
    init_params,
    init_quant_state,
    moe,
    param_specs,
    quantize_weights,
)
from expertmesh.flax_moe.params import EXPERTS
from expertmesh.train.attention import attend
from expertmesh.train.mesh import RESOURCE, place
from expertmesh.train.offload import HOST
from expertmesh.train.weight import read

VOCAB = 256
WINDOW = 4
ROPE_BASE = 10_000.0
LAYER_INPUT = "layer_input"
# Parameters that GEMMs alone read, and how many leading dimensions number the weights in each.
_WEIGHTS = {"embed": 0, "head": 0, "qkv": 1, "out": 1, "wi": 2, "wo": 2}

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder.

    Attributes:
      model_dim: a multiple of `heads`, such that each head is of even width.
      remat_layers: whether the backward keeps each layer's input alone and computes the layer again.
      kept_in_host: names of the only values that layers keep for the backward, in the host's memory: LAYER_INPUT and
        those of `expertmesh.flax_moe.remat.CHECKPOINT_NAMES`; () keeps values on the device.
      unrolled: whether each layer is compiled by itself, not scanned. Their gradients are then made whole.
    """

    layers: int
    model_dim: int
    heads: int
    moe: MoEConfig
    remat_layers: bool = False
    kept_in_host: tuple[str, ...] = ()
    unrolled: bool = False

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.heads


class Output(NamedTuple):
    """What a forward pass gives; the other fields follow `MoEOutput`."""

    logits: jax.Array  # float32[B, S, V]
    aux_loss: jax.Array  # float32[], summed over the layers
    z_loss: jax.Array  # float32[], summed over the layers
    tokens_per_expert: jax.Array  # int32[L, E]
    num_dropped: jax.Array  # int32[], summed over the layers
    entropy: jax.Array  # float32[L], of the routers, in nats
    quant_state: Any  # for the next call; see init_quant_states


def init(key: jax.Array, config: ModelConfig) -> Params:
    """Parameters drawn from `key`; matrices have variance 1 / fan-in, the head starts at zero.

    A layer's values depend on its key alone: they are those of a layer that is drawn by itself.
    """
    keys = jax.random.split(key, 1 + config.layers)
    D = config.model_dim
    return {
        "embed": _normal(keys[0], (WINDOW, VOCAB, D), WINDOW),
        "layers": jax.lax.map(functools.partial(_init_layer, config), keys[1:]),
        "norm": jnp.ones(D),
        "head": jnp.zeros((D, VOCAB)),
    }


def _init_layer(config: ModelConfig, key: jax.Array) -> Params:
    qkv_key, out_key, moe_key = jax.random.split(key, 3)
    D = config.model_dim
    return {
        "attention_norm": jnp.ones(D),
        "qkv": _normal(qkv_key, (D, 3, D), D),
        "out": _normal(out_key, (D, D), D * 2 * config.layers),
        "moe_norm": jnp.ones(D),
        "moe": init_params(moe_key, D, config.moe),
    }


def _normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    out: jax.Array = jax.random.normal(key, shape) * fan_in**-0.5
    return out


def specs(config: ModelConfig, resource: MeshResource) -> Params:
    """Where each parameter of `init` lives at rest."""
    layer = {
        "attention_norm": PartitionSpec(),
        "qkv": PartitionSpec("fsdp", None, None),
        "out": PartitionSpec("fsdp", None),
        "moe_norm": PartitionSpec(),
        "moe": param_specs(config.moe, resource),
    }
    return {
        "embed": PartitionSpec(None, None, "fsdp"),
        "layers": jax.tree.map(lambda spec: PartitionSpec(None, *spec), layer),
        "norm": PartitionSpec(),
        "head": PartitionSpec("fsdp", None),
    }


def is_matrix(params: Params) -> Params:
    """Which parameters have two dimensions or more; of a layer's parameters, in one layer."""
    of_layers = {name: int(name == "layers") for name in params}
    return {
        name: jax.tree.map(lambda p, stacked=of_layers[name]: p.ndim - stacked > 1, tree)
        for name, tree in params.items()
    }


def weights(config: ModelConfig, of: Callable[[str, int, Any], Any]) -> Params:
    """A tree like that of `init`, with `of(name, batch dimensions, dtype that GEMMs read)` for each weight of a GEMM.

    All other parameters are small and have None. The dtype is float32 if the forward casts no weight: quantizers read
    experts as they are.
    """

    def one(path: tuple[Any, ...], _: Any) -> Any:
        name = path[-1].key
        if name not in _WEIGHTS:
            return None
        quantized = name in EXPERTS and config.moe.recipe is not None
        return of(name, _WEIGHTS[name], config.moe.param_dtype if quantized else config.moe.dtype)

    tree: Params = jax.tree_util.tree_map_with_path(one, specs(config, RESOURCE))
    return tree


def init_quant_states(config: ModelConfig) -> Any:
    """What the layers' quantizers remember before the first step; None but under DelayedScaling."""
    state = init_quant_state(config.moe)
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * config.layers), state)


def quantize_experts(params: Params, config: ModelConfig) -> Any:
    """The experts' quantized weights, for several calls; None without a recipe, and if each call changes its scales."""
    if config.moe.recipe is None or isinstance(config.moe.recipe, DelayedScaling):
        return None
    return jax.lax.map(lambda p: quantize_weights(p, config.moe), params["layers"]["moe"])


def forward(
    params: Params,
    bytes_BS: jax.Array,
    config: ModelConfig,
    quant_state: Any = None,
    key: jax.Array | None = None,
    weights_quantized: Any = None,
) -> Output:
    """Logits of the next byte at each position of `bytes_BS` (int32[B, S]), and the router's losses.

    `quant_state` comes from `init_quant_states` or the last call. `key` is for recipes with stochastic rounding.
    `weights_quantized` comes from `quantize_experts`, if several calls have the same parameters. Any parameter may be a
    `Weight`.
    """
    x_BSD = _embed(read(params["embed"]), bytes_BS, config.moe.dtype)
    stacked = params["layers"], quant_state, weights_quantized
    through = _one_by_one if config.unrolled else _scanned
    x_BSD, of_layers = through(functools.partial(_layer, config, key), x_BSD, stacked, config)
    head_DV = _gather(read(params["head"]), x_BSD.dtype)
    logits_BSV = _rms_norm(x_BSD, params["norm"]) @ head_DV
    return Output(
        logits=logits_BSV.astype(jnp.float32),
        aux_loss=jnp.sum(of_layers.aux_loss),
        z_loss=jnp.sum(of_layers.z_loss),
        tokens_per_expert=of_layers.tokens_per_expert,
        num_dropped=jnp.sum(of_layers.num_dropped),
        entropy=of_layers.entropy,
        quant_state=of_layers.quant_state,
    )


def first_block_input(params: Params, bytes_BS: jax.Array, config: ModelConfig) -> jax.Array:
    """The input of the first layer's MoE block, [B, S, D]."""
    x_BSD = _embed(read(params["embed"]), bytes_BS, config.moe.dtype)
    layer = read(jax.tree.map(lambda leaf: leaf[0], params["layers"]))
    x_BSD += _attention(layer, x_BSD, config)
    return _rms_norm(x_BSD, layer["moe_norm"])


def _scanned(
    layer: Callable[..., Any], x_BSD: jax.Array, stacked: Any, config: ModelConfig
) -> tuple[jax.Array, _OfLayer]:
    """x after all layers, and what they give besides, stacked.

    `layer` takes its number, x and its part of `stacked`.
    """
    layer = _rematerialized(layer, config)

    def body(x_BSD: jax.Array, own: tuple[jax.Array, Any]) -> tuple[jax.Array, _OfLayer]:
        out: tuple[jax.Array, _OfLayer] = layer(own[0], x_BSD, own[1])
        return out

    out: tuple[jax.Array, _OfLayer]
    out = jax.lax.scan(body, x_BSD, (jnp.arange(config.layers), stacked))
    return out


def _one_by_one(
    layer: Callable[..., Any], x_BSD: jax.Array, stacked: Any, config: ModelConfig
) -> tuple[jax.Array, _OfLayer]:
    """As `_scanned`, each layer by a program of its own."""
    leaves, tree = jax.tree.flatten(stacked)
    parts = [jax.lax.split(leaf, [1] * config.layers) for leaf in leaves]
    of_layers = []
    for number, of_one in enumerate(zip(*parts, strict=True)):
        own = jax.tree.unflatten(tree, [jnp.squeeze(part, 0) for part in of_one])
        x_BSD, of_layer = _rematerialized(functools.partial(layer, number), config)(x_BSD, own)
        of_layers.append(of_layer)
    return x_BSD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layers)


def _rematerialized(layer: Callable[..., Any], config: ModelConfig) -> Callable[..., Any]:
    """`layer`, of which the backward has what the config says, and computes the rest again."""
    if not config.remat_layers and not config.kept_in_host:
        return layer
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(config.kept_in_host),
        offload_src="device",
        offload_dst=HOST,
    )
    # A scan's body has nothing to share with.
    return jax.checkpoint(layer, prevent_cse=config.unrolled, policy=policy)


class _OfLayer(NamedTuple):
    """What one layer gives besides tokens; fields as in `Output`."""

    aux_loss: jax.Array
    z_loss: jax.Array
    tokens_per_expert: jax.Array
    num_dropped: jax.Array
    entropy: jax.Array
    quant_state: Any


def _layer(
    config: ModelConfig,
    key: jax.Array | None,
    number: int | jax.Array,
    x_BSD: jax.Array,
    own: tuple[Any, ...],
) -> tuple[jax.Array, _OfLayer]:
    """Attention and experts; `own` is the layer's part of what is stacked."""
    params, quant_state, weights_quantized = own
    params = read(params)
    x_BSD = checkpoint_name(x_BSD, LAYER_INPUT)
    x_BSD += _attention(params, x_BSD, config, number)
    output = moe(
        params["moe"],
        _rms_norm(x_BSD, params["moe_norm"]),
        config.moe,
        quant_state=quant_state,
        weights_quantized=weights_quantized,
        key=None if key is None else jax.random.fold_in(key, number),
    )
    return x_BSD + output.y, _OfLayer(*(getattr(output, name) for name in _OfLayer._fields))


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] in nats, float32[B, S]."""
    target_BSV = jax.nn.one_hot(targets_BS, VOCAB, dtype=logits_BSV.dtype)
    chosen_BS = jnp.sum(logits_BSV * target_BSV, axis=-1)
    return jax.nn.logsumexp(logits_BSV, axis=-1) - chosen_BS


def _total(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _gather(w: jax.Array, dtype: Any) -> jax.Array:
    """The whole of a dense weight on every device, in `dtype`; its gradient goes back in shards."""
    return place(w.astype(dtype), PartitionSpec())


def _embed(embed_WVD: jax.Array, bytes_BS: jax.Array, dtype: Any) -> jax.Array:
    onehot_BSV = jax.nn.one_hot(bytes_BS, VOCAB, dtype=dtype)
    embed_WVD = _gather(embed_WVD, dtype)
    return _total(_shift(onehot_BSV @ embed_WVD[j], j) for j in range(WINDOW))


def _shift(x_BSD: jax.Array, by: int) -> jax.Array:
    """Moves positions later by `by`; zeros come in at the front."""
    return jnp.pad(x_BSD, ((0, 0), (by, 0), (0, 0)))[:, : x_BSD.shape[1]]


def _made_again[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function`, of which the backward keeps operands and results of GEMMs, and makes the rest again."""
    policy = jax.checkpoint_policies.dots_saveable
    again: Callable[P, R] = jax.checkpoint(function, policy=policy)
    return again


@_made_again
def _rms_norm(x_BSD: jax.Array, scale_D: jax.Array) -> jax.Array:
    x32_BSD = x_BSD.astype(jnp.float32)
    mean_BS1 = jnp.mean(jnp.square(x32_BSD), axis=-1, keepdims=True)
    scale_11D = jnp.expand_dims(scale_D, (0, 1))
    return (x32_BSD * jax.lax.rsqrt(mean_BS1 + 1e-6) * scale_11D).astype(x_BSD.dtype)


def _attention(
    layer: Params, x_BSD: jax.Array, config: ModelConfig, number: int | jax.Array = 0
) -> jax.Array:
    """Causal softmax attention of norm(x), with rotary positions and normalised queries and keys."""
    weight_D3D = _gather(layer["qkv"], x_BSD.dtype)
    heads = _made_again(functools.partial(_heads, config.heads))
    q_BSHd, k_BSHd, v_BSHd = heads(x_BSD, layer["attention_norm"], weight_D3D)
    # Traced, it numbers the layers of one program.
    number = number if isinstance(number, int) else 0
    y_BSHd = attend(q_BSHd, k_BSHd, v_BSHd, scale=config.head_dim**0.5, number=number)
    return y_BSHd.reshape(x_BSD.shape) @ _gather(layer["out"], x_BSD.dtype)


def _heads(
    H: int, x_BSD: jax.Array, scale_D: jax.Array, weight_D3D: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values, each [B, S, H, d]."""
    B, S, D = x_BSD.shape
    qkv_BS3D = jnp.einsum("bsd,dce->bsce", _rms_norm(x_BSD, scale_D), weight_D3D)
    qkv_BS3Hd = qkv_BS3D.reshape(B, S, 3, H, D // H)
    q_BSHd, k_BSHd, v_BSHd = (qkv_BS3Hd[:, :, i] for i in range(3))
    return _rotate(_unit(q_BSHd)), _rotate(_unit(k_BSHd)), v_BSHd


def _unit(x_BSHd: jax.Array) -> jax.Array:
    """Rows of length 1, so that scores stay within sqrt(d) at any learning rate."""
    x32 = x_BSHd.astype(jnp.float32)
    length = jnp.sum(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(length + 1e-6)).astype(x_BSHd.dtype)


def _rotate(x_BSHd: jax.Array) -> jax.Array:
    """Rotary position embedding on the halves of the head width."""
    cos, sin = _angles(x_BSHd.shape[1], x_BSHd.shape[3] // 2)
    a, b = jnp.split(x_BSHd.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BSHd.dtype)


def _angles(S: int, half: int) -> tuple[jax.Array, jax.Array]:
    frequency = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_S1d = jnp.outer(jnp.arange(S, dtype=jnp.float32), frequency)[None, :, None, :]
    return jnp.cos(angle_S1d), jnp.sin(angle_S1d)
