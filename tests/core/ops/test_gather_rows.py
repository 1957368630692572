"""gather_rows against a loop in float64, in every mesh mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from expertmesh.core.hlo import collectives
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.core.ops.gather_rows import gather_rows, gather_values

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}


def oracle(src, index, weight=None):
    out = np.zeros((*index.shape[:2], src.shape[-1]))
    for p, n, k in np.ndindex(index.shape):
        if 0 <= index[p, n, k] < src.shape[1]:
            out[p, n] += (1 if weight is None else weight[p, n, k]) * src[p, index[p, n, k]]
    return out


def data(P, S, N, K, D, dtype="float32", seed=0):
    """Rows of very different magnitude; indices just outside [0, S) too."""
    rng = np.random.default_rng(seed)
    src = rng.normal(size=(P, S, D)) * 2.0 ** rng.integers(-9, 9, (P, S, 1))
    index = rng.integers(-2, S + 2, (P, N, K)).astype(np.int32)
    weight = rng.normal(size=(P, N, K)).astype(np.float32)
    return jnp.asarray(src, dtype), jnp.asarray(index), jnp.asarray(weight)


def exact_data(*sizes):
    """Weights are powers of two, so that a fused multiply-add rounds like a product and a sum."""
    src, index, weight = data(*sizes)
    return src, index, jnp.exp2(jnp.round(weight))


def assert_close(actual, expected, dtype="float32"):
    """Relative to the norm of each row, so that small rows count as much as large ones."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error = np.linalg.norm(actual - expected, axis=-1)
    assert np.all(error <= TOLERANCE[dtype] * np.linalg.norm(expected, axis=-1) * 4 + 1e-30), error


def f64(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 7, 5, 3, 4), (3, 130, 67, 2, 33)])
def test_equals_loop(sizes, weighted, dtype):
    src, index, weight = data(*sizes, dtype)
    weight = weight if weighted else None
    out = gather_rows(src, index, weight)
    assert out.dtype == src.dtype
    expected = oracle(f64(src), np.asarray(index), weight if weight is None else f64(weight))
    if dtype == "float32":
        # Terms may cancel: the bound is on the terms, not on their sum.
        scale = oracle(
            abs(f64(src)), np.asarray(index), weight if weight is None else abs(f64(weight))
        )
        assert np.all(abs(f64(out) - expected) <= 1e-6 * scale)
    else:
        assert_close(out, expected.astype(np.float32), dtype)


@pytest.mark.parametrize(
    "sizes", [(2, 0, 3, 2, 4), (2, 3, 0, 2, 4), (2, 3, 4, 0, 4), (0, 3, 4, 2, 4), (2, 3, 4, 1, 0)]
)
@pytest.mark.parametrize("weighted", [True, False])
def test_empty_sizes(sizes, weighted):
    P, S, N, K, D = sizes
    index = jnp.zeros((P, N, K), jnp.int32)
    out = gather_rows(jnp.ones((P, S, D)), index, jnp.ones((P, N, K)) if weighted else None)
    assert out.shape == (P, N, D) and out.dtype == jnp.float32
    np.testing.assert_array_equal(out, oracle(np.ones((P, S, D)), np.asarray(index)))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("K", [1, 2])
def test_nan_stays_where_it_is_indexed(K, weighted):
    """Row 0 of src is NaN, and so are the weights of indices that do not exist."""
    src, _, weight = data(2, 6, 5, K, 3)
    index = jnp.asarray([[[0, 6], [1, -1], [6, -1], [-1, 3], [4, 5]]] * 2, jnp.int32)[..., :K]
    poisoned = src.at[:, 0].set(jnp.nan)
    exists = (index >= 0) & (index < 6)
    out = gather_rows(poisoned, index, jnp.where(exists, weight, jnp.nan) if weighted else None)
    assert np.isnan(out[:, 0]).all()
    expected = oracle(f64(src), np.asarray(index), f64(weight) if weighted else None)
    assert_close(out[:, 1:], expected[:, 1:])
    np.testing.assert_array_equal(out[:, 2], 0)


def test_accumulates_in_float32():
    src = jnp.asarray([[[256.0], [1.0]]], jnp.bfloat16)
    index = jnp.asarray([[[0] + [1] * 8]], jnp.int32)
    assert gather_rows(src, index)[0, 0, 0] == 264  # in bfloat16, 256 + 1 = 256


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool", "float8_e4m3fn", "float16"])
def test_copies_any_dtype(dtype):
    src = jnp.asarray(np.random.default_rng(1).integers(0, 2, (2, 5, 3)), dtype)
    index = jnp.asarray([[[4], [-1], [0], [5]]] * 2, jnp.int32)
    out = gather_rows(src, index)
    assert out.dtype == src.dtype
    wide = np.asarray(src, np.float32)
    zero = np.zeros_like(wide[:, 0])
    expected = np.stack([wide[:, 4], zero, wide[:, 0], zero], axis=1)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


