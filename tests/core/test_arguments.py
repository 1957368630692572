"""Every public function says of a config, and of a plan, of which type it must be."""

import jax.numpy as jnp
import numpy as np
import pytest

from cases.typed import functions_of, refuses_others
from expertmesh import core
from expertmesh.core import PermutePlan, RouterConfig, plan_permute
from expertmesh.core.operands import check_numbers

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
    with pytest.raises(TypeError, match=r"route: config must be of type RouterConfig; got Deb"):
        core.route(jnp.ones((4, 8)), type("Deb", (), {})())


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (
            lambda: core.update_expert_bias(jnp.zeros(8), jnp.ones(8), float("nan")),
            ValueError,
            "update_expert_bias: rate must be finite; got rate=nan; pass a step",
        ),
        (
            lambda: core.expert_counts(jnp.zeros((4, 2), jnp.int32), num_experts=-8),
            ValueError,
            "expert_counts: num_experts must be at least 1; got num_experts=-8",
        ),
        (
            lambda: RouterConfig(top_k=2, scaling_factor=float("inf")),
            ValueError,
            "RouterConfig: scaling_factor must be finite; got scaling_factor=inf; take 1",
        ),
        (
            lambda: core.gemm(jnp.ones((4, 8)), jnp.ones((8, 4)), out_dtype="flaot32"),
            TypeError,
            "gemm: out_dtype must be a dtype; got out_dtype='flaot32'; pass one of jax.numpy's",
        ),
        (
            lambda: core.gemm(jnp.ones((4, 8)), jnp.ones((8, 4)), reduce_dtype="flaot32"),
            TypeError,
            "gemm: reduce_dtype must be a dtype; got reduce_dtype='flaot32'",
        ),
        (
            lambda: core.quantile_expert_bias(jnp.zeros(4), jnp.ones((4, 8), int), top_k=5),
            ValueError,
            "quantile_expert_bias: top_k must be at most the number of experts; got top_k=5, 4",
        ),
        (
            lambda: core.quantile_expert_bias(jnp.zeros(4), jnp.ones((4, 8), int), top_k=0),
            ValueError,
            "quantile_expert_bias: top_k must be at least 1; got top_k=0",
        ),
        (
            lambda: core.required_bias_histogram(
                jnp.ones((4, 8)),
                jnp.zeros(8),
                RouterConfig(top_k=2, score_function="sigmoid"),
                num_bins=2.5,
            ),
            TypeError,
            "required_bias_histogram: num_bins must be an int; got num_bins=2.5",
        ),
        (
            lambda: core.load_balance_loss(
                jnp.ones((4, 8)), jnp.zeros((4, 2), jnp.int32), coeff=np.ones(2)
            ),
            ValueError,
            r"load_balance_loss: coeff must be a number or a scalar array; got coeff.shape=\(2,\)",
        ),
        (
            lambda: core.as_recipe({"recipe": ["fp8_block"]}),
            ValueError,
            r"as_recipe: a name must be one of fp8_delayed, .*; got \['fp8_block'\]",
        ),
        (
            lambda: core.as_recipe({"name": "fp8_block"}),
            ValueError,
            "as_recipe: a dict must have a name under 'recipe'; got name; add for example",
        ),
        (
            lambda: core.expert_counts(np.full((4, 2), 2**32 + 1), num_experts=8),
            ValueError,
            "topk_idx must be of numbers that int32 holds; got 4294967297 to 4294967297; pass",
        ),
        (
            lambda: core.grouped_quantize(
                jnp.ones((1, 8, 16)),
                jnp.zeros((1, 0), jnp.int32),
                core.TensorFormat(dtype="float8_e4m3fn"),
                axis=2,
            ),
            ValueError,
            r"grouped_quantize: there must be a group; got group_sizes \(1, 0\)",
        ),
    ],
)
def test_numbers_and_dtypes(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_numbers_of_numpy_are_numbers():
    idx = jnp.zeros((4, 2), jnp.int32)
    assert core.expert_counts(idx, num_experts=np.int64(8)).shape == (8,)
    check_numbers("f", "", least=0, x=np.float32(0.5), n=np.int32(2))
    for value, kind in ((np.float32("nan"), ValueError), (np.bool_(True), TypeError)):
        with pytest.raises(kind, match="f: x must be"):
            check_numbers("f", "", x=value)
