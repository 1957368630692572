"""Temporary memory of one device, forward and backward, stays below a formula of the shapes (section 6.3).

Dimension key: T tokens of a participant, K choices per token, D features, F expert width, G tokens of an EP group, C
receive rows. Numbers are of 4 bytes.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from cases.covering import full
from conformance import test_block as block
from conformance import test_grouped_gemm as grouped
from conformance.settings import (
    GROUPED_GEMMS,
    TOKENS,
    TRANSPORTS,
    Setting,
    compile_on_mesh,
    parametrize,
    sizes_for,
)
from conformance.test_exchange import exchange
from expertmesh.ep import recv_capacity
from expertmesh.flax_moe import param_shapes
from flax_moe import moe_oracle

SMALL = 2**13  # bytes: counters, sums, vectors of experts
BLOCK = 128  # the most rows that the reference of the grouped GEMM pads its operands with
NUM_EXPERTS = 8
ONE = Setting("single", "local")
ON_MESH = [Setting("resource", name, sizes_for("resource", name)) for name in TRANSPORTS]


def temp_bytes(setting, function, shapes, specs, **static):
    operands = [np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in shapes]
    compiled = compile_on_mesh(setting, function, operands, specs, **static)
    return compiled.memory_analysis().temp_size_in_bytes


def capacity(setting, num_tokens, top_k):
    """Receive rows where nothing is ever dropped."""
    tokens = num_tokens // setting.num_participants
    return recv_capacity(NUM_EXPERTS, top_k, tokens, setting.num_ranks, 1)


@parametrize(ON_MESH, [ONE])
def test_exchange(setting):
    """For combine and for the gradient of dispatch one row of each choice, all of which are added up; the group's
    tokens; eight integers for each row and each choice.
    """
    T, K, D = 256 // setting.num_participants, 4, 32
    tokens, G, P = 256, T * setting.num_ranks, setting.num_participants
    C = capacity(setting, tokens, K)
    shapes = {
        "idx": ((tokens, K), np.int32),
        **{name: ((tokens, D), np.float32) for name in ("tokens", "g_out")},
        "weights": ((tokens, K), np.float32),
        **{name: ((P, C, D), np.float32) for name in ("y", "g_rows")},
        "g_weights": ((P, C), np.float32),
    }
    names = ("idx", "tokens", "weights", "y", "g_rows", "g_out", "g_weights")
    specs = [setting.participants if shapes[n][0][0] == P else TOKENS for n in names]
    used = temp_bytes(
        setting, exchange, [shapes[n] for n in names], specs, config=setting.config(NUM_EXPERTS)
    )
    bound = 4 * (2 * G * K * D + G * D + 8 * (C + G * K)) + SMALL
    assert used <= bound, (used, bound)


@pytest.mark.parametrize("implementation", GROUPED_GEMMS)
def test_grouped_gemm_and_gradients(implementation):
    """The rows of both operands and both results with a block more each, and the weights' gradient."""
    C, K, N, G = 1024, 64, 96, NUM_EXPERTS
    shapes = [(1, C, K), (G, K, N), (1, G), (G, N), (1, C, N)]
    used = temp_bytes(
        ONE,
        grouped.value_and_gradients,
        [(shape, np.int32 if i == 2 else np.float32) for i, shape in enumerate(shapes)],
        (PartitionSpec(),) * 5,
        implementation=implementation,
    )
    bound = 4 * ((C + BLOCK) * 2 * (K + N) + G * K * N) + SMALL
    assert used <= bound, (used, bound)


@pytest.mark.parametrize(
    "setting, num_chunks, remat",
    [full(ON_MESH[-1], 1, "save_all"), (ONE, 8, "recompute")],
    ids=str,
)
def test_block(setting, num_chunks, remat):
    """[C, D] into and out of the experts, [C, 2, F] and [C, F] between: each, its cotangent and a copy to work on, of
    one part of the tokens; the weights, their gradients and the tokens as often.
    """
    config = moe_oracle.make_config(
        num_experts=NUM_EXPERTS,
        expert_dim=64,
        use_bias=False,
        aux_loss_coeff=0.0,
        z_loss_coeff=0.0,
        transport=setting.transport,
        num_chunks=num_chunks,
        remat=remat,
    )
    B, S, D, F = 16, 64, 32, config.expert_dim
    params = param_shapes(D, config)
    shapes = [*params.values(), (B, S, D), (B, S, D), (NUM_EXPERTS,)]
    specs = (*block.specs_of(setting, config, tuple(params)), TOKENS, TOKENS, PartitionSpec())
    used = temp_bytes(
        setting,
        block.block,
        [(shape, jnp.float32) for shape in shapes],
        specs,
        names=tuple(params),
        config=config,
        steered=False,
    )
    C = capacity(setting, B * S // num_chunks, config.top_k)
    held = NUM_EXPERTS // setting.num_ranks * 3 * D * F + B * S // setting.num_participants * D
    bound = 3 * 4 * ((C + BLOCK) * (2 * D + 3 * F) + held) + SMALL
    assert used <= bound, (used, bound)
