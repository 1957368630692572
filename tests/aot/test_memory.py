"""Temporary memory of each op with its kernels on an H100 that is not there: a constant, whatever the operands' sizes.

The results and what the gradient needs of the forward are not temporary. A weight's gradient is of whole rows.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cases.marks import needs_triton
from expertmesh.core import (
    MeshResource,
    PermutePlan,
    RouterConfig,
    activate,
    as_recipe,
    dequantize,
    gathered_gemm,
    global_shard_guard,
    grouped_dense,
    grouped_gemm,
    permute,
    plan_permute,
    quantize,
    route,
    unpermute,
)
from expertmesh.core.quantization.activate_quantize import activate_quantize
from expertmesh.flax_moe import MoEConfig, moe, param_shapes, quantize_weights

pytestmark = [pytest.mark.aot, needs_triton]

CONSTANT = 1 << 20  # bytes: counts of blocks, sums of programs, descriptors
T, K, E, D, F = 16384, 4, 32, 1024, 2048  # every array of rows is 32 MB or more
ROWS, HIDDEN = ((1, T, D), jnp.bfloat16), ((1, T, F), jnp.bfloat16)
SIZES, KERNEL = ((1, E), jnp.int32), ((E, D, F), jnp.bfloat16)
FORMAT = as_recipe("fp8_block").formats().x


def product_grads(x, w, dy, sizes):
    return jax.vjp(lambda x, w: grouped_gemm(x, w, sizes), x, w)[1](dy)


def router(logits):
    routing = route(logits, RouterConfig(top_k=K))
    return routing.topk_idx, routing.topk_weights


def router_grad(logits, d):
    return jax.vjp(lambda logits: route(logits, RouterConfig(top_k=K)).topk_weights, logits)[1](d)


def gathered(x, w, row, source, sizes):
    return gathered_gemm(x, w, PermutePlan(row, source, sizes, sizes))


def rows_of_tokens(x, idx):
    plan = plan_permute(idx, num_experts=E)
    return permute(x, plan), plan


def tokens_of_rows(y, plan, weights):
    return unpermute(y, plan, weights)


def gated_grad(h, d):
    return jax.vjp(lambda h: activate(h, "silu"), h)[1](d)


LOGITS, CHOICES = ((1, T, E), jnp.float32), ((1, T, K), jnp.int32)
GATED = ((1, T, 2, F), jnp.bfloat16)
# name -> function, operands' types, bytes that it may hold besides the constant.
CASES = {
    "grouped_gemm": (grouped_gemm, (ROWS, KERNEL, SIZES), 0),
    "grouped_gemm gradients": (product_grads, (ROWS, KERNEL, HIDDEN, SIZES), 0),
    "gathered_gemm": (gathered, (ROWS, KERNEL, CHOICES, ((1, T * K), jnp.int32), SIZES), 0),
    # Its operands, quantized.
    "grouped_dense fp8_block": (
        lambda x, w, sizes: grouped_dense(x, w, sizes, recipe="fp8_block"),
        (ROWS, KERNEL, SIZES),
        (T * D + E * D * F) * 33 // 32,
    ),
    "route": (router, (LOGITS,), 0),
    "route gradient": (router_grad, (LOGITS, ((1, T, K), jnp.float32)), 0),
    "permute": (rows_of_tokens, (ROWS, CHOICES), 0),
    "activate": (lambda h: activate(h, "silu"), (GATED,), 0),
    "activate gradient": (gated_grad, (GATED, HIDDEN), 0),
    "quantize": (lambda x: quantize(x, FORMAT), (ROWS,), 0),
    "dequantize": (lambda x: dequantize(quantize(x, FORMAT)), (ROWS,), T * D * 33 // 32),
    # Blocks along the rows are made in the order that the GEMM reads, and transposed only for who asks for the data.
    "activate_quantize": (
        lambda h, sizes: activate_quantize(h, sizes, (FORMAT, FORMAT), "silu"),
        (GATED, SIZES),
        T * F,
    ),
}


def temporary(h100_mesh, function, types) -> int:
    """Bytes of a program for operands of these types, in any tree."""
    mesh = h100_mesh({"fsdp": 1})
    whole = NamedSharding(mesh, PartitionSpec())
    operands = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=whole), tuple(types)
    )
    with jax.sharding.set_mesh(mesh), global_shard_guard(MeshResource(fsdp_resource="fsdp")):
        program = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
    found: int = program.memory_analysis().temp_size_in_bytes
    return found


@pytest.mark.parametrize("name", CASES)
def test_temporary_memory(h100_mesh, name):
    function, types, more = CASES[name]
    types = [jax.ShapeDtypeStruct(*t) for t in types]
    assert temporary(h100_mesh, function, types) <= CONSTANT + more


def test_the_block_in_8_bits(h100_mesh):
    """Both passes need less than in bfloat16, as a copy in 8 bits is done with before the next one is made.

    Weights are quantized before.
    """

    def bytes_of(recipe):
        config = MoEConfig(num_experts=64, top_k=4, expert_dim=512, recipe=recipe)
        shapes = param_shapes(1536, config)
        params = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shapes.items()}
        weights = jax.eval_shape(lambda p: recipe and quantize_weights(p, config), params)
        x = jax.ShapeDtypeStruct((1, 24576, 1536), jnp.bfloat16)

        def both(params, x, dy, weights):
            def y(params, x):
                return moe(params, x, config, weights_quantized=weights).y

            return jax.vjp(y, params, x)[1](dy)

        return temporary(h100_mesh, both, (params, x, x, weights))

    assert bytes_of("fp8_block") <= 0.85 * bytes_of(None)
