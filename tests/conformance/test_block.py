"""The MoE block (tests 12 to 14) against loops in float64, in every mesh mode, and what it does to memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from cases.covering import covering
from conformance.settings import (
    EACH_MODE,
    MESHES,
    SPLIT_BOTH_WAYS,
    TOKENS,
    Setting,
    assert_close,
    parametrize,
    run_on_mesh,
)
from core.router import router_oracle
from expertmesh.flax_moe import moe, param_shapes, param_specs
from flax_moe import moe_oracle

SOFTMAX = dict(score_function="softmax")
SIGMOID = dict(score_function="sigmoid", scaling_factor=2.5)
GROUPS = dict(num_groups=4, group_topk=2)
OPTIONS = {
    "softmax": SOFTMAX,
    "pre_softmax": SOFTMAX | dict(use_pre_softmax=True, scaling_factor=2.5),
    "sigmoid": SIGMOID | dict(dtype=jnp.bfloat16),
    "narrow": SOFTMAX | dict(expert_dim=8, use_bias=False, dtype=jnp.bfloat16),
    "sigmoid_bias": SIGMOID,
    "sigmoid_bias_groups": SIGMOID | GROUPS | dict(top_k=4),
}
EVERYTHING = "sigmoid_bias_groups"
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def config_of(setting, name):
    options = dict(aux_loss_coeff=0.0, z_loss_coeff=0.0, transport=setting.transport)
    ep_axis = setting.ep if setting.mode == "manual" else None
    return moe_oracle.make_config(**options | OPTIONS[name] | dict(ep_axis=ep_axis))


def block(*operands, names, config, steered):
    """y, and the gradients of sum(y * dy): of the parameters, of x, of the bias."""
    *params, x, dy, bias = operands

    def forward(params, x, bias):
        params = dict(zip(names, params, strict=True))
        return moe(params, x, config, expert_bias=bias if steered else None).y

    y, pull = jax.vjp(forward, tuple(params), x, bias)
    return y, *pull(dy.astype(y.dtype))


def specs_of(setting, config, names):
    if setting.mode == "manual":  # in the user's own shard_map each device has all of its experts
        return tuple(PartitionSpec(*[setting.ep] * (n != "gate_kernel")) for n in names)
    return tuple(param_specs(config, setting.resource)[n] for n in names)


@pytest.mark.any_device
@pytest.mark.any_process
@parametrize(EACH_MODE[:2] + SPLIT_BOTH_WAYS, EACH_MODE[2:])
def test_every_option_in_each_mode(setting):
    """Tests 12 and 13, with a bias, groups, a scaling factor and the experts' own biases."""
    check(setting, EVERYTHING)


@pytest.mark.any_device
@covering(
    "name",
    ["softmax", "pre_softmax", "sigmoid", "narrow", "sigmoid_bias"],
    covers=["sigmoid", "narrow"],
)
def test_options_on_one_device(name):
    """Tests 12 and 13."""
    check(Setting("single"), name)


def check(setting, name):
    """The output and every gradient of sum(y * r), r random of order 1, by norm and by cosine."""
    config = config_of(setting, name)
    data = moe_oracle.make_data(config, (8, 5, 16))
    data = data._replace(x=np.asarray(data.x, config.dtype))
    # Strong enough to overrule the scores, which are between 0 and 1.
    bias = np.where(np.arange(8) % 3 == 0, 5, -5) * np.linspace(0.9, 1, 8).astype(np.float32)
    bias, steered = bias.astype(np.float32), "bias" in name
    wide = data._replace(x=data.x.astype(np.float32))
    want = moe_oracle.run(wide, config, bias=bias if steered else None)
    names = tuple(data.params)
    params = specs_of(setting, config, names)
    y, d_params, d_x, d_bias = run_on_mesh(
        setting,
        block,
        (*data.params.values(), data.x, data.dy, bias),
        (*params, TOKENS, TOKENS, PartitionSpec()),
        out_specs=(TOKENS, params, TOKENS, PartitionSpec()),
        names=names,
        config=config,
        steered=steered,
    )
    tolerance = TOLERANCE[str(config.dtype)]
    assert y.dtype == d_x.dtype == config.dtype
    assert_close(y, want.y, tolerance, "y")
    assert_close(d_x, want.d_x, tolerance, "d_x")
    for name, gradient in zip(names, d_params, strict=True):
        assert gradient.dtype == np.float32
        assert_close(gradient, want.d_params[name], tolerance, name)
    np.testing.assert_array_equal(d_bias, 0)


