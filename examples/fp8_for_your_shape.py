"""Is FP8 faster for your shape, and why: times of the block, of its up projection and of quantizing, by recipe.

python examples/fp8_for_your_shape.py --tokens 32768 --width 4096 --expert-width 512 --experts 128 --top-k 8

The times of a CPU say nothing: recipes are emulated there.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from expertmesh.core import (
    grouped_dense,
    grouped_quantize,
    permute,
    plan_permute,
    quantize,
    required_alignment,
)
from expertmesh.flax_moe import MoEConfig, init_params, is_supported, moe

RECIPES = (None, "fp8_block", "fp8_current")


def milliseconds(function, *operands, calls=10):
    """Median over calls of a jitted function, by the host's clock."""
    jax.block_until_ready(function(*operands))  # compiles
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(recipe, shape):
    """(both passes of the block, forward of its up projection, quantizing its operands), in milliseconds."""
    config = MoEConfig(
        num_experts=shape.experts, top_k=shape.top_k, expert_dim=shape.expert_width, recipe=recipe
    )
    params = init_params(jax.random.key(0), shape.width, config)
    x = jax.random.normal(jax.random.key(1), (shape.tokens, shape.width), jnp.bfloat16)
    loss = jax.grad(lambda p, x: moe(p, x, config).y.astype(jnp.float32).sum(), argnums=(0, 1))
    block = milliseconds(jax.jit(loss), params, x)

    plan = plan_permute(
        moe(params, x, config).topk_idx,
        num_experts=shape.experts,
        alignment=required_alignment(recipe),
    )
    rows, weight = permute(x, plan)[None], params["wi"].astype(jnp.bfloat16)
    sizes = plan.group_sizes[None]
    up = jax.jit(lambda rows, weight: grouped_dense(rows, weight, sizes, recipe=recipe))
    layer = milliseconds(up, rows, weight)
    if recipe is None:
        return block, layer, 0.0

    @jax.jit
    def quantize_operands(rows, weight):
        formats = config.recipe.formats()
        of_rows = grouped_quantize(rows, sizes, formats.x, axis=2)
        return of_rows, quantize(weight, formats.weight, axis=1, across=-1, batch_dims=1)

    return block, layer, milliseconds(quantize_operands, rows, weight)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 512), ("width", 256), ("expert-width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    shape = parser.parse_args(arguments)
    print(
        f"{jax.devices()[0].device_kind}, ms: the block's forward and backward; the forward of its up projection"
    )
    print(f"{'recipe':12}{'block':>9}{'speed':>8}{'up':>9}{'quantizing':>12}  native")
    plain = None
    for recipe in RECIPES:
        block, layer, quantizing = measure(recipe, shape)
        plain = plain or block
        native = "" if recipe is None else is_supported(recipe)[1] or "yes"
        name = recipe or "bfloat16"
        print(
            f"{name:12}{block:9.2f}{plain / block:8.2f}{layer:9.2f}{quantizing:12.2f}  {native}".rstrip()
        )


if __name__ == "__main__":
    main()
