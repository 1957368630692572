"""Op.results_like: what an op says of its results is what its reference returns, for all formats of all recipes."""

import itertools
import sys
from functools import partial

import jax
import pytest

import expertmesh.flax_moe  # noqa: F401  the packages whose ops are looked for
from expertmesh.core import RECIPES, Float8BlockScaling, Op, grouped_quantize, quantize
from expertmesh.core.linear.quantized_activation import (
    quantized_activation,
    quantized_activation_grad,
)
from expertmesh.core.ops.activation import Activation
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.activate_quantize import activate_grad_quantize, activate_quantize
from expertmesh.core.quantization.grouped_requantize import grouped_requantize
from expertmesh.core.quantization.quantize_moved import quantize_moved
from expertmesh.core.quantization.quantize_rows import Moved, grouped_quantize_both

P, C, F, G = 2, 256, 384, 3
# Those of the recipes' defaults, and float32 scales of blocks.
RECIPES_USED = [*(cls() for cls in RECIPES.values()), Float8BlockScaling(power_2_scale=False)]
FORMATS = list(dict.fromkeys(f for recipe in RECIPES_USED for f in vars(recipe.formats()).values()))
OF_ROWS = [format for format in FORMATS if format.block is None or format.block[0] == 1]
ONE_KERNEL = [format for format in OF_ROWS if format.block and format.dtype != "float4_e2m1fn"]


def each(formats):
    return pytest.mark.parametrize("format", formats, ids=lambda f: "-".join(map(str, vars(f).values())))  # fmt: skip


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


GROUPS, KEY = array(P, G, dtype="int32"), array(2, dtype="uint32")
ROUTING = dict(weights=array(P, C, dtype="float32"), row_source=array(P, C, dtype="int32"))


@pytest.fixture
def checked(monkeypatch):
    """A set of the names of the ops that are called, and of which this is checked."""
    names, call = set(), Op.__call__

    def checked_call(op, *operands, operand_specs=None, **options):
        if op.results_like:
            check(op, operands, options)
            names.add(op.name)
        return call(op, *operands, operand_specs=operand_specs, **options)

    monkeypatch.setattr(Op, "__call__", checked_call)
    return names


def check(op, operands, options):
    said = op.results_like(*operands, **options)
    want = jax.eval_shape(partial(op.reference, **options), *operands)
    # The structure of a QuantizedArray has its block, format and dtype.
    assert jax.tree.structure(said) == jax.tree.structure(want)
    for like, leaf in zip(jax.tree.leaves(said), jax.tree.leaves(want), strict=True):
        assert (like.shape, like.dtype) == (leaf.shape, leaf.dtype)


def multipliers(format, *shape):
    """Given only without blocks."""
    return [{}] if format.block else [{}, dict(multiplier=array(*shape, dtype="float32"))]