def aux_loss(gate, wi, wo, x, *, config):
    loss = lambda gate: moe(dict(gate_kernel=gate, wi=wi, wo=wo), x, config).aux_loss  # noqa: E731
    return jax.value_and_grad(loss)(gate)


def aux_oracle(logits, config):
    """E * coeff / (K T^2) * sum_e P_e n_e of the gathered logits, and its gradient with the counts held."""
    T, E = logits.shape
    score = functools.partial(router_oracle.normalised, score_function=config.score_function)
    counts = np.zeros(E)
    for t in range(T):
        counts[router_oracle.route_token(logits[t], config.router)[0]] += 1
    scale = E * config.aux_loss_coeff / (config.top_k * T**2)
    d_logits = np.zeros(logits.shape)
    for t, e in np.ndindex(T, E):
        step = 1e-5 * np.eye(E)[e]
        d_logits[t, e] = scale * counts @ (score(logits[t] + step) - score(logits[t] - step)) / 2e-5
    return scale * sum(counts @ score(x) for x in logits), d_logits


SIZES = {(2, 1, 1) if len(jax.devices()) > 1 else (1, 1, 1), MESHES[0]}
LOSS_SETTINGS = [Setting("explicit", sizes=sizes) for sizes in sorted(SIZES)]
LOSS_SETTINGS += [Setting("auto", sizes=MESHES[0])]


@pytest.mark.any_device
@parametrize(LOSS_SETTINGS, [Setting("single"), Setting("resource", sizes=MESHES[0])])
def test_balance_loss_is_of_all_tokens(setting):
    """Test 14. In float32, the formula's value and gradient on any number of devices."""
    score = "sigmoid" if setting.mode == "auto" else "softmax"
    config = moe_oracle.make_config(
        aux_loss_coeff=0.5, z_loss_coeff=0.0, score_function=score, use_bias=False
    )
    data = moe_oracle.make_data(config, (8, 5, 16))
    x = data.x.astype(np.float64).reshape(-1, 16)
    want, d_logits = aux_oracle(x @ data.params["gate_kernel"].astype(np.float64), config)
    names = tuple(data.params)
    loss, gradient = run_on_mesh(
        setting,
        aux_loss,
        (*data.params.values(), data.x),
        (*specs_of(setting, config, names), TOKENS),
        config=config,
    )
    assert loss.dtype == np.float32
    assert_close(loss, want, 1e-5, "loss")
    assert_close(gradient, x.T @ d_logits, 1e-5, "gradient of the gate")


def test_arrays_of_more_than_2_31_elements():
    """M-11. Shapes of 2^32 tokens x features and 2^33 rows x features, forward and backward; nothing is allocated."""
    config = moe_oracle.make_config(use_bias=False, dtype=jnp.bfloat16)
    shape = jax.ShapeDtypeStruct
    params = {name: shape(dims, jnp.float32) for name, dims in param_shapes(4096, config).items()}
    x = shape((2**10, 2**10, 4096), jnp.bfloat16)

    def loss(params, x):
        return moe(params, x, config).y.astype(jnp.float32).sum()

    d_params, d_x = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), params, x)
    assert (d_x.shape, d_x.dtype) == (x.shape, x.dtype)
    assert {n: g.shape for n, g in d_params.items()} == {n: w.shape for n, w in params.items()}
