"""Grouped GEMMs with a term of low rank: against float64 loops, on one device and where the contraction is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource, global_shard_guard
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_low_rank_op,
    grouped_gemm_low_rank_op,
)
from expertmesh.core.testing import relative_error

# Four participants of ten rows, who share two sets of two experts.
C, K, N, R = 10, 8, (2, 6), 3
SIZES = np.asarray([[4, 3], [0, 10], [2, 0], [5, 5]], np.int32)
OPS = {"forward": grouped_gemm_low_rank_op, "input gradient": grouped_gemm_dgrad_low_rank_op}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")
TOKENS = ("fsdp", "ep")
# Of rows, weight, sizes, u and b, the contraction over tp.
SPECS = {
    "forward": (P(TOKENS, None, "tp"), P("ep", "tp"), P(TOKENS), P(TOKENS), P("ep")),
    "input gradient": (
        P(TOKENS, None, None, "tp"),
        P("ep", None, None, "tp"),
        P(TOKENS),
        P(TOKENS),
        P("ep"),
    ),
}


def operands(which):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4, C, K) if which == "forward" else (4, C, *N))
    b = rng.normal(size=(4, R, *N) if which == "forward" else (4, K, R))
    weight, u = rng.normal(size=(4, K, *N)), rng.normal(size=(4, C, R))
    return tuple(np.asarray(a, np.float32) for a in (rows, weight)), SIZES, u, b


def oracle(which):
    (rows, weight), sizes, u, b = operands(which)
    forward = which == "forward"
    out = np.zeros((4, C, *N) if forward else (4, C, K))
    for p, row in np.ndindex(4, C):
        if row >= sizes[p].sum():
            continue
        e = p % 2 * 2 + int(row >= sizes[p, 0])
        x, w = rows[p, row].astype(np.float64), weight[e].astype(np.float64)
        if forward:
            out[p, row] = np.tensordot(x, w, 1) + np.tensordot(u[p, row], b[e], 1)
        else:
            out[p, row] = np.tensordot(w, x, 2) + b[e] @ u[p, row]
    return out


def given(which):
    (rows, weight), sizes, u, b = operands(which)
    return tuple(
        jnp.asarray(a, None if a is sizes else "float32") for a in (rows, weight, sizes, u, b)
    )


def run(which, *placed, **options):
    op, to = OPS[which], dict(out_dtype=jnp.dtype("float32"), clear_padding=True)
    return jax.jit(lambda *z: op(*z, **to, **options))(*placed)


@pytest.mark.parametrize("which", OPS)
def test_equals_loop(which):
    got = run(which, *given(which))
    assert relative_error(got, oracle(which)) < 1e-6
    assert not np.asarray(got)[2, 2:].any(), "padding rows"


@pytest.mark.parametrize("which", OPS)
def test_the_sum_is_rounded_once(which):
    rows, weight, sizes, u, b = given(which)
    narrow = [x.astype(jnp.bfloat16) for x in (rows, weight, u, b)]
    op = OPS[which]
    got = op(*narrow[:2], sizes, *narrow[2:], out_dtype=jnp.dtype("bfloat16"), clear_padding=True)
    wide = op(*narrow[:2], sizes, *narrow[2:], out_dtype=jnp.dtype("float32"), clear_padding=True)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wide.astype(jnp.bfloat16)))


@pytest.mark.parametrize("mode", ["explicit", "resource", "compiler"])
@pytest.mark.parametrize("which", OPS)
def test_devices_of_a_sum_add_the_term_once(which, mode):
    """tp has two devices, of which each contracts half; a rank of three has no halves."""
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "ep", "tp"), axis_types=(kind,) * 3)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(given(which), SPECS[which], strict=True)
    ]
    options = dict(operand_specs=SPECS[which]) if mode == "resource" else {}
    with global_shard_guard(RESOURCE if mode == "resource" else None):
        got = run(which, *placed, **options)
    assert relative_error(got, oracle(which)) < 1e-6
