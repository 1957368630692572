"""Trees whose gate and up projections are apart: the same block, and no pass more over the weights."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import NamedSharding

from cases.covering import full
from expertmesh.core import global_shard_guard
from expertmesh.flax_moe import linen, moe, native_moe, nnx, param_specs, quantize_weights, split_wi
from flax_moe.moe_oracle import (
    AUTO,
    EXPLICIT,
    RESOURCE,
    TOKENS,
    Data,
    assert_result,
    make_config,
    make_data,
    make_mesh,
    run,
    value_and_gradients,
)

APART = dict(separate_wi=True, shared_expert_dim=20)


def split(data):
    return data._replace(params=split_wi(data.params))


def want(data, config):
    """The oracle's result, its gradients by the names of the halves."""
    result = run(data, config)
    return result._replace(d_params=split_wi(result.d_params))


@pytest.mark.parametrize("mode", ["explicit", full("resource")])
def test_the_block_takes_the_halves(mode):
    """Results and gradients by the oracle; a gradient lies where its half does."""
    config = make_config(**APART)
    whole = make_data(make_config(shared_expert_dim=20))
    data = split(whole)
    mesh = make_mesh((2, 4), EXPLICIT if mode == "explicit" else AUTO)
    specs = param_specs(config, RESOURCE)
    at = {k: NamedSharding(mesh, specs[k]) for k in data.params}
    tokens = NamedSharding(mesh, TOKENS)
    data = Data(*jax.device_put(tuple(data), (at, tokens, tokens)))
    with global_shard_guard(RESOURCE if mode == "resource" else None):
        (_, output), gradients = jax.jit(value_and_gradients(moe, config))(*data)
    assert_result(output, gradients, want(whole, config))
    for name, gradient in gradients[0].items():
        assert gradient.sharding.is_equivalent_to(data.params[name].sharding, gradient.ndim), name


def test_modules_and_the_baseline_hold_them():
    config = make_config(separate_wi=True)
    data = make_data(make_config())
    block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0))
    assert block.wi_0.get_metadata("out_sharding") == ("exp", "embed", "mlp")
    params = split_wi(data.params)
    for name, w in params.items():
        getattr(block, name)[...] = jnp.asarray(w)
    of_linen = linen.MoEBlock(config)
    shapes = jax.eval_shape(of_linen.init, jax.random.key(0), data.x)["params"]
    assert set(shapes) == set(params)
    y = moe(data.params, data.x, config).y
    for got in (of_linen.apply({"params": params}, data.x), block(data.x)):
        np.testing.assert_array_equal(got.y, y)
    native = native_moe(params, data.x, config).y
    np.testing.assert_allclose(native, y, atol=1e-5 * np.abs(y).max())


def test_halves_are_quantized_together():
    config = make_config(recipe="fp8_current", expert_dim=16, use_bias=False)
    data = make_data(config)
    got, quantized = (quantize_weights(p, config) for p in (split_wi(data.params), data.params))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(quantized), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_pass_that_casts_puts_them_together():
    """Of float32 halves one array in bfloat16 is written, and no float32 array of both."""
    config = make_config(dtype=jnp.bfloat16, use_bias=False)
    data = split(make_data(config))
    fusing = {"xla_backend_optimization_level": 1}
    lowered = jax.jit(lambda p, x: moe(p, x, config).y).lower(*data[:2])
    program = lowered.compile(compiler_options=fusing).as_text()
    written = [line for line in program.split("ENTRY")[1].splitlines() if "[8,16,2,12]" in line]
    both = [line for line in written if re.search(r"= f32\[8,16,2,12\]", line)]
    assert not both and any("= bf16[8,16,2,12]" in line for line in written), written
