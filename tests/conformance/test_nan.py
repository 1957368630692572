"""A NaN in one token stays in that token's outputs and in the gradients that it touches."""

import jax
import numpy as np
import pytest

from cases.covering import covering
from conformance import test_block as block
from conformance.settings import SETTINGS, TOKENS, Setting, parametrize, run_on_mesh
from expertmesh.flax_moe import moe
from flax_moe import moe_oracle

pytestmark = pytest.mark.default_jax

TOKEN = 2, 3
TWO = Setting("explicit", "all_to_all", (1, 1, min(2, jax.device_count())))
NVLINK = [setting for setting in SETTINGS if setting.transport == "nvlink"]


def block_of_choices(*operands, names, config):
    """y, and the gradients of sum(y * dy) in the parameters and x; tokens go where `idx` says."""
    *params, x, dy, idx = operands

    def forward(params, x):
        return moe(dict(zip(names, params, strict=True)), x, config, topk_idx=idx).y

    y, pull = jax.vjp(forward, tuple(params), x)
    return y, *pull(dy.astype(y.dtype))


@pytest.mark.any_device
@parametrize([Setting("single"), *NVLINK[:1]], [TWO])
@covering("use_bias", [False, True], covers=[False])
def test_it_stays_where_it_is(setting, use_bias):
    """Against a run with a number in its place."""
    config = moe_oracle.make_config(
        use_bias=use_bias, aux_loss_coeff=0.0, z_loss_coeff=0.0, transport=setting.transport
    )
    data = moe_oracle.make_data(config, (8, 5, 16))
    names = tuple(data.params)
    specs = block.specs_of(setting, config, names)
    rng, experts = np.random.default_rng(0), np.arange(config.num_experts, dtype=np.int32)
    idx = np.stack([rng.permutation(experts)[: config.top_k] for _ in range(40)]).reshape(8, 5, -1)

    def run(x):
        results = run_on_mesh(
            setting,
            block_of_choices,
            (*data.params.values(), x, data.dy, idx),
            (*specs, TOKENS, TOKENS, TOKENS),
            out_specs=(TOKENS, specs, TOKENS),
            names=names,
            config=config,
        )
        return jax.tree.map(np.asarray, results)

    poisoned = data.x.copy()
    poisoned[(*TOKEN, 4)] = np.nan
    y, d_params, d_x = run(poisoned)
    y_clean, d_params_clean, d_x_clean = run(data.x)
    others = np.ones(data.x.shape[:2], bool)
    others[TOKEN] = False
    assert np.isnan(y[TOKEN]).all() and np.isnan(d_x[TOKEN]).any()
    np.testing.assert_array_equal(y[others], y_clean[others])
    np.testing.assert_array_equal(d_x[others], d_x_clean[others])
    untouched = np.setdiff1d(experts, idx[TOKEN])
    for name, got, clean in zip(names, d_params, d_params_clean, strict=True):
        if name != "gate_kernel":  # of which each number has a part of each token
            np.testing.assert_array_equal(got[untouched], clean[untouched], name)
