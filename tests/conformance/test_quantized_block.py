"""The quantized block (tests 12 and 13 under a recipe) against an emulation in float64, in every mesh mode."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from conformance.settings import AXES, EACH_MODE, TOKENS, assert_close, parametrize, run_on_mesh
from conformance.test_block import block, specs_of
from ep.exchange_oracle import shards
from expertmesh.core import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from flax_moe import moe_oracle, quantized_oracle
from multiprocess_runner import on_gpu

RECIPES = {
    # Scales that are no powers of two: other rows in a block change every number of it.
    "explicit": Float8BlockScaling(power_2_scale=False),
    "resource": MXFP8BlockScaling(),
    "manual": Float8CurrentScaling(),
    "auto": MXFP8BlockScaling(),
}
# A number next to where rounding turns, which sums in another order may push across, is one step of 8 bits off: 4e-4 of
# a gradient of wi on jax 0.12.
GRADIENT_TOLERANCE = 6e-4
TOLERANCE = 1e-5
# Tensor cores add products of 8 bits in about 14 bits: 4e-4, and more numbers that are a step off, 7e-3 of y.
if on_gpu():
    TOLERANCE, GRADIENT_TOLERANCE = 1.5e-2, 1.5e-2
SIZES = {"explicit": (256, 128), "resource": (64, 32), "manual": (32, 16), "auto": (64, 32)}


@pytest.mark.any_device
@parametrize(EACH_MODE[:1], EACH_MODE[1:])
def test_quantized_in_each_mode(setting):
    """y, and each gradient of sum(y * r), by norm and by cosine; gradients have the dtype of their primals."""
    width, hidden = SIZES[setting.mode]
    config = moe_oracle.make_config(
        expert_dim=hidden,
        recipe=RECIPES[setting.mode],
        transport=setting.transport,
        ep_axis=setting.ep if setting.mode == "manual" else None,
        aux_loss_coeff=0.0,
        z_loss_coeff=0.0,
    )
    data = moe_oracle.make_data(config, (8, 5, width))
    names = tuple(data.params)
    params = specs_of(setting, config, names)
    y, d_params, d_x, _ = run_on_mesh(
        setting,
        block,
        (*data.params.values(), data.x, data.dy, np.zeros(8, np.float32)),
        (*params, TOKENS, TOKENS, PartitionSpec()),
        out_specs=(TOKENS, params, TOKENS, PartitionSpec()),
        names=names,
        config=config,
        steered=False,
    )
    whole = [np.arange(40)]
    blocks = shards(setting.mesh_shape, (AXES,), (8, 5), setting.ep)
    blocks = whole if setting.is_whole else list(blocks)
    want = quantized_oracle.run(data, config, blocks, setting.num_ranks)
    assert_close(y, want.y, TOLERANCE, "y")
    assert_close(d_x, want.d_x, GRADIENT_TOLERANCE, "d_x")
    for name, gradient in zip(names, d_params, strict=True):
        assert gradient.dtype == np.float32
        assert_close(gradient, want.d_params[name], GRADIENT_TOLERANCE, name)
