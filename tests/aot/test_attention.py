"""The trainer's attention for GPUs that are not there: cuDNN's calls on each GPU's own sequences, no collectives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import hlo
from expertmesh.flax_moe import MoEConfig
from expertmesh.train.attention import attend
from expertmesh.train.mesh import AXES
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import TrainingOptions
from expertmesh.train.step import compiler_options
from expertmesh.train.trainer import Trainer

pytestmark = pytest.mark.aot

B, S, H, D = 16, 128, 4, 64


def program(mesh, dtype):
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    head = jax.ShapeDtypeStruct((B, S, H, D), dtype, sharding=rows)

    def both(q, k, v, dy):
        y, pull = jax.vjp(lambda q, k, v: attend(q, k, v, D**0.5), q, k, v)
        return y, pull(dy)

    with jax.set_mesh(mesh):
        return jax.jit(both).lower(head, head, head, head).compile().as_text()


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_flash_attention_of_own_sequences(h100_mesh, kind, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    text = program(h100_mesh({"fsdp": 2, "ep": 4}, axis_type=kind), jnp.bfloat16)
    targets = re.findall(r'custom_call_target="__cudnn\$(\w+)"', text)
    assert sorted(targets) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert f"bf16[{B // 8},{S},{H},{D}]" in text and f"{S},{S}]" not in text
    assert hlo.collectives(text) == []


def test_float32_has_no_flash_attention(h100_mesh, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    text = program(h100_mesh({"fsdp": 2, "ep": 4}), jnp.float32)
    assert "__cudnn$fmha" not in text and hlo.collectives(text) == []


def step_of(mesh, config, grad_accum=1):
    """The text of a trainer's step, as XLA is given it."""
    one = Trainer(config=config, options=TrainingOptions(grad_accum=grad_accum), mesh=mesh)
    batch = jax.ShapeDtypeStruct((B, S + 1), jnp.int32, sharding=one.rows)
    step, state = (
        one.step,
        one.abstract(),
    )  # not there: optax makes a state, for which the mesh has no devices
    with one.on_mesh():
        return step.lower(state, batch, 1).as_text()


def model_of(**options):
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=256, transport="all_to_all")
    return ModelConfig(layers=3, model_dim=256, heads=4, moe=moe, **options)


@pytest.mark.parametrize("remat_layers, forwards", [(False, 1), (True, 2)])
def test_a_step_has_one_layer(h100_mesh, monkeypatch, remat_layers, forwards):
    """Three layers in two microbatches call attention and its gradient at one place; a layer may be computed again."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    mesh = h100_mesh({"fsdp": 2, "ep": 4}, axis_type=AxisType.Explicit)
    text = step_of(mesh, model_of(remat_layers=remat_layers), grad_accum=2)
    targets = re.findall(r"custom_call @__cudnn\$(\w+)", text)
    assert sorted(targets) == ["fmhaSoftmax"] * forwards + ["fmhaSoftmaxBackward"]
    assert f"tensor<{B // 16}x{S}x4x64xbf16>" in text and f"x{S}x{S}x" not in text


def test_layers_by_themselves_have_calls_of_their_own(h100_mesh, monkeypatch):
    """XLA would lose an equal one. In float32, which cuDNN reads, their scales are one."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    mesh = h100_mesh({"fsdp": 2, "ep": 4}, axis_type=AxisType.Explicit)
    text = step_of(mesh, model_of(unrolled=True))
    scales = re.findall(r"fmha_scale\\22: ([\d.e+-]+)", text)
    assert text.count("custom_call @__cudnn$") == len(scales) == 6
    assert len(set(scales)) == 3 and {np.float32(scale) for scale in scales} == {np.float32(8)}


def test_sums_have_a_fixed_order_on_gpus(h100_mesh):
    platform = h100_mesh({"ep": 1}).devices.flat[0].platform
    assert compiler_options(platform) == {"xla_gpu_exclude_nondeterministic_ops": True}
    assert compiler_options("cpu") is None