def test_values():
    values = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(np.float32)
    index = np.random.default_rng(3).integers(-3, 15, (2, 5, 2)).astype(np.int32)
    padded = np.concatenate([values.reshape(2, 12), np.zeros((2, 1), np.float32)], 1)
    safe = np.where((index < 0) | (index >= 12), 12, index)
    expected = np.stack([padded[p][safe[p]] for p in range(2)])
    np.testing.assert_array_equal(gather_values(jnp.asarray(values), jnp.asarray(index)), expected)


def test_vmap_scan_remat_equal_loop():
    stacks = [data(2, 7, 5, 3, 4, seed=s) for s in range(3)]
    src, index, weight = (jnp.stack(x) for x in zip(*stacks, strict=True))
    expected = np.stack([gather_rows(*s) for s in stacks])
    np.testing.assert_array_equal(jax.vmap(gather_rows)(src, index, weight), expected)
    _, scanned = jax.lax.scan(
        lambda c, s: (c, jax.checkpoint(gather_rows)(*s)), 0, (src, index, weight)
    )
    np.testing.assert_array_equal(scanned, expected)
    shared = jax.vmap(gather_rows, in_axes=(None, 0, 0))(src[0], index, weight)
    np.testing.assert_array_equal(
        shared, np.stack([gather_rows(src[0], i, w) for i, w in zip(index, weight, strict=True)])
    )


SPECS = [
    (PartitionSpec("dp"), PartitionSpec("dp")),
    (PartitionSpec(("dp", "tp")), PartitionSpec(("dp", "tp"))),
    (PartitionSpec("dp", None, "tp"), PartitionSpec("dp")),
    (PartitionSpec(None, None, "tp"), PartitionSpec(None, "dp")),
]


MODES = ["auto", "explicit", "resource"]


@covering("specs, mode", SPECS, MODES, covers=list(zip(SPECS, MODES * 2, strict=False)))
def test_sharding_changes_no_value_and_adds_no_collective(specs, mode):
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    operands = exact_data(8, 6, 10, 3, 8)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, (specs[0], specs[1], specs[1]), strict=True)
    ]
    roles = MeshResource(dp_resource=specs[0][0]) if mode == "resource" else None
    with global_shard_guard(roles):
        compiled = jax.jit(gather_rows).lower(*placed).compile()
    np.testing.assert_array_equal(compiled(*placed), gather_rows(*operands))
    # A resource has no role for the features of rows: only its own layout is free of cost.
    if mode != "resource" or (specs[0][0] and len(specs[0]) == 1):
        assert not collectives(compiled.as_text())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_source_rows_on_several_devices_are_gathered(mode, weighted):
    """An index is one of all rows, wherever they lie."""
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    operands = exact_data(2, 8, 10, 3, 8)[: 3 if weighted else 2]
    specs = PartitionSpec("dp", "tp"), PartitionSpec("dp"), PartitionSpec("dp")
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=False)
    ]
    roles = MeshResource(dp_resource="dp", cp_resource="tp") if mode == "resource" else None
    with global_shard_guard(roles):
        np.testing.assert_array_equal(jax.jit(gather_rows)(*placed), gather_rows(*operands))


def test_manual():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    operands = exact_data(8, 6, 10, 3, 8)
    spec = PartitionSpec("dp")
    function = jax.shard_map(gather_rows, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    compiled = jax.jit(function).lower(*operands).compile()
    np.testing.assert_array_equal(compiled(*operands), gather_rows(*operands))
    assert not collectives(compiled.as_text())


@pytest.mark.parametrize(
    "src, index, weight, words",
    [
        ((3, 4), (3, 2, 1), None, "src.shape=(3, 4)"),
        ((2, 3, 4), (3, 2, 1), None, "same P"),
        ((2, 3, 4), (2, 5, 1), (2, 5, 2), "weight.shape=(2, 5, 2)"),
    ],
)
def test_errors(src, index, weight, words):
    weight = None if weight is None else jnp.ones(weight)
    with pytest.raises(ValueError) as error:
        gather_rows(jnp.ones(src), jnp.zeros(index, jnp.int32), weight)
    assert words in str(error.value) and str(error.value).startswith("gather_rows: ")
