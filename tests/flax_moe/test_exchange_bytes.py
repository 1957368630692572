"""Bytes of exchanges by formula, against the table of compiled programs, a compiled one, and loops over tokens."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.scripts import load_script
from expertmesh.core import hlo
from expertmesh.core.testing import compile_partitioned
from expertmesh.flax_moe import MoEConfig, exchange_bytes, init_params, moe

pytestmark = pytest.mark.default_jax

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
LEGS = ("dispatch", "combine", "backward_dispatch", "backward_combine")


def test_they_are_those_of_the_table_of_compiled_programs():
    script, marks = load_script(DOCS / "wire_bytes.py"), load_script(DOCS / "marks.py")
    table = (DOCS / "numerics.md").read_text().partition(script.BEGIN)[2].partition(marks.END)[0]
    rows = {
        row.split("|")[1].strip(): row.split("|")[3:7] for row in table.split("\n") if "|" in row
    }
    sizes = dict(num_experts=script.E, top_k=script.K, expert_dim=script.F, transport="all_to_all")
    for name, options in script.ROWS.items():
        config = MoEConfig(**sizes, **options)
        found = exchange_bytes(
            config,
            model_dim=script.D,
            num_tokens=script.TOKENS_PER_DEVICE,
            ep_size=script.AXES["ep"],
        )
        assert tuple(found) == LEGS
        want = [float(cell.split()[0]) for cell in rows[name]]
        np.testing.assert_allclose([found[leg] / 2**20 for leg in LEGS], want, atol=0.05)


@pytest.mark.parametrize("recipe", [None, "fp8_block"])
def test_they_are_those_of_a_compiled_ring(recipe):
    R, T, D = 4, 16, 128
    config = MoEConfig(
        num_experts=8, top_k=2, expert_dim=128, transport="ring", recipe=recipe, ep_axis="ep"
    )
    mesh = jax.make_mesh((R,), ("ep",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:R])

    def placed(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    params = init_params(jax.random.key(0), D, config)
    specs = {
        name: PartitionSpec("ep") if name in ("wi", "wo") else PartitionSpec() for name in params
    }
    params = {name: placed(w, specs[name]) for name, w in params.items()}
    x = placed(jnp.ones((R * T, D), jnp.bfloat16), PartitionSpec("ep"))

    def step(params, x, dy):
        y, pull = jax.vjp(lambda p, x: moe(p, x, config).y, params, x)
        return y, pull(dy)

    text = compile_partitioned(jax.jit(step).lower(params, x, x))[1]
    sent = []
    for each in hlo.collectives(text):
        (shape,) = each.shapes
        whole = hlo.num_bytes(shape)
        if each.kind == "all-gather" and whole >= R * T * D:
            sent.append(whole * (R - 1) // R)
        elif each.kind == "reduce-scatter" and whole >= T * D:
            sent.append(whole * (R - 1))
    found = exchange_bytes(config, model_dim=D, num_tokens=T, ep_size=R)
    assert sorted(sent) == sorted(found.values())


@pytest.mark.parametrize("transport", ["nvlink", "ragged"])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_no_token_is_sent_twice_to_a_rank(transport, top_k):
    """Loops over tokens: no draw sends more, and one whose experts are spread out sends as much."""
    R, T, D, E = 4, 32, 64, 24
    config = MoEConfig(num_experts=E, top_k=top_k, expert_dim=32, transport=transport)
    found = exchange_bytes(config, model_dim=D, num_tokens=T, ep_size=R)
    rng = np.random.default_rng(0)
    drawn = [rng.permutation(E)[:top_k] for _ in range(T)]
    spread = [[(E // R) * (1 + k % (R - 1)) + k // (R - 1) for k in range(top_k)] for _ in range(T)]

    def tokens(choices):
        return sum(len({e // (E // R) for e in of_token} - {0}) for of_token in choices)

    assert tokens(drawn) * D * 2 <= found["dispatch"] == tokens(spread) * D * 2
    assert found["combine"] == tokens(spread) * D * (2 if top_k == 1 else 4)


def test_one_rank_sends_nothing_and_the_recipe_in_context_counts():
    from expertmesh.core import autocast

    config = MoEConfig(num_experts=8, top_k=2, expert_dim=128)
    alone = exchange_bytes(config, model_dim=128, num_tokens=8, ep_size=1)
    assert set(alone.values()) == {0}
    with autocast("fp8_block"):
        found = exchange_bytes(config, model_dim=256, num_tokens=8, ep_size=2)
    assert found["dispatch"] == 8 * (256 + 2 * 4) and found["backward_combine"] == 8 * 256 * 2


def test_what_has_no_answer_is_refused():
    config = MoEConfig(num_experts=8, top_k=2, expert_dim=8, transport="two_level")
    with pytest.raises(
        ValueError, match="transport must be of one level; got transport='two_level'"
    ):
        exchange_bytes(config, model_dim=8, num_tokens=8, ep_size=4)
    with pytest.raises(ValueError, match="ep_size must be at least 1"):
        exchange_bytes(config, model_dim=8, num_tokens=8, ep_size=0)
