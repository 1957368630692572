"""Configs as values of JSON."""

import json

import numpy as np
import pytest

from expertmesh.core import (
    Activation,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    Recipe,
    RouterConfig,
    as_recipe,
)


@pytest.mark.parametrize(
    "config",
    [
        RouterConfig(top_k=4, score_function="sigmoid", num_groups=4, group_topk=2),
        Activation(function="quick_gelu", limit=7.0, up_offset=1.0),
    ],
    ids=str,
)
def test_there_and_back(config):
    text = config.to_json()
    assert json.loads(text) == config.to_dict()
    again = type(config).from_json(text)
    assert again == config and hash(again) == hash(config)


def test_unknown_keys_are_named():
    with pytest.raises(ValueError, match="RouterConfig.from_dict: keys.*also topk, k; remove"):
        RouterConfig.from_dict({"topk": 1, "k": 2})
    with pytest.raises(TypeError, match="Activation.from_dict: fields must be a mapping; got int"):
        Activation.from_json("8")


def test_numbers_of_numpy():
    config = RouterConfig(top_k=np.int64(2), scaling_factor=np.float32(0.5))
    assert (type(config.top_k), type(config.scaling_factor)) == (int, float)
    assert type(Activation(limit=np.float32(7)).limit) is float


@pytest.mark.parametrize("value", ["false", 1, None])
def test_flags_are_flags(value):
    with pytest.raises(TypeError, match="use_pre_softmax must be True or False; got"):
        RouterConfig(top_k=2, use_pre_softmax=value)
    assert RouterConfig(top_k=2, use_pre_softmax=np.bool_(True)).use_pre_softmax is True


def test_a_recipe_of_ones_own_has_no_name():
    class Own(Recipe):
        def formats(self):
            return Float8BlockScaling().formats()

    with pytest.raises(TypeError, match="must be one of fp8_delayed.*Own"):
        Own().to_dict()


def test_recipes_there_and_back():
    recipe = Float8BlockScaling(amax_epsilon=0.5)
    assert as_recipe(recipe.to_dict()) == recipe
    both = Float8CurrentScaling(fp8_format=Format.HYBRID)
    text = json.dumps(both.to_dict())
    assert json.loads(text)["fp8_format"] == "HYBRID" and as_recipe(json.loads(text)) == both
    with pytest.raises(
        ValueError, match="options of Float8BlockScaling must be.*also epsilon; rem"
    ):
        as_recipe({"recipe": "fp8_block", "epsilon": 0.5})
