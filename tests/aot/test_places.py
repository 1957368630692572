"""What kernels of GEMMs with activations read at an index: rows of tokens, of which each has several places."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.kernels.device import Device
from expertmesh.core.ops.activation import Activation
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved

pytestmark = [pytest.mark.aot, needs_triton]
TOKENS, PLACES, ROWS, K, F = 90, 8, 1024, 64, 256


@pytest.fixture
def row_map() -> RowMap:
    """Some rows hold no token."""
    place = np.random.default_rng(0).integers(0, TOKENS * PLACES, (1, ROWS)).astype(np.int32)
    place[:, ::7] = -1
    return RowMap(jnp.zeros((1, TOKENS, PLACES), jnp.int32), jnp.asarray(place))


@pytest.fixture
def given(monkeypatch) -> dict:
    """What the launches of a test are given; they run nothing."""
    from expertmesh.core.kernels import gathered_activation as kernels

    found: dict = {}

    def forward(tokens, index, rhs, weights, group_sizes, **options):
        found.update(rows=tokens, index=np.asarray(index))
        return jnp.zeros((ROWS, 2, F)), jnp.zeros((ROWS, F))

    def grad(dy, index, rhs, h, weights, group_sizes, **options):
        found.update(rows=dy, index=np.asarray(index))
        return h, h[:, 0], jnp.zeros((1, ROWS))

    monkeypatch.setattr(kernels.cuda, "launch", forward)
    monkeypatch.setattr(kernels.cuda, "launch_grad", grad)
    return found


def _zeros(*shape):
    return jnp.zeros(shape, jnp.bfloat16)


def test_the_up_projection_reads_rows_of_tokens(row_map, given):
    from expertmesh.core.kernels import gathered_activation as kernels

    operands = _zeros(2, K, 2, F), jnp.asarray([[600, 424]], jnp.int32), jnp.ones((1, ROWS))
    lhs, options = Moved(_zeros(1, TOKENS, K), row_map), dict(activation=Activation())
    inspect.unwrap(kernels._run)(lhs, *operands, **options, keeps_h=True, device=Device())
    np.testing.assert_array_equal(given["index"], np.asarray(row_map.source[0]) // PLACES)


@pytest.mark.parametrize("gathers", [True, False], ids=["tokens", "rows"])
def test_the_gradient_reads_rows_of_tokens(gathers, row_map, given):
    """Of rows side by side the index says only which of them hold a token."""
    from expertmesh.core.kernels import gathered_activation as kernels

    dy = Moved(_zeros(1, TOKENS, K), row_map) if gathers else _zeros(1, ROWS, K)
    operands = _zeros(2, F, K), _zeros(1, ROWS, 2, F), jnp.ones((1, ROWS)), row_map.source
    sizes, options = jnp.asarray([[600, 424]], jnp.int32), dict(activation=Activation())
    run = inspect.unwrap(kernels.dgrad_activation_grad)
    run(dy, *operands, sizes, **options, device=Device())
    assert given["rows"].shape == ((TOKENS, K) if gathers else (ROWS, K))
    place = np.asarray(row_map.source[0])
    np.testing.assert_array_equal(given["index"] >= 0, place >= 0)
    if gathers:
        np.testing.assert_array_equal(given["index"], place // PLACES)
