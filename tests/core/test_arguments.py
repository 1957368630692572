"""Every public function says of a config, and of a plan, of which type it must be."""

import jax.numpy as jnp
import pytest

from cases.typed import functions_of, refuses_others
from expertmesh import core
from expertmesh.core import PermutePlan, RouterConfig, plan_permute

INSTANCES = {
    RouterConfig: RouterConfig(top_k=2),
    PermutePlan: plan_permute(jnp.zeros((4, 2), jnp.int32), num_experts=2),
}
FUNCTIONS = sorted(functions_of(core, INSTANCES))


def test_functions_are_found():
    assert {"route", "permute", "unpermute", "required_bias_histogram"} <= {*FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_type_is_refused(name):
    refuses_others(getattr(core, name), INSTANCES)


def test_a_config_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"route: config must be of type RouterConfig; got a Deb"):
        core.route(jnp.ones((4, 8)), type("Deb", (), {})())
