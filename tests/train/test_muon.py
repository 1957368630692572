"""Muon of experts' weights: against singular values in float64, on any mesh, with state in the host's memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from cases import train
from expertmesh.flax_moe import MoEConfig
from expertmesh.train import offload
from expertmesh.train import step as steps
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import TrainingOptions
from expertmesh.train.step import make_optimizer, schedule

pytestmark = pytest.mark.default_jax

SIZE = 16, 13
EXPERTS = ("wi", "wo")


def trainer(**options):
    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=48, dtype=jnp.float32)
    config = ModelConfig(layers=2, model_dim=32, heads=2, moe=moe)
    return train.trainer(config, **options)


@functools.cache
def states(optimizer, **options):
    """The parameters and the optimizer's state before the first step and after each of two."""
    one = trainer(optimizer=optimizer, **options)
    with one.on_mesh():
        state = one.init()
    found = [jax.device_get(state.saved)]
    for step in (1, 2):
        state, _ = train.run(one, SIZE, state=state, first=step, last=step)
        found.append(jax.device_get(state.saved))
    return found


def moments(state):
    return (
        state.opt_state[1]
        .inner_states["experts"]
        .inner_state.inner_states["muon"]
        .inner_state[0]
        .mu
    )


def matrices(of_experts):
    """Of each weight, float64[..., rows, columns]: its gates and ups are matrices by themselves."""
    wi, wo = (np.asarray(of_experts[name], np.float64) for name in EXPERTS)
    return {"wi": np.moveaxis(wi, -2, -3), "wo": wo}


def orthogonalized(x):
    """Five steps of Newton-Schulz, which change singular values alone."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / (np.linalg.norm(s, axis=-1, keepdims=True) + 1e-8)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s[..., None, :]) @ vt


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(dict(axis_type=AxisType.Auto, offload=True), marks=pytest.mark.full),
        pytest.param(dict(sizes=(1, 1), offload=True), marks=pytest.mark.full),
    ],
)
def test_steps_in_float64(options):
    """The head starts at zero, so experts have no gradient in the first step, and one moment in the second."""
    found = states("muon", **options)
    of_training = trainer(optimizer="muon").options
    rate, decay, beta = schedule(of_training), of_training.weight_decay, 0.95
    before = {name: np.zeros(1) for name in EXPERTS}
    for step in (1, 2):
        old, new = (matrices(found[i].params["layers"]["moe"]) for i in (step - 1, step))
        mu = matrices(moments(found[step])["layers"]["moe"])
        for name in EXPERTS:
            grad = (mu[name] - beta * before[name]) / (1 - beta)
            ahead = beta * mu[name] / (1 - beta ** (step + 1)) + (1 - beta) * grad / (
                1 - beta**step
            )
            update = 0.2 * np.sqrt(max(grad.shape[-2:])) * orthogonalized(ahead)
            want = -float(rate(step - 1)) * (update + decay * old[name])
            largest = np.abs(want).max()
            assert largest > 1e-5
            np.testing.assert_allclose(new[name] - old[name], want, atol=2e-3 * largest)
        before = mu


def test_all_else_is_adamw():
    """Gradients are clipped alike; parameters that are no expert's are those of AdamW."""
    clip = 0.1  # of norms of 0.4
    (*_, muon), (*_, adamw) = (states(optimizer, clip=clip) for optimizer in ("muon", "adamw"))
    for name in EXPERTS:
        a = moments(muon)["layers"]["moe"][name] / (1 - 0.95)
        b = adamw.opt_state[1][0].mu["layers"]["moe"][name] / (1 - 0.9)
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
    others = [
        [
            leaf
            for path, leaf in jax.tree.leaves_with_path(saved.params)
            if path[-1].key not in EXPERTS
        ]
        for saved in (muon, adamw)
    ]
    assert others[0]
    for a, b in zip(*others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)  # of steps of 3e-3


@pytest.mark.parametrize("together", [1, 2, 4])
def test_gemms_are_of_a_batch_of_matrices(together, monkeypatch):
    """Of a gate and an up of each expert of a chunk; downs are half as large, so a chunk has more of them."""
    monkeypatch.setattr(steps, "CHUNK_BYTES", together * 4 * 32 * 2 * 48)
    one = trainer(optimizer="muon", sizes=(1, 1), axis_type=AxisType.Auto)
    with one.on_mesh():
        text = str(one.step.trace(one.abstract(), train.abstract_batch(one, SIZE), 1).jaxpr)
    found = re.findall(r":f32\[(\d+),32,48\] = dot_general", text)
    assert set(map(int, found)) == {2 * together, min(4, 2 * together)}


@pytest.mark.parametrize("sizes", [(), (1,), (2,), (1, 1), (1, 3), (2, 6)])
def test_chunks_are_the_whole(sizes):
    keys = jax.random.split(jax.random.key(0), 2)
    params, grads = (
        {"wi": jax.random.normal(key, (2, 6, 8, 2, 4)), "norm": jnp.ones(4)} for key in keys
    )
    optimizer = make_optimizer(TrainingOptions(optimizer="muon", steps=4))
    old = offload.Parameters(params, optimizer.init(params), {"wi": None, "norm": None})
    hosted = jax.tree.map(lambda _: False, old)
    norm = optax.tree_utils.tree_norm(grads)
    chunks = {"wi": offload.Chunks(sizes), "norm": offload.Chunks()}
    new = jax.jit(
        lambda old, grads: offload.update(optimizer, grads, old, hosted, chunks, grad_norm=norm)
    )(old, grads)
    updates, state = optimizer.update(grads, old.opt_state, params, grad_norm=norm)
    want = optax.apply_updates(params, updates), state
    for a, b in zip(*map(jax.tree.leaves, ((new.params, new.opt_state), want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
