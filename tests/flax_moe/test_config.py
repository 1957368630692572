"""MoEConfig: its fields, its value semantics, what it refuses."""

import dataclasses
import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import RECIPES, Activation, Float8BlockScaling, MXFP8BlockScaling
from expertmesh.core.ops.activation import ACTIVATIONS
from expertmesh.core.router.route import SCORE_FUNCTIONS, RouterConfig
from expertmesh.ep import EpConfig
from expertmesh.flax_moe import MoEConfig
from expertmesh.flax_moe.config import dispatches_quantized

PLAIN = Activation(gated=False)
VALID = dict(num_experts=8, top_k=2, expert_dim=16)


def test_fields_are_frozen():
    """A new field has a default."""
    fields = [(f.name, f.default) for f in dataclasses.fields(MoEConfig)]
    assert fields == [
        ("num_experts", dataclasses.MISSING),
        ("top_k", dataclasses.MISSING),
        ("expert_dim", dataclasses.MISSING),
        ("activation", "silu"),
        ("separate_wi", False),
        ("use_bias", False),
        ("shared_expert_dim", None),
        ("shared_expert_gate", False),
        ("latent_dim", None),
        ("num_null_experts", 0),
        ("null_experts", "zero"),
        ("weigh_inputs", False),
        ("use_gate", True),
        ("use_gate_bias", False),
        ("use_expert_bias", False),
        ("aux_loss_coeff", 0.0),
        ("aux_loss_per_sequence", False),
        ("aux_loss_counts", "chosen"),
        ("z_loss_coeff", 0.0),
        ("dtype", jnp.bfloat16),
        ("param_dtype", jnp.float32),
        ("recipe", None),
        ("quantize_backward_combine", False),
        ("reduce_dtype", jnp.float32),
        ("num_chunks", 1),
        ("remat", "save_all"),
        ("shard_exp_on_fsdp", False),
        ("score_function", "softmax"),
        ("use_pre_softmax", False),
        ("num_groups", None),
        ("group_topk", None),
        ("group_best", None),
        ("normalize", None),
        ("scaling_factor", 1.0),
        ("transport", "auto"),
        ("overflow", "drop"),
        ("debug", False),
        ("alignment", None),
        ("capacity_factor", None),
        ("num_spare_experts", 0),
        ("least_rows_per_copy", 0),
        ("ep_axis", None),
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoEConfig(**VALID).top_k = 3
    with pytest.raises(TypeError):
        MoEConfig(8, 2, 16)


def test_equal_configs_are_one_value():
    a = MoEConfig(**VALID, dtype=jnp.bfloat16)
    b = MoEConfig(**VALID, dtype="bfloat16")
    assert a == b and hash(a) == hash(b)
    assert a != dataclasses.replace(a, top_k=1)
    assert pickle.loads(pickle.dumps(a)) == a
    named = MoEConfig(**VALID, activation=Activation(function="gelu"))
    assert named.activation == "gelu" and named.act == Activation(function="gelu")
    clamped = Activation(limit=7.0)
    assert MoEConfig(**VALID, activation=clamped).activation == clamped


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(recipe=Float8BlockScaling(power_2_scale=False), ep_axis=("a", "b"), dtype="float32"),
        dict(activation=Activation(limit=7.0), recipe="fp8_delayed", reduce_dtype="bfloat16"),
        *(dict(recipe=name) for name in RECIPES),
    ],
    ids=str,
)
def test_a_config_is_json(options):
    config = MoEConfig(**VALID, **options)
    assert MoEConfig.from_json(config.to_json()) == config
    assert MoEConfig.from_dict(config.to_dict()) == config
    assert json.loads(config.to_json()) == config.to_dict(), "of JSON's own types"
    assert set(config.to_dict()) == {field.name for field in dataclasses.fields(MoEConfig)}


@pytest.mark.parametrize(
    "options", [dict(axis=("a", "b"), transport="ring"), dict(axis=())], ids=str
)
def test_an_exchange_is_json(options):
    config = EpConfig(num_experts=8, **options)
    assert EpConfig.from_json(config.to_json()) == config


def test_what_a_file_may_say():
    """A recipe and an activation by name, or by some of their fields."""
    written = VALID | {"recipe": {"recipe": "fp8_block", "fp8_format": "HYBRID"}}
    written |= {"activation": {"function": "relu", "gated": False}}
    config = MoEConfig.from_dict(written)
    assert config.recipe.fp8_format.name == "HYBRID" and not config.act.gated
    named = MoEConfig.from_dict(VALID | {"recipe": "mxfp8", "activation": "gelu"})
    assert named == MoEConfig(**VALID, recipe=MXFP8BlockScaling(), activation="gelu")


