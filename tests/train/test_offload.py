"""State in the host's memory: the bits of training with all state on the device, and where each array is."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from cases import train
from expertmesh.core import as_recipe
from expertmesh.flax_moe import CHECKPOINT_NAMES, MoEConfig
from expertmesh.train import offload, step
from expertmesh.train.model import LAYER_INPUT, ModelConfig
from expertmesh.train.weight import Weight, read

SIZE = 16, 13
WEIGHTS = ("embed", "head", "layers.moe.wi", "layers.moe.wo", "layers.out", "layers.qkv")


def trainer(offload, *, dtype="bfloat16", recipe=None, kept=(), **options):
    """Of three layers, with its state in the host's memory or without."""
    moe = MoEConfig(
        num_experts=4,
        top_k=2,
        expert_dim=32,
        aux_loss_coeff=0.01,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.float32,
        recipe=recipe and as_recipe(recipe),
    )
    config = ModelConfig(
        layers=3, model_dim=32, heads=2, moe=moe, remat_layers=True, kept_in_host=kept
    )
    return train.trainer(config, offload=offload, **options)


def trained(one, steps=2):
    """The state, and what each step and a validation say."""
    state, found = train.run(one, SIZE, last=steps)
    with one.on_mesh():
        found.append(float(one.evaluate(state, train.batch(one, 9, SIZE))))
    return state, found


@functools.cache
def stepped(**options):
    """A trainer whose state is in the host's memory, and its state after a step."""
    one = trainer(True, **options)
    return one, train.run(one, SIZE, last=1)[0]


def assert_same_bits(got, want):
    (state, found), (other, expected) = got, want
    trees = (state.saved, found), (other.saved, expected)
    for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_array_equal(a, b)


CASES = {
    "microbatches": dict(grad_accum=2, kept=(LAYER_INPUT,)),
    "quantized microbatches": dict(recipe="fp8_current", grad_accum=2, kept=(LAYER_INPUT,)),
    "auto axes": dict(axis_type=AxisType.Auto),
    "float32": dict(dtype="float32"),
    "muon": dict(optimizer="muon"),
    "muon, auto axes": dict(optimizer="muon", axis_type=AxisType.Auto),
    "muon, two experts at once": dict(optimizer="muon", sizes=(2, 1)),
}


@pytest.mark.full  # the main job's resumed microbatches are offloaded, too
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_state_on_the_device(name, monkeypatch):
    options = CASES[name]
    if name.endswith("two experts at once"):
        monkeypatch.setattr(step, "CHUNK_BYTES", 2 * 4 * 32 * 2 * 32)
    plain = {key: value for key, value in options.items() if key != "kept"}
    assert_same_bits(trained(trainer(True, **options)), trained(trainer(False, **plain)))


@pytest.mark.full
def test_more_values_are_kept_in_the_host():
    """Of values that the backward does not make again, the compiler may round what follows in another order."""
    kept = (LAYER_INPUT, *CHECKPOINT_NAMES["dispatched"])
    got, want = trained(trainer(True, kept=kept)), trained(trainer(False))
    trees = ((state.saved, found) for state, found in (got, want))
    for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def places(tree):
    """The names of arrays in the host's memory."""
    return {
        ".".join(key.key for key in path)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if x.sharding.memory_kind == "pinned_host"
    }


@pytest.mark.parametrize(
    "options, masters",
    [
        pytest.param({}, WEIGHTS, marks=pytest.mark.full),
        pytest.param(dict(dtype="float32"), (), marks=pytest.mark.full),
        (dict(recipe="fp8_current"), ("embed", "head", *WEIGHTS[4:])),
    ],
)
def test_where_each_array_is(options, masters):
    """Masters that products read in another dtype, and the moments of all weights."""
    _, state = stepped(**options)
    adam = state.opt_state[1][0]
    assert places(state.params) == set(masters)
    assert places(adam.mu) == places(adam.nu) == set(WEIGHTS)
    copies = jax.tree_util.tree_leaves_with_path(state.copies)
    assert {".".join(key.key for key in path) for path, _ in copies} == set(masters)
    assert all(
        x.dtype == jnp.bfloat16 and x.sharding.memory_kind != "pinned_host" for _, x in copies
    )


@pytest.mark.parametrize("kept", [(), (LAYER_INPUT,)])
def test_layers_inputs_are_in_the_host(kept):
    one = trainer(False, dtype="bfloat16", kept=kept)
    with one.on_mesh():
        text = str(one.step.trace(one.abstract(), train.abstract_batch(one, SIZE), 1).jaxpr)
    stacked = set(re.findall(r"bf16(<host>)?\[3,16\S*,12,32\]", text))
    assert stacked == ({"<host>"} if kept else {""})


