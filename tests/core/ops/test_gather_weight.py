"""gather_weight inside shard_map against the same GEMM outside, which gathers by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource, gather_weight, global_shard_guard, grouped_gemm
from expertmesh.core.hlo import collectives
from expertmesh.core.testing import magnitudes, relative_error

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

TOKENS = P(("fsdp", "ep"))


def data(dtype=np.float32):
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(6, [0.4, 0.4, 0.2], size=4)[:, :2].astype(np.int32)
    lhs, dy = (magnitudes(rng, (4, 6, n)).astype(dtype) for n in (8, 12))
    return lhs, magnitudes(rng, (4, 8, 12)), sizes, dy


def oracle(lhs, rhs, sizes, dy):
    """out and the weight's gradient in float64, one row at a time; participant p has the experts of set p % 2."""
    lhs, rhs, dy = (x.astype(np.float64) for x in (lhs, rhs, dy))
    out, drhs = np.zeros(dy.shape), np.zeros(rhs.shape)
    for p in range(4):
        for row, g in enumerate(np.repeat([0, 1], sizes[p])):
            out[p, row] = lhs[p, row] @ rhs[p % 2 * 2 + g]
            drhs[p % 2 * 2 + g] += np.outer(lhs[p, row], dy[p, row])
    return out, drhs


def inside(mesh, spec, axes, dtype=None):
    """A function of global arrays whose body sees shards over `axes`."""
    kept = lambda s: P(*(tuple(a for a in np.atleast_1d(e) if a in axes) for e in s))  # noqa: E731
    tokens, weight = kept(TOKENS), kept(spec)

    def body(lhs, rhs, sizes, dy):
        def function(rhs):
            return grouped_gemm(
                lhs, gather_weight(rhs, P(*spec_without_ep(spec)), dtype=dtype), sizes
            )

        out, pull = jax.vjp(function, rhs)
        return out, *pull(dy)

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(tokens, weight, tokens, tokens),
            out_specs=(tokens, weight),
            axis_names=set(axes),
            check_vma=False,
        )
    )


def spec_without_ep(spec):
    return [tuple(a for a in np.atleast_1d(e) if a not in (None, "ep")) or None for e in spec]


def put(mesh, operands, spec):
    specs = (TOKENS, spec, TOKENS, TOKENS)
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)]


LAYOUTS = {"E": P(("ep", "fsdp")), "K": P("ep", "fsdp"), "N": P("ep", None, "fsdp")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_axes_manual(layout):
    """Every dimension, the experts' too; what crosses is one gather and one reduce-scatter of a shard."""
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "ep"), axis_types=(AxisType.Auto,) * 2, devices=_devices()
    )
    spec, operands = LAYOUTS[layout], data()
    placed = put(mesh, operands, spec)
    program = inside(mesh, spec, ("fsdp", "ep")).lower(*placed).compile()
    for got, want in zip(program(*placed), oracle(*operands), strict=True):
        assert relative_error(got, want) < 1e-6
    shard = {"E": "f32[1,8,12]", "K": "f32[2,4,12]", "N": "f32[2,8,6]"}[layout]
    found = [(c.kind, c.shapes) for c in collectives(program.as_text())]
    assert sorted(found) == [("all-gather", ("f32[2,8,12]",)), ("reduce-scatter", (shard,))]


def test_partly_manual():
    """fsdp is Manual, ep is the op's own: it slices the experts."""
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "ep"), axis_types=(AxisType.Auto,) * 2, devices=_devices()
    )
    operands, spec = data(), LAYOUTS["K"]
    with global_shard_guard(MeshResource(fsdp_resource="fsdp", ep_resource="ep")):
        results = inside(mesh, spec, ("fsdp",))(*put(mesh, operands, spec))
    for got, want in zip(results, oracle(*operands), strict=True):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda k: k.name)
def test_outside_it_does_nothing(kind):
    mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=(kind,) * 2, devices=_devices())
    w = jax.device_put(np.ones((4, 8)), NamedSharding(mesh, P("fsdp")))
    assert gather_weight(w, P("fsdp")) is w
    assert gather_weight(w := jnp.ones(3), P("anything")) is w


def test_the_copy_is_narrow_and_the_gradient_is_not():
    """257 ones on each device: the sum over devices is exact in float32 only."""
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "ep"), axis_types=(AxisType.Auto,) * 2, devices=_devices()
    )
    lhs = np.ones((4, 257, 4), np.float16)
    operands = lhs, np.full((2, 4, 6), 1 + 2**-14, np.float32), np.full((4, 1), 257, np.int32)
    operands = *operands, np.ones((4, 257, 6), np.float16)
    placed = put(mesh, operands, LAYOUTS["K"])
    program = inside(mesh, LAYOUTS["K"], ("fsdp", "ep"), np.float16).lower(*placed).compile()
    out, gradient = program(*placed)
    np.testing.assert_array_equal(out, 4)
    np.testing.assert_array_equal(gradient, np.full((2, 4, 6), 514))
    found = {(c.kind, c.shapes) for c in collectives(program.as_text())}
    assert found == {("all-gather", ("f16[1,4,6]",)), ("reduce-scatter", ("f32[1,2,6]",))}


def test_unknown_axes():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=_devices())
    function = jax.shard_map(
        lambda w: gather_weight(w, P("data")), mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp")
    )
    with pytest.raises(ValueError, match="axis='data'.*'fsdp'"):
        function(jnp.ones(8))


def _devices():
    return jax.devices()[:4]
