"""Every public function says of each operand that it must be an array, and of which numbers, before anything else."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import expertmesh.core as core
from expertmesh.core import DelayedScaling, RouterConfig, init_delayed, plan_chunks, plan_permute

X, W, B = jnp.ones((1, 4, 16)), jnp.ones((2, 16, 32)), jnp.ones((2, 32))
SIZES, IDX, COUNTS = jnp.array([[3, 1]]), jnp.zeros((1, 4, 2), jnp.int32), jnp.ones((2, 4), int)
LOGITS, BIAS, MASK = jnp.ones((1, 4, 8)), jnp.zeros(8), jnp.ones((1, 4), bool)
MAP, PLAN = jnp.ones((1, 4, 2), bool), plan_permute(IDX, num_experts=2)
CHUNKS = plan_chunks(jnp.array([3, 1]), jnp.array([1, 0]), num_rows=4)
ROUTER, FORMAT = RouterConfig(top_k=2), core.TensorFormat(dtype="float8_e4m3fn")
BIASED = RouterConfig(top_k=2, score_function="sigmoid")
STATE, DELAYED = init_delayed(DelayedScaling()), DelayedScaling()
MASKED = dict(logits=LOGITS, topk_idx=IDX, coeff=0.1, token_mask=MASK)

# Calls that work: the arrays among the arguments are replaced in turn by what none of them may be.
CALLS = [
    partial(core.activate, X, core.Activation(function="gelu", gated=False)),
    partial(core.activate, X.reshape(4, 2, 8), "silu"),
    partial(core.dense, X, W[0], B[0]),
    partial(core.dense, X, W[0], recipe="fp8_current"),
    partial(core.expert_counts, IDX, num_experts=2),
    partial(core.from_routing_map, MAP, 2, 1),
    partial(core.gated_activation, X.reshape(4, 2, 8), activation="silu"),
    partial(core.gather_weight, W, core.specs.PartitionSpec()),
    partial(core.gathered_gemm, X, W, PLAN),
    partial(core.gemm, X, W[0], B[0]),
    partial(core.grouped_dense, X, W, SIZES, B),
    partial(core.grouped_dense, X, W, SIZES, B, recipe="fp8_current"),
    partial(core.grouped_gemm, X, W, SIZES, B),
    partial(core.grouped_quantize, X, SIZES, FORMAT),
    partial(core.grouped_quantize_delayed, X, SIZES, STATE, DELAYED),
    partial(core.load_balance_loss, **MASKED, tokens_per_expert=BIAS),
    partial(core.local_permute_after_a2a, X[0], COUNTS, 0),
    partial(core.local_unpermute_before_a2a, X[0], COUNTS, 0),
    partial(core.missing_rows, COUNTS, num_rows=4),
    partial(core.move_rows, X[0], CHUNKS, jnp.ones(4)),
    partial(core.move_values, IDX, PLAN),
    partial(core.permute, X, PLAN),
    partial(core.plan_chunks, SIZES, SIZES * 0, num_rows=4),
    partial(core.plan_permute, IDX, num_experts=2),
    partial(core.plan_permute_map, MAP),
    partial(core.probs_to_topk_weights, LOGITS, IDX),
    partial(core.quantile_expert_bias, BIAS, jnp.ones((8, 4)), top_k=2),
    partial(core.quantize, X, FORMAT),
    partial(core.quantize_dbias, X, FORMAT),
    partial(core.quantize_delayed, X, STATE, DELAYED),
    partial(core.quantize_weight, W[0], "fp8_current"),
    partial(core.ragged_params, COUNTS, 0),
    partial(core.required_bias_histogram, LOGITS, BIAS, BIASED, token_mask=MASK),
    partial(core.route, LOGITS, BIASED, expert_bias=BIAS, token_mask=MASK, topk_idx=IDX),
    partial(core.route_map, LOGITS, BIASED, expert_bias=BIAS, token_mask=MASK, topk_idx=IDX),
    partial(core.router_statistics, LOGITS, IDX),
    partial(core.router_z_loss, LOGITS, coeff=0.1, token_mask=MASK),
    partial(core.sequence_balance_loss, **MASKED),
    partial(core.sort_chunks, X[0], SIZES[0], jnp.array([1, 0])),
    partial(core.to_routing_map, IDX, 2),
    partial(core.topk_weights_to_probs, jnp.ones(IDX.shape), IDX, num_experts=2),
    partial(core.unpermute, jnp.ones((1, PLAN.source.shape[1], 3)), PLAN, jnp.ones(IDX.shape)),
    partial(core.update_expert_bias, BIAS, BIAS, 0.1),
]
# Operands that may be QuantizedArrays or, where the result has a dtype of its own, floats of 8 bits.
FACTORS = {"gemm x", "gemm w", "grouped_gemm lhs", "grouped_gemm rhs"}
NARROW = {*FACTORS, "gathered_gemm x", "gathered_gemm rhs"}
# Operands that may be of any numbers.
ANY = {
    *(
        "gather_weight w",
        "local_permute_after_a2a x",
        "local_unpermute_before_a2a y",
        "move_rows x",
    ),
    *("load_balance_loss tokens_per_expert", "move_values values", "permute x", "sort_chunks x"),
    *("quantile_expert_bias histogram", "unpermute y"),
    "update_expert_bias tokens_per_expert",
}


def arguments():
    """(call, operand, whether it may be None) of each array among the arguments."""
    for call in CALLS:
        signature = inspect.signature(call.func)
        bound = signature.bind(*call.args, **call.keywords)
        for operand, value in bound.arguments.items():
            if hasattr(value, "shape"):
                optional = signature.parameters[operand].default is None
                yield pytest.param(call, operand, optional, id=f"{call.func.__name__} {operand}")


def replaced(call, operand, value):
    bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    bound.arguments[operand] = value
    return call.func(*bound.args, **bound.kwargs)


@pytest.mark.parametrize("call, operand, optional", list(arguments()))
def test_what_is_no_array_is_named(call, operand, optional):
    name = call.func.__name__
    given = inspect.signature(call.func).bind(*call.args, **call.keywords).arguments[operand]
    for wrong, got in ((given.tolist(), "a list"), (1.5, "a float"), (None, "None")):
        if wrong is None and optional:
            continue
        with pytest.raises(
            TypeError, match=rf"{name}: {operand} must be an array of .*; got {got}; "
        ):
            replaced(call, operand, wrong)
    if f"{name} {operand}" not in ANY:
        other = np.ones(given.shape, int if jnp.issubdtype(given.dtype, jnp.floating) else float)
        with pytest.raises(
            TypeError, match=rf"{name}: {operand} must be .*got dtype.?{other.dtype}"
        ):
            replaced(call, operand, other)


@pytest.mark.parametrize("call, operand, optional", list(arguments()))
def test_eight_bits_come_quantized_and_only_where_that_is_said(call, operand, optional):
    name = call.func.__name__
    given = inspect.signature(call.func).bind(*call.args, **call.keywords).arguments[operand]
    quantized = core.quantize(jnp.asarray(given, jnp.float32), FORMAT)
    if f"{name} {operand}" not in FACTORS:
        rule = rf"{name}: {operand} must be an array of .*; got a QuantizedArray; .*dequantize"
        with pytest.raises(TypeError, match=rule):
            replaced(call, operand, quantized)
    if f"{name} {operand}" not in ANY | NARROW:
        with pytest.raises(TypeError, match=rf"{name}: {operand} must be .*got dtype=float8"):
            replaced(call, operand, quantized.data)


def test_the_weight_of_an_adapted_may_be_quantized():
    weight = core.quantize(W[0], FORMAT, axis=0)
    want = core.dense(X, core.dequantize(weight))
    np.testing.assert_allclose(core.dense(X, core.Adapted(weight)), want, rtol=1e-6)
    with pytest.raises(TypeError, match="dense: weight must be .*; got a list; "):
        core.dense(X, core.Adapted(W[0].tolist()))


def test_the_calls_are_valid_and_of_every_function_that_takes_an_array():
    for call in CALLS:
        call()
    public = {name for name in core.__all__ if inspect.isfunction(getattr(core, name))}
    others = {
        *("accumulate_gradient", "as_recipe", "autocast", "current_recipe", "current_resource"),
        *("dequantize", "differentiable", "global_shard_guard", "init_delayed", "init_dense_state"),
        *("is_supported", "padded_rows", "padded_rows_sharded", "required_alignment", "shard_rows"),
    }
    assert {call.func.__name__ for call in CALLS} == public - others


def test_arrays_of_numpy_are_arrays():
    np.testing.assert_array_equal(core.gemm(np.asarray(X), np.asarray(W[0])), core.gemm(X, W[0]))


class Variable:
    """As those of Flax: a pytree that JAX takes for an array, with the attributes of one."""

    def __init__(self, value):
        self.value = value

    def __getattr__(self, name):
        return getattr(self.value, name)

    def __jax_array__(self):
        return self.value


jax.tree_util.register_pytree_node(
    Variable, lambda x: ((x.value,), None), lambda _, children: Variable(*children)
)


def test_a_variable_is_an_array():
    for call in (
        lambda x: core.activate(x, core.Activation(function="gelu", gated=False)),
        lambda x: core.router_z_loss(x, coeff=0.1),
    ):
        np.testing.assert_array_equal(call(Variable(LOGITS)), call(LOGITS))


def test_the_weight_of_an_adapted_is_quantized():
    want, got = (core.quantize_weight(w, "fp8_current") for w in (W[0], core.Adapted(W[0])))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


F8, INT = jnp.float8_e4m3fn, jnp.int32


@pytest.mark.parametrize("dtype", [F8, INT], ids=["float8", "int32"])
@pytest.mark.parametrize(
    "call",
    [
        lambda dtype: core.dense(X, W[0], out_dtype=dtype),
        lambda dtype: core.dense(X, W[0], recipe="fp8_current", out_dtype=dtype),
        lambda dtype: core.gemm(X, W[0], out_dtype=dtype),
        lambda dtype: core.grouped_dense(X, W, SIZES, recipe="fp8_current", out_dtype=dtype),
        lambda dtype: core.grouped_gemm(X, W, SIZES, out_dtype=dtype),
        lambda dtype: core.quantize_dbias(X, FORMAT, dbias_dtype=dtype),
    ],
)
def test_a_result_has_floats_of_sixteen_bits_at_least(call, dtype):
    with pytest.raises(
        ValueError, match=rf"floats of at least 16 bits; got \w+={dtype.dtype.name}; "
    ):
        call(dtype)


def test_a_product_of_eight_bits_says_that_they_must_be_quantized():
    """The dtype of the result is then that of the operand."""
    x, plan = X.astype(F8), PLAN
    for call in (lambda: core.gemm(x, W[0]), lambda: core.gathered_gemm(x, W, plan)):
        with pytest.raises(ValueError, match="gemm: .*got out_dtype=float8_e4m3fn; .*quantize"):
            call()
    assert core.gemm(x, W[0].astype(F8), out_dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_a_weight_of_floats_is_gathered_in_floats():
    with pytest.raises(ValueError, match="gather_weight: .*floats.*got dtype=int8"):
        core.gather_weight(W, core.specs.PartitionSpec(), dtype="int8")