@pytest.mark.parametrize(
    "fields, error, words",
    [
        (VALID | {"topk": 2}, ValueError, ["MoEConfig.from_dict", "top_k", "got also topk"]),
        (list(VALID), TypeError, ["MoEConfig.from_dict", "mapping", "got list"]),
        (VALID | {"activation": {"funtion": "silu"}}, ValueError, ["Activation", "also funtion"]),
        (VALID | {"recipe": {"recipe": "mxfp8", "margin": 1}}, ValueError, ["also margin"]),
        (VALID | {"recipe": {"margin": 1}}, ValueError, ["name under 'recipe'", "got margin"]),
    ],
    ids=str,
)
def test_what_no_config_is_made_of(fields, error, words):
    with pytest.raises(error) as info:
        MoEConfig.from_dict(fields)
    assert all(word in str(info.value) for word in words), str(info.value)


def test_numbers_of_numpy_are_pythons():
    numbers = dict(top_k=np.int64(2), num_experts=np.int32(8), scaling_factor=np.float32(2.5))
    config = MoEConfig(**VALID | numbers, use_bias=np.bool_(True), z_loss_coeff=np.float64(0.5))
    want = MoEConfig(**VALID, scaling_factor=2.5, use_bias=True, z_loss_coeff=0.5)
    assert config == want and config.to_json() == want.to_json()
    for name in (*numbers, "use_bias", "z_loss_coeff"):
        assert type(getattr(config, name)) is type(getattr(want, name)), name
    assert EpConfig(num_experts=np.int64(8)).to_json() == EpConfig(num_experts=8).to_json()
    with pytest.raises(TypeError, match="top_k must be an int; got top_k=2.0"):
        MoEConfig(**VALID | {"top_k": np.float64(2)})


def test_router_part():
    config = MoEConfig(**VALID, use_pre_softmax=True)
    assert config.router == RouterConfig(top_k=2, use_pre_softmax=True)
    options = dict(score_function="sigmoid", num_groups=4, group_topk=2, scaling_factor=2.5)
    options |= dict(group_best=1, normalize=False)
    assert MoEConfig(**VALID, **options).router == RouterConfig(top_k=2, **options)


@pytest.mark.parametrize("null, groups", [(0, (4, 2)), (8, (None, None))])
def test_the_exchange_knows_the_routers_groups(null, groups):
    """But for those that null experts are in, which are on no host."""
    options = dict(score_function="sigmoid", num_groups=4, group_topk=2, num_null_experts=null)
    exchange = MoEConfig(**VALID, **options).exchange(axis=("host", "ep"))
    assert (exchange.num_groups, exchange.group_topk) == groups