@each(FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_one_array(format, dtype, checked):
    for batch_dims in (0, 1):
        for given in multipliers(format, *(4,)[:batch_dims]):
            call = partial(quantize, format=format, across=-2, batch_dims=batch_dims)
            jax.eval_shape(call, array(4, C, F, dtype=dtype), key=KEY, **given)
    assert checked == {"quantize"}


@each(OF_ROWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_rows(format, dtype, checked):
    for shape in ((P, C, F), (P, C, 2, F)):
        for given in multipliers(format, P, G):
            for axis in (1, -1):
                call = partial(grouped_quantize, format=format, axis=axis)
                jax.eval_shape(call, array(*shape, dtype=dtype), GROUPS, key=KEY, **given)
            call = partial(grouped_quantize_both, formats=(format, format))
            jax.eval_shape(call, array(*shape, dtype=dtype), GROUPS, keys=(KEY, KEY), **given)
    assert checked == {"grouped_quantize"}


@each([format for format in FORMATS if not format.block])
def test_of_rows_that_are_made_with_a_scale_per_group(format, checked):
    h, d_out, both = array(P, C, 2, F), array(P, C, F), (format, format)
    of = dict(formats=both, activation="silu")
    jax.eval_shape(partial(activate_quantize, **of), h, GROUPS, **ROUTING)
    jax.eval_shape(partial(activate_grad_quantize, **of), h, d_out, GROUPS, **ROUTING)
    of_groups = partial(grouped_quantize, format=format)
    rows = jax.eval_shape(of_groups, array(P, C, 128), GROUPS)
    of_weight = partial(quantize, format=format, batch_dims=1)
    up, down = (jax.eval_shape(of_weight, array(G, *dims)) for dims in ((128, 2, F), (F, 128)))
    call = dict(activation=Activation(), format=format)
    routing = ROUTING["weights"], ROUTING["row_source"]
    jax.eval_shape(partial(quantized_activation, **call), rows, up, GROUPS, *routing)
    jax.eval_shape(partial(quantized_activation_grad, **call), rows, down, h, *routing, GROUPS)
    row_map = RowMap(array(P, C // 4, 4, dtype="int32"), array(P, C, dtype="int32"))
    of_tokens = partial(quantize_moved, format=format)
    tokens = jax.eval_shape(of_tokens, Moved(array(P, C // 4, 128), row_map), GROUPS)
    jax.eval_shape(partial(quantized_activation, **call), tokens, up, GROUPS, *routing)
    jax.eval_shape(partial(quantized_activation_grad, **call), tokens, down, h, *routing, GROUPS)
    of_rows = {"quantized_activation", "quantized_activation_grad", "quantize_moved"}
    of_both = {"quantize", "grouped_quantize", "activate_quantize", "activate_grad_quantize"}
    assert checked == of_both | of_rows


@each(ONE_KERNEL)
@pytest.mark.parametrize("routing", [{}, ROUTING], ids=["", "weighted"])
def test_of_rows_that_are_made(format, routing, checked):
    h, d_out, both = array(P, C, 2, F), array(P, C, F), (format, format)
    jax.eval_shape(
        partial(activate_quantize, formats=both, activation="silu"), h, GROUPS, **routing
    )
    call = partial(activate_grad_quantize, formats=both, activation="silu")
    jax.eval_shape(call, h, d_out, GROUPS, **routing)
    q = jax.eval_shape(partial(grouped_quantize, format=format), d_out, GROUPS)
    jax.eval_shape(partial(grouped_requantize, format=format), q, GROUPS)
    tokens = jax.eval_shape(partial(quantize, format=format), array(P, C // 4, F))
    row_map = RowMap(array(P, C // 4, 4, dtype="int32"), array(P, C, dtype="int32"))
    jax.eval_shape(partial(grouped_requantize, format=format), Moved(tokens, row_map), GROUPS)
    of_weight = partial(quantize, format=format, axis=1, batch_dims=1)
    weight = jax.eval_shape(of_weight, array(G, F, 2, C))
    call = partial(quantized_activation, activation=Activation(), format=format)
    of_rows = ROUTING["weights"], row_map.source
    for rows, narrow in itertools.product((Moved(tokens, row_map), q), (False, True)):
        jax.eval_shape(partial(call, narrow=narrow), rows, weight, GROUPS, *of_rows)
    names = {"activate_quantize", "activate_grad_quantize", "grouped_requantize", "move_requantize"}
    assert checked == {"grouped_quantize", "quantize", "quantized_activation", *names}
    others = {"quantize_square", "quantized_activation_grad", "quantize_moved"}
    assert all_names() == others | checked


def all_names() -> set[str]:
    """Of core's ops that have `results_like`."""
    core = "expertmesh.core."
    modules = [module for name, module in sys.modules.items() if name.startswith(core)]
    values = [value for module in modules for value in vars(module).values()]
    return {op.name for op in values if isinstance(op, Op) and op.results_like}
