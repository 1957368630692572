"""Every public function and block says of a config, and of a stage's result, of which type it must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cases.typed import functions_of, refuses_others
from expertmesh import flax_moe
from expertmesh.core import router_statistics
from expertmesh.flax_moe import LoRA, MoEConfig, init_params, linen, native, stages
from expertmesh.flax_moe import nnx as blocks
from expertmesh.flax_moe.experts import Dispatched

CONFIG = MoEConfig(num_experts=4, top_k=2, expert_dim=16)
X = jnp.ones((1, 4, 16))
PARAMS = init_params(jax.random.key(0), 16, CONFIG)
ROUTED = stages.route(PARAMS, X, CONFIG)
DISPATCHED = stages.dispatch(PARAMS, ROUTED, CONFIG)
INSTANCES = {
    MoEConfig: CONFIG,
    LoRA: LoRA(rank=2, alpha=2.0),
    stages.Routed: ROUTED,
    Dispatched: DISPATCHED,
    stages.Computed: stages.experts(PARAMS, DISPATCHED, CONFIG),
}
FUNCTIONS = [
    (module, name)
    for module in (flax_moe, stages)
    for name in sorted(functions_of(module, INSTANCES))
]


def test_functions_are_found():
    assert {"moe", "with_lora", "native_moe", "combine"} <= {name for _, name in FUNCTIONS}


@pytest.mark.parametrize("module, name", FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_another_type_is_refused(module, name):
    refuses_others(getattr(module, name), INSTANCES)


@pytest.mark.parametrize(
    "make",
    [
        lambda config: linen.MoEBlock(config).init(jax.random.key(0), X),
        lambda config: native.NativeMoEBlock(config).init(jax.random.key(0), X),
        lambda config: blocks.MoEBlock(16, config, rngs=nnx.Rngs(0)),
    ],
    ids=["linen", "native", "nnx"],
)
def test_a_block_refuses_another_config(make):
    with pytest.raises(TypeError, match="MoEBlock: config must be of type MoEConfig; got None"):
        make(None)


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (
            lambda: MoEConfig(num_experts=0, top_k=2, expert_dim=16),
            ValueError,
            "MoEConfig: num_experts must be at least 1; got num_experts=0",
        ),
        (
            lambda: MoEConfig(num_experts=4, top_k=2, expert_dim=16, dtype="flaot32"),
            TypeError,
            "MoEConfig: dtype must be a dtype; got dtype='flaot32'",
        ),
        (
            lambda: LoRA(rank=2, alpha=2.0, dtype="flaot32"),
            TypeError,
            "LoRA: dtype must be a dtype; got dtype='flaot32'",
        ),
        (
            lambda: LoRA(rank=2, alpha="2"),
            TypeError,
            "LoRA: alpha must be a Python number; got alpha='2'",
        ),
        (
            lambda: flax_moe.moe(PARAMS, X, CONFIG, aux_loss_coeff=-1.0),
            ValueError,
            "moe: aux_loss_coeff must be finite and at least 0; got aux_loss_coeff=-1.0; 0 turns",
        ),
        (
            lambda: flax_moe.moe(PARAMS, X, CONFIG, z_loss_coeff=float("nan")),
            ValueError,
            "moe: z_loss_coeff must be finite and at least 0; got z_loss_coeff=nan",
        ),
        (
            lambda: MoEConfig(num_experts=4, top_k=2, expert_dim=16, capacity_factor=True),
            TypeError,
            "MoEConfig: capacity_factor must be a Python number; got capacity_factor=True",
        ),
        (
            lambda: blocks.MoEBlock(16, CONFIG, rngs=0),
            TypeError,
            r"MoEBlock: rngs must be of type Rngs; got int; pass nnx.Rngs\(0\)",
        ),
        (
            lambda: init_params(jax.random.key(0), -4, CONFIG),
            ValueError,
            "param_shapes: model_dim must be at least 1; got model_dim=-4",
        ),
    ],
)
def test_numbers_and_dtypes(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_a_coefficient_of_numpy_is_a_number():
    got, want = (
        flax_moe.moe(PARAMS, X, CONFIG, aux_loss_coeff=coeff).aux_loss
        for coeff in (np.float32(0.5), 0.5)
    )
    assert got == want != 0


def test_statistics_have_their_dtypes_under_x64():
    with jax.enable_x64(True):
        for chunks in (1, 2):
            config = MoEConfig(num_experts=4, top_k=2, expert_dim=16, num_chunks=chunks)
            out = flax_moe.moe(init_params(jax.random.key(0), 16, config), X, config)
            assert out.num_dropped.dtype == jnp.int32
        logits = jnp.ones((4, 8), jnp.float32)
        found = router_statistics(logits, jnp.zeros((4, 2), jnp.int32))
        assert found.entropy.dtype == jnp.float32
