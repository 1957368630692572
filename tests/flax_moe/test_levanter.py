"""levanter's own MoE, `levanter.grug.grug_moe` of marin-levanter: the recipe and the block compute what it does.

Runs in the CI cell `levanter`, which installs it.
"""

import contextlib
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.scripts import load_script
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import MoEConfig, moe

grug_moe = pytest.importorskip("levanter.grug.grug_moe")

pytestmark = [pytest.mark.levanter, pytest.mark.default_jax]

ROOT = pathlib.Path(__file__).resolve().parents[2]
T, D, E, F, K = 64, 32, 8, 24, 2
RANKS = 4


@pytest.fixture(scope="module")
def recipes():
    return load_script(ROOT / "examples/recipes.py")


@pytest.fixture(scope="module")
def operands():
    """Tokens of varied magnitudes, choices, weights, both projections."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (T, D)) * jnp.exp(jax.random.normal(keys[1], (T, 1)))
    weights, chosen = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[2], (T, E))), K)
    w_up_gate = jax.random.normal(keys[3], (E, D, 2 * F)) * D**-0.5
    w_down = jax.random.normal(keys[4], (E, F, D)) * F**-0.5
    return x, chosen, weights, w_up_gate, w_down


def placed(operands):
    """On a mesh (data, expert), as levanter has it."""
    mesh = jax.make_mesh((2, RANKS), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    tokens, experts = PartitionSpec(("data", "expert")), PartitionSpec("expert")
    specs = [tokens] * 3 + [experts] * 2
    return mesh, [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]


def theirs(*operands):
    """Its receive buffers hold every choice, so that nothing is dropped."""
    return grug_moe.moe_mlp(*operands, capacity_factor=float(RANKS * E))


def block(x, chosen, weights, w_up_gate, w_down):
    config = MoEConfig(num_experts=E, top_k=K, expert_dim=F, dtype=x.dtype, use_gate=False)
    params = {"wi": w_up_gate.reshape(E, D, 2, F), "wo": w_down}
    return moe(params, x, config, topk_idx=chosen, topk_weights=weights).y


def with_gradients(function, operands):
    """y, and gradients in tokens, weights and projections."""

    def loss(*operands):
        y = function(*operands)
        return jnp.sum(jnp.square(y.astype(jnp.float32)) * jnp.arange(1, D + 1)), y

    call = jax.value_and_grad(loss, argnums=(0, 2, 3, 4), has_aux=True)
    (_, y), grads = jax.jit(call)(*operands)
    return y, *grads


@pytest.mark.parametrize("ours, sharded", [("block", False), ("block", True), ("recipe", True)])
def test_values_and_gradients(recipes, operands, ours, sharded):
    function = block if ours == "block" else (lambda *a: recipes.moe_mlp(*a)[0])
    context = contextlib.nullcontext()
    if sharded:
        mesh, operands = placed(operands)
        context = jax.set_mesh(mesh)
    with context:
        want, got = with_gradients(theirs, operands), with_gradients(function, operands)
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    print(f"{ours}, sharded={sharded}: y {errors[0]:.1e}, gradients {max(errors[1:]):.1e}")
    assert max(errors) < 1e-6


@pytest.mark.parametrize("ours", ["recipe", "block"])
def test_bfloat16(recipes, operands, ours):
    function = block if ours == "block" else (lambda *a: recipes.moe_mlp(*a)[0])
    _, chosen, weights, *_ = operands
    narrow = [a if a is chosen or a is weights else a.astype(jnp.bfloat16) for a in operands]
    mesh, narrow = placed(narrow)
    with jax.set_mesh(mesh):
        want, got = with_gradients(theirs, narrow), with_gradients(function, narrow)
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    print(f"{ours}, bfloat16: {max(errors):.1e}")
    assert max(errors) < 1e-2
