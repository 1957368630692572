"""Every public function says of a config, and of a handle, of which type it must be."""

import jax.numpy as jnp
import pytest

from cases.typed import functions_of, refuses_others
from expertmesh import ep
from expertmesh.ep import EpConfig, Handle, Overflow, find_overflow, prepare

CONFIG = EpConfig(num_experts=4)
HANDLE = prepare(jnp.zeros((1, 4, 2), jnp.int32), CONFIG)
INSTANCES = {EpConfig: CONFIG, Handle: HANDLE, Overflow: find_overflow(HANDLE)}
FUNCTIONS = sorted(functions_of(ep, INSTANCES))


def test_functions_are_found():
    assert {"prepare", "balance", "dispatch", "combine", "raise_overflow"} <= {*FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_type_is_refused(name):
    refuses_others(getattr(ep, name), INSTANCES)