def test_copies_follow_from_what_is_saved():
    one, state = stepped(recipe="fp8_current")
    with one.on_mesh():
        again = one.restored(state.saved)
    for a, b in zip(*map(jax.tree.leaves, (again, state)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding


def test_a_weights_gradient_is_its_masters():
    """Of the master's dtype, not rounded to the copy's."""
    copy, x = jnp.ones(3, jnp.bfloat16), jnp.array([1.0, 1 + 2**-12, 3])
    grad = jax.grad(lambda slot: jnp.sum(read(Weight(copy, slot)) * x))(jnp.zeros(3))
    np.testing.assert_array_equal(grad, x)


@pytest.mark.parametrize(
    "sizes, experts, wi, wo",
    [
        ((1, 1), 0.5, (1, 1), (1, 1)),  # one at least
        ((1, 1), 1, (1, 1), (1, 2)),
        ((1, 1), 3, (1, 2), (1, 4)),  # 3 do not divide 4
        ((2, 1), 9, (1, 4), (1, 4)),
        ((1, 2), 1, (1,), (1,)),  # all that are on a device
    ],
)
def test_a_chunk_has_as_many_experts_as_fit(sizes, experts, wi, wo, monkeypatch):
    monkeypatch.setattr(step, "CHUNK_BYTES", int(experts * 4 * 32 * 2 * 32))
    one = trainer(True, sizes=sizes)
    found = step.chunks_of(one.config, one.abstract(), one.shardings)
    assert [found["layers"]["moe"][name].sizes for name in ("wi", "wo")] == [wi, wo]
    assert found["layers"]["qkv"].sizes == (1,) and found["embed"].sizes == ()


@pytest.mark.parametrize(
    ("optimizer", "gpu", "wi"),
    [("adamw", True, ()), ("adamw", False, (1, 4)), ("muon", True, (1, 4))],
)
def test_what_is_on_a_gpu_has_chunks_for_gemms_alone(optimizer, gpu, wi, monkeypatch):
    monkeypatch.setattr(step, "_on_gpu", lambda shardings: gpu)
    one = trainer(False, optimizer=optimizer, sizes=(1, 1))
    found = step.chunks_of(one.config, one.abstract(), one.shardings)
    assert found["layers"]["moe"]["wi"].sizes == wi
    assert found["embed"].sizes == ()


@pytest.mark.parametrize("sizes", [(), (1,), (2,), (1, 1), (2, 1), (1, 3)])
def test_chunks_of_an_optimizer(sizes):
    """Any elementwise rule of optax, in chunks of leading dimensions."""
    keys = jax.random.split(jax.random.key(0), 2)
    params, grads = ({"w": jax.random.normal(key, (4, 6, 4)), "b": jnp.ones(4)} for key in keys)
    optimizer = optax.with_extra_args_support(optax.adamw(1e-2))
    state = optimizer.init(params)
    old = offload.Parameters(params, state, {"w": params["w"].astype(jnp.bfloat16), "b": None})
    hosted = jax.tree.map(lambda _: False, old)
    new = jax.jit(
        lambda old, grads: offload.update(
            optimizer, grads, old, hosted, {"w": offload.Chunks(sizes), "b": offload.Chunks()}
        )
    )(old, grads)
    updates, after = optimizer.update(grads, state, params)
    want = optax.apply_updates(params, updates)
    for a, b in zip(
        *map(jax.tree.leaves, ((new.params, new.opt_state), (want, after))), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(new.copies["w"], new.params["w"].astype(jnp.bfloat16))


def test_a_state_of_another_shape_is_refused():
    optimizer = optax.with_extra_args_support(optax.adafactor(1e-2, min_dim_size_to_factor=2))
    params = {"w": jnp.ones((4, 4))}
    old = offload.Parameters(params, optimizer.init(params), {"w": None})
    hosted = jax.tree.map(lambda _: False, old)
    with pytest.raises(ValueError, match="must have its shape"):
        offload.update(optimizer, params, old, hosted, {"w": offload.Chunks()})


def test_a_device_without_such_a_memory():
    device = types.SimpleNamespace(
        device_kind="some GPU", addressable_memories=lambda: [types.SimpleNamespace(kind="device")]
    )
    assert "some GPU has no memory of the kind pinned_host, only device" in offload.unsupported(
        device
    )
    assert offload.unsupported(jax.devices()[0]) is None
