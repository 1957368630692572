"""The down projection's input gradient with that of the activation, where experts and F are sharded."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from core.ops.test_activate_rows import oracle as activations
from expertmesh.core.hlo import axes_of, collectives
from expertmesh.core.linear.gathered_activation import dgrad_activation_grad_op
from expertmesh.core.ops.activation import Activation
from expertmesh.core.testing import magnitudes, relative_error

PARTICIPANTS, GROUPS, ROWS, K, F = 2, 3, 11, 8, 12
SPECS = P("ep"), P("ep", "tp"), P("ep", None, None, "tp"), P("ep"), P("ep"), P("ep")


def make():
    """Padding rows hold NaN; one group is empty; in one group a row holds no token."""
    rng = np.random.default_rng(0)
    sizes = np.array([[4, 0, 5], [2, 6, 1]], np.int32)
    live = np.arange(ROWS) < sizes.sum(1)[:, None]
    source = np.where(live, rng.integers(0, ROWS, live.shape), -1).astype(np.int32)
    source[1, 3] = -1
    dy, h = magnitudes(rng, (*live.shape, K)), magnitudes(rng, (*live.shape, 2, F))
    dy[~live], h[~live] = np.nan, np.nan
    rhs = magnitudes(rng, (PARTICIPANTS * GROUPS, F, K))
    return dy, rhs, h, rng.normal(size=live.shape).astype(np.float32), source, sizes


def expected(dy, rhs, h, weights, source, sizes):
    """d_h, d_weights and a: a row's product after the other in float64, then the oracle of activations."""
    d = np.zeros((*dy.shape[:2], F))
    for p in range(PARTICIPANTS):
        for row, e in enumerate(p * GROUPS + np.repeat(np.arange(GROUPS), sizes[p])):
            d[p, row] = np.float64(rhs[e]) @ np.float64(dy[p, row])
    a, d_h, d_weights = activations(Activation(), h, d, weights, source, sizes)
    return d_h, d_weights, a


def run(*operands):
    return dgrad_activation_grad_op(*operands, activation=Activation())


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_on_shards_of_experts_and_features(kind):
    """No weight and no row moves: the routing weights' gradients alone are summed over F."""
    operands = make()
    axes = {"ep": PARTICIPANTS, "tp": 2}
    devices = jax.devices()[:4]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(operands, SPECS, strict=True)
        ]
        compiled = jax.jit(run).lower(*placed).compile()
        got = compiled(*placed)
    live = np.arange(ROWS) < operands[-1].sum(1)[:, None]
    for x, want in zip(got, expected(*operands), strict=True):
        of_groups = live.reshape(*live.shape, *[1] * (x.ndim - 2))
        assert relative_error(np.where(of_groups, x, 0), want) < 1e-6
    (summed,) = collectives(compiled.as_text())
    assert (summed.kind, summed.shapes) == ("all-reduce", (f"f32[1,{ROWS}]",))
    assert axes_of(summed.groups, axes) == ("tp",)
