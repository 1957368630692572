"""MaxText's own layers and training loop, with the experts of this library and without.

What is compared with is its dense path, which computes every expert for every token, drops nothing and knows nothing of
devices. Nothing is downloaded: the dataset is synthetic. Runs in the CI cell `maxtext`, which installs it.
"""

import contextlib
import functools
import json
import os
import pathlib

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # MaxText's word for: no Google Cloud

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import partitioning
from jax.sharding import Mesh, PartitionSpec

from expertmesh.core.testing import relative_error

maxtext = pytest.importorskip("maxtext")
layers = pytest.importorskip("maxtext.layers.moe")

from maxtext.layers.initializers import nd_dense_init  # noqa: E402
from maxtext.trainers.pre_train import train  # noqa: E402
from maxtext.utils import maxtext_utils  # noqa: E402

import expertmesh.maxtext  # noqa: E402

pytestmark = [pytest.mark.maxtext, pytest.mark.default_jax]

BASE = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
TINY = {
    "run_name": "tiny",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "enable_tensorboard": False,
    "log_config": False,
    "override_model_config": True,
    "steps": 3,
    "learning_rate": 1e-2,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 1.0,
    "attention": "dot_product",
    "dtype": "float32",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_mlp_dim": 24,
    "base_moe_mlp_dim": 24,
    "load_balance_loss_weight": 0.01,
    "sparse_matmul": False,  # MaxText's dense path; the block does not ask
}
MIXTRAL = {"decoder_block": "mixtral", "base_num_decoder_layers": 2}
DEEPSEEK = {
    "model_name": "deepseek3-tiny",
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "routed_bias_update_rate": 0.01,
    "n_routing_groups": 4,
    "topk_routing_group": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
}
EP4_FSDP2 = {"ici_expert_parallelism": 4, "ici_fsdp_parallelism": 2}
EP2_FSDP2 = {"ici_expert_parallelism": 2, "ici_fsdp_parallelism": 2}
EXPLICIT = {"shard_mode": "explicit"}


def make_config(folder, **options):
    options = TINY | {"base_output_directory": folder, "jax_cache_dir": ""} | options
    arguments = [f"{name}={value}" for name, value in options.items()]
    return train.initialize(["", str(BASE), *arguments])


@pytest.fixture
def config_of(tmp_path):
    return lambda **options: make_config(tmp_path, **options)[0]


class Block:
    """A routed layer of a config on its mesh, as a function of its parameters, its other variables and tokens."""

    def __init__(self, config, kind=None):
        devices = maxtext_utils.create_device_mesh(config)
        mode = jax.sharding.AxisType[config.shard_mode.name.capitalize()]
        self.config = config
        self.mesh = Mesh(devices, config.mesh_axes, axis_types=(mode,) * len(config.mesh_axes))
        with self.context():
            self.layer = (kind or layers.RoutedMoE)(
                config=config,
                num_experts=config.num_experts,
                num_experts_per_tok=config.num_experts_per_tok,
                mesh=self.mesh,
                kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"),
                kernel_axes=("embed", None),
                intermediate_dim=config.moe_mlp_dim,
                dtype=config.dtype,
                weight_dtype=config.weight_dtype,
                rngs=nnx.Rngs(0),
            )
        self.graph, self.params, self.rest = nnx.split(self.layer, nnx.Param, ...)

    def context(self):
        stack = contextlib.ExitStack()
        stack.enter_context(jax.set_mesh(self.mesh))
        stack.enter_context(partitioning.axis_rules(self.config.logical_axis_rules))
        return stack

    def run(self, inputs, **arguments):
        """y, the balance loss, the bias's part, and gradients in parameters, inputs and arguments of floats."""

        def loss(params, given):
            layer = nnx.merge(self.graph, params, self.rest, copy=True)
            y, balance, updates = layer(given["inputs"], **{k: v for k, v in given.items() if k != "inputs"}, **whole)
            total = jnp.sum(jnp.square(y.astype(jnp.float32)) * jnp.arange(1, y.shape[-1] + 1))
            return total + (0 if balance is None else 100 * balance), (y, balance, updates)

        given = {"inputs": inputs} | arguments
        whole = {k: v for k, v in given.items() if not jnp.issubdtype(v.dtype, jnp.floating)}
        given = {k: v for k, v in given.items() if k not in whole}
        with self.context():
            call = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
            (_, out), grads = call(self.params, given)
        return jax.tree.map(np.asarray, (out, nnx.to_pure_dict(grads[0]), grads[1]))


def tokens(config, seed=0):
    """[B, S, D] of varied magnitudes."""
    keys = jax.random.split(jax.random.key(seed), 2)
    shape = (8, config.max_target_length, config.emb_dim)
    return jax.random.normal(keys[0], shape) * jnp.exp(jax.random.normal(keys[1], shape[:2] + (1,)))


def assert_same(got, want, tolerance=3e-6):
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    assert got.keys() == want.keys()
    for path, value in want.items():
        where = jax.tree_util.keystr(path)
        assert got[path].shape == value.shape and got[path].dtype == value.dtype, where
        if np.any(value):
            assert relative_error(got[path], value) < tolerance, where
        else:
            assert not np.any(got[path]), where


LAYERS = {
    "mixtral": MIXTRAL,
    "normalised-again": MIXTRAL | {"norm_topk_prob": True},
    "biases-of-gpt-oss": {
        "decoder_block": "gpt_oss",
        "mlp_bias": True,
        "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": 1.0,
        "routed_bias": True,
    },
    "llama4": {"decoder_block": "llama4", "num_experts_per_tok": 1},
    "gemma4": {"decoder_block": "gemma4"},
    "deepseek": DEEPSEEK,
    "deepseek-all-groups": DEEPSEEK | {"n_routing_groups": -1},
    "deepseek-clamped": DEEPSEEK | {"mlp_activations_limit": 0.5},
    "megatron": DEEPSEEK | {"moe_use_megatron_seq_aux_loss": True},
    "counts": DEEPSEEK | {"gradient_accumulation_steps": 2},
    "prefused": MIXTRAL | {"prefuse_moe_weights": True},
    "no-loss": MIXTRAL | {"load_balance_loss_weight": 0.0},
    "experts-over-fsdp": MIXTRAL | {"shard_exp_on_fsdp": True, "ici_expert_parallelism": 1, "ici_fsdp_parallelism": 8},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_maxtexts(config_of, name):
    """Values, the balance loss, the bias's update or counts, and gradients in all parameters and in the tokens."""
    block = Block(config_of(**EP4_FSDP2 | LAYERS[name]))
    if block.layer.gate.bias is not None:
        bias = jax.random.normal(jax.random.key(3), (8,)) * 0.3
        block.layer.gate.bias[...] = bias
        block.graph, block.params, block.rest = nnx.split(block.layer, nnx.Param, ...)
    x = tokens(block.config)
    want = block.run(x)
    with expertmesh.maxtext.installed():
        got = block.run(x)
    assert_same(got, want)
    y, balance, updates = got[0]
    assert np.any(y) and (balance is None) == (name == "no-loss")
    if name == "counts":
        assert updates.dtype == np.int32 and updates.sum() == x.shape[0] * x.shape[1] * 2
    elif LAYERS[name].get("model_name"):
        assert set(np.abs(updates).round(6)) <= {np.float32(0.01).round(6), 0}
    else:
        assert updates is None
