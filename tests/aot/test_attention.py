"""The trainer's attention for GPUs that are not there: cuDNN's calls on each GPU's own sequences, no collectives."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import hlo
from expertmesh.train.attention import attend
from expertmesh.train.mesh import AXES

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
