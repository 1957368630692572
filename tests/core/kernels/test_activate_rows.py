"""The kernels of weighted activations of rows on a GPU, against the formulas in float64."""

import jax
import numpy as np
import pytest

from cases.marks import needs_triton
from core.ops.test_activate_rows import make, oracle
from expertmesh.core.ops.activate_rows import activate_rows_grad_op, activate_rows_op
from expertmesh.core.ops.activation import IN_KERNELS, Activation
from expertmesh.core.testing import relative_error

pytestmark = [pytest.mark.gpu, needs_triton]


def run(activation, *given):
    """value, d_h, d_weights, value again; all of them twice the same. Zeros in rows that may not be written."""
    options = dict(activation=activation, implementation="triton")

    @jax.jit
    def both(h, d, weights, source, sizes):
        value = activate_rows_op(h, weights, source, sizes, **options)
        return value, *activate_rows_grad_op(h, d, weights, source, sizes, **options)

    live = int(given[-1].sum()) if len(given[0]) == 1 else given[0].shape[1]
    first, second = (
        [np.array(x, np.float32 if x.dtype != np.float32 else None) for x in both(*given)]
        for _ in range(2)
    )
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        if i != 2:  # the weights' gradient is written in all rows
            a[:, live:] = b[:, live:] = 0
        np.testing.assert_array_equal(a, b)
    return first


# Widths on both sides of a tile, which two functions stand for.
WIDTHS = [
    *((function, 200) for function in IN_KERNELS),
    *((function, width) for function in ("silu", "quick_gelu") for width in (1416, 8200)),
]


@pytest.mark.parametrize("limit, offset", [(None, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize("function, width", WIDTHS)
def test_formulas(function, width, limit, offset):
    """NaN in every row that holds no token."""
    activation = Activation(function=function, limit=limit, up_offset=offset)
    given = make(activation, (1 if limit else 2, 371), width)
    want, want_h, want_w = oracle(activation, *given)
    out, d_h, d_w, again = run(activation, *given)
    assert relative_error(out, want) < 1e-6
    assert relative_error(again, want) < 1e-6
    assert relative_error(d_w, want_w) < 1e-5
    if function != "relu":  # a difference does not know the slope at 0
        assert relative_error(d_h, want_h) < 1e-5


@pytest.mark.parametrize("width", [200, 1416])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_amax_of_rows(dtype, width):
    """Of what is written in the rows of groups, NaN too; the rest has the same bits as without. Also by Triton's
    interpreter."""
    from expertmesh.core.kernels.triton import activate_rows as kernels

    options = dict(activation=Activation(function="quick_gelu", limit=2.0, up_offset=1.0))
    h, d, *routing = make(options["activation"], (1, 37), width, dtype)
    live, at = int(routing[-1].sum()), int(np.flatnonzero(routing[1][0] >= 0)[2])
    h, d = h.at[0, at, 1, 7].set(np.nan), d.at[0, at, 9].set(np.nan)

    @jax.jit
    def both(h, d, *routing):
        plain = kernels.value(h, *routing, **options), *kernels.grad(h, d, *routing, **options)
        more = kernels.value_and_amax(h, *routing, **options)
        return plain, more, kernels.grad_and_amax(h, d, *routing, **options)

    (out, d_h, d_w, _), (also, amax), (d_h_too, d_w_too, d_amax) = both(h, d, *routing)
    for got, want in ((also, out), (d_h_too, d_h), (d_w_too, d_w)):
        np.testing.assert_array_equal(
            np.asarray(got, np.float32)[0, :live], np.asarray(want, np.float32)[0, :live]
        )
    for got, rows in ((amax, out), (d_amax, d_h)):
        want = np.abs(np.asarray(rows[0, :live], np.float32).reshape(live, -1)).max(axis=1)
        assert np.isnan(want[at]) and np.isfinite(np.delete(want, at)).all() and want.any()
        np.testing.assert_array_equal(np.asarray(got[0, :live]).view(np.float32), want)


@pytest.mark.parametrize("dtype, unit", [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_rounded_once(dtype, unit):
    activation = Activation()
    given = make(activation, (1, 77), 130, dtype)
    want, want_h, want_w = oracle(activation, *given)
    out, d_h, d_w, _ = run(activation, *given)
    for got, exact in ((out, want), (d_h, want_h)):
        error = abs(np.asarray(got, np.float64) - exact)
        assert (error <= 1.02 * unit * abs(exact) + 1e-4).all()
    assert relative_error(d_w, want_w) < 1e-5