@pytest.mark.parametrize(
    "changes, error, words",
    [
        (dict(top_k=9), ValueError, ["top_k=9", "num_experts=8"]),
        (dict(top_k=0), ValueError, ["top_k=0", "at least 1"]),
        (dict(num_experts=0), ValueError, ["num_experts=0"]),
        (dict(num_experts=8.0), TypeError, ["num_experts=8.0", "int"]),
        (dict(expert_dim=True), TypeError, ["expert_dim=True"]),
        (dict(expert_dim=16.0), TypeError, ["expert_dim=16.0"]),
        (dict(activation="swish"), ValueError, ["'swish'", *ACTIVATIONS]),
        (dict(activation=jnp.tanh), TypeError, ["activation", "Activation"]),
        (dict(shared_expert_dim=0), ValueError, ["shared_expert_dim=0"]),
        (dict(shared_expert_gate=True), ValueError, ["shared_expert_gate", "dim=None", "width"]),
        (dict(separate_wi=True, activation=PLAIN), ValueError, ["separate_wi", "gated=False"]),
        (dict(weigh_inputs=True), ValueError, ["weigh_inputs", "top_k=2", "E(w x)", "w_k E_k(x)"]),
        (dict(latent_dim=0), ValueError, ["latent_dim=0", "or None"]),
        (dict(num_null_experts=-1), ValueError, ["num_null_experts=-1", "at least 0", "or 0"]),
        (dict(num_null_experts=1.0), TypeError, ["num_null_experts=1.0"]),
        (dict(null_experts="one"), ValueError, ["null_experts='one'", "zero, identity", "w x"]),
        (dict(num_null_experts=2, top_k=11), ValueError, ["top_k=11", "num_experts=10"]),
        (dict(num_chunks=0), ValueError, ["num_chunks=0"]),
        (dict(use_gate_bias=True, use_gate=False), ValueError, ["use_gate_bias", "use_gate=False"]),
        (dict(aux_loss_counts="all"), ValueError, ["aux_loss_counts='all'", "chosen", "unbiased"]),
        (dict(remat="full"), ValueError, ["'full'", "save_all", "save_min", "recompute"]),
        (dict(score_function="tanh"), ValueError, ["'tanh'", *SCORE_FUNCTIONS]),
        (dict(num_groups=3, group_topk=1), ValueError, ["MoEConfig", "8 experts", "num_groups=3"]),
        (dict(num_groups=8, group_topk=1), ValueError, ["MoEConfig", "group_topk=1", "at least"]),
        (dict(num_groups=2), ValueError, ["group_topk=None"]),
        (dict(scaling_factor="2"), TypeError, ["scaling_factor='2'"]),
        (dict(transport="smoke"), ValueError, ["'smoke'", "ring", "all_to_all"]),
        (dict(overflow="trap"), ValueError, ["overflow='trap'", "drop", "error"]),
        (dict(alignment=0), ValueError, ["alignment=0"]),
        (dict(alignment=12), ValueError, ["alignment=12", "power of two"]),
        (dict(capacity_factor=0.5), ValueError, ["capacity_factor=0.5", "at least 1"]),
        (dict(capacity_factor=float("inf")), ValueError, ["capacity_factor=inf", "None"]),
        (dict(capacity_factor="big"), TypeError, ["capacity_factor='big'"]),
        (dict(aux_loss_coeff=-1.0), ValueError, ["aux_loss_coeff=-1.0"]),
        (dict(aux_loss_coeff=float("inf")), ValueError, ["aux_loss_coeff=inf"]),
        (dict(z_loss_coeff=float("nan")), ValueError, ["z_loss_coeff=nan"]),
        (dict(aux_loss_coeff=jnp.ones(())), TypeError, ["aux_loss_coeff", "Python number"]),
        (dict(ep_axis=3), TypeError, ["ep_axis=3", "tuple"]),
        (dict(ep_axis=["ep"]), TypeError, ["ep_axis=['ep']"]),
        (dict(ep_axis=("ep", "ep")), TypeError, ["ep_axis=('ep', 'ep')", "each once"]),
        (dict(ep_axis=()), TypeError, ["ep_axis=()"]),
        (dict(ep_axis=("ep", 1)), TypeError, ["ep_axis=('ep', 1)"]),
        (dict(alignment=64, recipe="fp8_block"), ValueError, ["alignment=64", "128"]),
        (
            dict(transport="ring", recipe="mxfp8", quantize_backward_combine=True),
            ValueError,
            ["quantize_backward_combine", "'ring'"],
        ),
        (
            dict(recipe="fp8_current", quantize_backward_combine=True),
            ValueError,
            ["quantize_backward_combine", "Float8CurrentScaling"],
        ),
        (dict(dtype=jnp.int32), ValueError, ["dtype", "floating"]),
        (dict(param_dtype=jnp.int8), ValueError, ["param_dtype"]),
        (dict(reduce_dtype=jnp.float64), ValueError, ["reduce_dtype=float64", "bfloat16"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_errors(changes, error, words):
    with pytest.raises(error) as info:
        MoEConfig(**VALID | changes)
    assert all(word in str(info.value) for word in words), str(info.value)


@pytest.mark.parametrize(
    "changes",
    [
        dict(top_k=8),
        dict(use_gate=False),
        dict(use_gate_bias=True),
        dict(shared_expert_gate=True, shared_expert_dim=8),
        dict(separate_wi=True),
        dict(weigh_inputs=True, top_k=1),
        dict(use_expert_bias=True, score_function="sigmoid"),
        dict(capacity_factor=1),
        dict(ep_axis="ep"),
        dict(ep_axis=("dp", "ep")),
        dict(transport="ring", recipe=Float8BlockScaling()),
        dict(alignment=256, recipe=Float8BlockScaling()),
        dict(quantize_backward_combine=True),
        dict(quantize_backward_combine=True, recipe=MXFP8BlockScaling()),
    ],
    ids=str,
)
def test_what_is_taken(changes):
    config = MoEConfig(**VALID | changes)
    assert {name: getattr(config, name) for name in changes} == changes


def test_a_recipe_by_name_is_kept_as_a_recipe():
    assert MoEConfig(**VALID, recipe="mxfp8").recipe == MXFP8BlockScaling()


def test_the_blocks_own_recipe_comes_before_the_one_in_context():
    config, block = MoEConfig(**VALID), Float8BlockScaling()
    assert config.under(None) is config and config.under(block).recipe == block
    own = MoEConfig(**VALID, recipe="mxfp8")
    assert own.under(block) is own.under(None) is own
    both = dataclasses.replace(own, quantize_backward_combine=True)
    assert both.under(None) is both
    narrow = MoEConfig(**VALID, quantize_backward_combine=True)
    assert narrow.under(block).recipe == block
    with pytest.raises(ValueError, match="quantize_backward_combine must go with a recipe"):
        narrow.under(None)


def test_exchange_part():
    options = dict(transport="all_to_all", overflow="error", debug=True)
    config = MoEConfig(**VALID, **options, recipe="mxfp8")
    assert config.exchange(axis=("ep",), capacity=64) == EpConfig(
        num_experts=8, capacity=64, alignment=32, axis=("ep",), **options
    )


@pytest.mark.parametrize(
    "recipe, quantized",
    [
        (None, False),
        ("fp8_delayed", False),
        ("fp8_current", False),
        ("fp8_block", True),
        ("mxfp8", True),
        ("nvfp4", False),
    ],
)
def test_tokens_with_scales_of_their_own_are_dispatched_in_8_bits(recipe, quantized):
    assert dispatches_quantized(MoEConfig(**VALID, recipe=recipe).recipe) is quantized


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="permutation_backend"):
        MoEConfig(**VALID, permutation_backend="triton")
