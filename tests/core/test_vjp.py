"""Where a gradient is wanted, what is run where none is, and which cotangents there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import differentiable
from expertmesh.core.vjp import at_rest, not_differentiable


@pytest.mark.parametrize(
    "kinds, placed, spec, want",
    [
        (("Auto", "Auto"), P("a"), None, None),
        (("Auto", "Auto"), P(), P("a", "b"), P("a", "b")),
        (("Explicit", "Explicit"), P("a", "b"), None, P("a", "b")),
        (("Explicit", "Explicit"), P("a"), P("b", "a"), P("a", None)),  # the type is right
        (("Explicit", "Auto"), P("a"), P("b"), P(("a", "b"), None)),
        (("Explicit", "Auto"), P(None, "a"), P("b"), P("b", "a")),
    ],
)
def test_a_gradient_is_wanted_where_its_primal_is(kinds, placed, spec, want):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=tuple(AxisType[k] for k in kinds))
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, placed))
    assert at_rest(x, spec) == want


def test_the_value_is_computed_alone_where_no_derivative_is_asked_for():
    called = []

    def named(name, function):
        def call(*operands, **options):
            called.append(name)
            return function(*operands, **options)

        return call

    square = differentiable(
        named("fwd", lambda x: (x * x, x)),
        named("bwd", lambda x, d: (2 * x * d,)),
        named("value", lambda x: x * x),
    )
    assert square(3.0) == 9 and called == ["value"]
    assert jax.grad(square)(3.0) == 6 and called[1:] == ["fwd", "bwd"]


def test_a_part_of_an_operand_without_a_cotangent():
    """Its gradient is zeros, that of the other part has its dtype; also of a part that is a tree, or absent."""
    scale = differentiable(
        lambda x, w: (x * w["by"] * w["fixed"][0], (x, w)),
        lambda kept, d: (
            None,
            {"by": d * kept[0] * kept[1]["fixed"][0], "fixed": None, "no": None},
        ),
    )
    w = {"by": jnp.bfloat16(3), "fixed": (jnp.float32(2), jnp.ones(2)), "no": None}
    d_x, d_w = jax.grad(scale, argnums=(0, 1))(jnp.float32(5), w)
    assert d_x == 0 and d_w["by"] == 10 and d_w["by"].dtype == jnp.bfloat16
    assert d_w["fixed"][0] == 0 and d_w["fixed"][1].shape == (2,) and d_w["no"] is None


def test_a_repeated_call_is_not_traced_again():
    traced = []

    def forward(x, *, factor):
        traced.append(factor)
        return factor * x, None

    scale = differentiable(forward, lambda _, d, *, factor: (factor * d,))
    for factor in (2.0, 2.0, 3.0, 2.0):
        np.testing.assert_array_equal(scale(jnp.ones(2), factor=factor), [factor] * 2)
    assert traced == [2.0, 3.0]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_cotangent_made_of_constants(kind):
    """It has no mesh in its type, as its primal has."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType[kind],))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("a")))
    total = differentiable(lambda x: (x.sum(), None), lambda _, d: (jnp.ones(4),))
    for grad in (jax.grad(total), jax.jit(jax.grad(total))):
        with jax.set_mesh(mesh):
            d = grad(x)
        np.testing.assert_array_equal(d, np.ones(4))
        assert kind == "Auto" or d.sharding.spec == P("a")


def test_operands_are_trees_of_floats_and_integers_or_absent():
    """Integers and what is absent have no cotangent; the others have those of the rule."""

    def forward(tree, absent, *, factor):
        assert absent is None
        return factor * tree["x"] * tree["i"], tree

    def backward(tree, d, *, factor):
        return {"x": factor * d * tree["i"], "i": np.zeros(2, jax.dtypes.float0)}, None

    scale = differentiable(forward, backward)
    tree = {"x": jnp.ones(2), "i": jnp.array([2, 3])}
    d = jax.grad(lambda tree: scale(tree, None, factor=2.0).sum(), allow_int=True)(tree)
    np.testing.assert_array_equal(d["x"], [4, 6])
    assert d["i"].dtype == jax.dtypes.float0


def test_what_is_not_differentiable_says_the_remedy():
    x = jnp.ones(2)
    assert not_differentiable(x, "quantize: use dense") is x
    with pytest.raises(
        NotImplementedError, match="^quantize: it has no derivative; .*; use dense, or stop_"
    ):
        jax.grad(lambda x: not_differentiable(x, "quantize: use dense").sum())(x)
