"""Model FLOPs by the parameters and the products of the program; the peaks of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from expertmesh.flax_moe import MoEConfig
from expertmesh.train import flops, model

pytestmark = pytest.mark.default_jax

S = 24  # like no other size of the model
CONFIG = model.ModelConfig(
    layers=3,
    model_dim=16,
    heads=2,
    moe=MoEConfig(num_experts=8, top_k=2, expert_dim=12, shared_expert_dim=20, use_bias=True),
)


def products(jaxpr):
    """(operand shapes, FLOPs) of each product in a program, and in those inside of it, as often as they run."""
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive is jax.lax.scan_p else 1
        for inner in jaxprs_in_params(equation.params):
            yield from list(products(inner)) * times
        if equation.primitive is jax.lax.dot_general_p:
            shapes = [v.aval.shape for v in equation.invars]
            (contracting, _), _ = equation.params["dimension_numbers"]
            terms = int(np.prod([shapes[0][dim] for dim in contracting]))
            yield shapes, 2 * terms * int(np.prod(equation.outvars[0].aval.shape))


def test_flops_are_those_of_parameters_and_of_attention():
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), CONFIG))
    active = 0.0
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not any(part in name for part in ("norm", "bias", "embed")):
            active += leaf.size * (2 / 8 if name.endswith((".wi", ".wo")) else 1)
    bytes_BS = jax.ShapeDtypeStruct((5, S), jnp.int32)
    forward = jax.make_jaxpr(lambda p, b: model.forward(p, b, CONFIG))(params, bytes_BS)
    attention = [
        count
        for shapes, count in products(forward.jaxpr)
        if any(shape[-2:] == (S, S) for shape in shapes) or all(S in shape for shape in shapes)
    ]
    assert len(attention) == 2 * CONFIG.layers
    want = 6 * active + 3 * sum(attention) / (5 * S)
    assert flops.flops_per_token(CONFIG, S) == pytest.approx(want, rel=1e-12)


def test_a_model_by_hand():
    """Two layers of 4 D^2 + D E + K 3 D F and the head, D = 2048, F = 4096, 2 of 8 experts, S = 1024."""
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=4096)
    config = model.ModelConfig(layers=2, model_dim=2048, heads=16, moe=moe)
    weights = 2 * (4 * 2048**2 + 2048 * 8 + 2 * 3 * 2048 * 4096) + 2048 * 256
    assert flops.flops_per_token(config, 1024) == 6 * weights + 12 * 2 * 1024 * 2048 == 858980352


@pytest.mark.parametrize(
    "kind, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_peaks(kind, teraflops):
    assert flops.peak_flops(kind) == teraflops * 1e12


def test_mfu_is_of_all_devices_and_of_bfloat16():
    meter = flops.Meter(2e9, 4, "NVIDIA H200", 1e15)
    assert meter.mfu(1e6) == 0.5
    assert "1000000 tokens/s, MFU 50.0 %: 500.0 of 1000 TFLOP/s a device" in meter.describe(1e6)
    here = flops.meter(CONFIG, S)
    assert here.peak is None and here.mfu(1e6) is None
    assert (
        here.describe(5.0)
        == f"5 tokens/s; no MFU, since no peak of bfloat16 GEMMs is known of {here.device_kind}"
    )
