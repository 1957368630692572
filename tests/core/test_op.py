"""Op and differentiable: choice of implementation, errors, retraces, cotangents."""

import dataclasses
import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import Kernel, MeshResource, Op, differentiable, gemm, global_shard_guard
from expertmesh.core.op import leaf_specs
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.rule import Query
from expertmesh.core.support import distribution_unsupported


def _double(x, *, offset=0.0):
    return 2 * x + offset


def _double_fast(x, *, offset=0.0):
    return 2 * x + offset + 1000  # told apart from the reference by its value


def _op(**kernel):
    return Op(
        "double", _double, "... -> ...", kernels=(Kernel("fast", "cpu", _double_fast, **kernel),)
    )


X = jnp.arange(4.0)


def test_auto_takes_the_kernel_of_the_platform_and_reference_does_not():
    np.testing.assert_array_equal(_op()(X), _double_fast(X))
    np.testing.assert_array_equal(
        _op()(X, implementation="fast", offset=3.0), _double_fast(X, offset=3.0)
    )
    np.testing.assert_array_equal(_op()(X, implementation="reference"), _double(X))


def test_a_kernel_of_another_platform_is_not_taken():
    op = Op("double", _double, "... -> ...", kernels=(Kernel("fast", "cuda", _double_fast),))
    np.testing.assert_array_equal(op(X), _double(X))


def test_a_missing_package_warns_under_auto_and_raises_by_name():
    op = _op(unsupported_here=lambda: "no no-such-package (`pip install no-such-package`)")
    with pytest.warns(UserWarning, match="no-such-package.*pip install no-such-package"):
        np.testing.assert_array_equal(op(X), _double(X))
    with pytest.raises(ImportError, match="pip install no-such-package"):
        op(X, implementation="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(X, implementation="reference")


@pytest.mark.parametrize(
    "requirement, problem", [("jax>=0.11", None), ("jax>=99.1", "99.1.*is in")]
)
def test_a_distribution_that_is_too_old_is_missing(requirement, problem):
    found = distribution_unsupported(requirement)
    assert re.search(problem, found) if problem else found is None


def test_a_kernel_may_refuse_operands():
    op = _op(
        unsupported=lambda x, offset=0.0: (
            None if x.shape[0] % 4 == 0 else f"length {x.shape[0]} % 4"
        )
    )
    np.testing.assert_array_equal(op(X), _double_fast(X))
    np.testing.assert_array_equal(op(X[:3]), _double(X[:3]))
    with pytest.raises(ValueError, match="length 3"):
        op(X[:3], implementation="fast")


def test_a_kernel_of_other_operands_does_not_exist():
    """It is neither a choice, nor missing, nor does it refuse."""

    def is_long(x):
        return x.size > 2

    op = _op(takes=is_long, unsupported_here=lambda: "a_package_nobody_has")
    with pytest.raises(ValueError, match="one of auto, reference; got implementation='fast'"):
        op(X[:1], implementation="fast")
    np.testing.assert_array_equal(op(X[:1]), _double(X[:1]))
    with pytest.raises(ImportError, match="a_package_nobody_has"):
        op(X, implementation="fast")


def test_unknown_implementation_lists_the_choices():
    with pytest.raises(ValueError, match="auto, reference, fast; got implementation='quick'"):
        _op()(X, implementation="quick")


def test_kernel_results_vary_like_operands_in_shard_map():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(lambda x: _op()(x), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    np.testing.assert_array_equal(f(jnp.arange(8.0)), _double_fast(jnp.arange(8.0)))


def test_nested_vmap_of_a_summed_op():
    op = Op("sum", lambda x, y: jnp.einsum("tk,tk->k", x, y), "t k, t k -> k", summed=("t",))
    x, y = np.random.default_rng(0).normal(size=(2, 2, 3, 5, 4)).astype(np.float32)
    out = jax.vmap(jax.vmap(op, (0, None)), (0, 0))(x, y[:, 0])
    np.testing.assert_allclose(out, np.einsum("abtk,atk->abk", x, y[:, 0]), rtol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_vmap_runs_the_reference_unless_a_kernel_is_named(implementation):
    np.testing.assert_array_equal(
        jax.vmap(lambda x: _op()(x, implementation=implementation))(X[:, None]), _double(X[:, None])
    )
    with pytest.raises(ValueError, match="double: .*vmap.*implementation='fast'"):
        jax.vmap(jax.vmap(lambda x: _op()(x, implementation="fast")))(X[:, None])


def test_auto_axes_in_a_partly_manual_region_need_a_resource():
    mesh = jax.make_mesh((2, 4), ("pp", "ep"), axis_types=(AxisType.Auto,) * 2)
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    f = jax.jit(
        jax.shard_map(
            gemm, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P("pp"), axis_names={"pp"}
        )
    )
    with pytest.raises(
        NotImplementedError, match=r"Manual \['pp'\] and Auto \['ep'\].*MeshResource"
    ):
        f(x, w)
    with global_shard_guard(MeshResource(ep_resource="ep", pp_resource="pp")):
        np.testing.assert_array_equal(f(x, w), np.full((8, 16), 16.0))


def test_explicit_beside_auto_axes_needs_a_resource():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("a")))
    with pytest.raises(NotImplementedError, match=r"Auto \['b'\]"):
        gemm(x, jnp.ones((16, 16)))


def test_a_resource_must_name_axes_of_the_mesh():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("a")))
    with (
        global_shard_guard(MeshResource(ep_resource="expert")),
        pytest.raises(ValueError, match=r"\['expert'\], mesh axes \('a',\)"),
    ):
        gemm(x, jnp.ones((16, 16)))


def test_a_resource_without_any_mesh_is_harmless():
    with global_shard_guard(MeshResource(ep_resource="ep")):
        np.testing.assert_array_equal(
            gemm(jnp.ones((2, 4)), jnp.ones((4, 3))), np.full((2, 3), 4.0)
        )


def test_repeated_eager_calls_trace_once():
    traces = []

    def reference(x, *, offset):
        traces.append(offset)
        return x + offset

    op = Op("traced", reference, "... -> ...")
    f = differentiable(
        lambda x, *, offset: (op(x, offset=offset), x), lambda r, ct, *, offset: (ct,)
    )
    for _ in range(3):
        f(X, offset=1.0)
        op(X, offset=2.0)
    assert traces == [1.0, 2.0]


def test_cotangents_have_the_dtype_of_their_primals():
    f = differentiable(lambda x, i: (x * 2, i), lambda i, ct: (ct.astype(jnp.float32) * 2, None))
    x = jnp.ones(3, jnp.bfloat16)
    _, pull = jax.vjp(f, x, jnp.arange(3))
    dx, di = pull(jnp.ones(3, jnp.bfloat16))
    assert dx.dtype == jnp.bfloat16
    assert di.dtype == jax.dtypes.float0


def test_explicit_cotangents_have_the_spec_of_their_primals():
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"))
    whole = NamedSharding(mesh, P(None, None))
    f = differentiable(
        lambda x: (x * x, x), lambda x, ct: (jax.sharding.reshard(2 * x * ct, whole),)
    )
    x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P(("fsdp", "ep"))))
    dx = jax.jit(jax.grad(lambda x: f(x).sum()))(x)
    assert dx.sharding.spec == P(("fsdp", "ep"), None)
    np.testing.assert_array_equal(dx, 2 * np.ones((16, 8)))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.grad(lambda x: jnp.sum(jax.grad(lambda y: jnp.sum(jnp.sin(f(y))))(x))),
        lambda f: jax.jit(jax.hessian(lambda x: jnp.sum(jnp.sin(f(x))))),
    ],
)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_gradients_of_gradients_name_the_op(derivative, on_mesh):
    """Also where the op is its reference inside a shard_map, which JAX could differentiate."""
    x = jnp.ones((2, 3))
    if on_mesh:
        mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Explicit,))
        x = jax.device_put(x, NamedSharding(mesh, P("a")))
    w = jnp.ones((3, 4))
    assert jax.grad(lambda x: jnp.sum(gemm(x, w)))(x).shape == x.shape
    with pytest.raises(NotImplementedError, match="^gemm: the op itself has no derivative"):
        derivative(lambda x: gemm(x, w))(x)


def test_integers_carry_their_empty_tangents_through_an_op():
    """Choices that a differentiable op returned go into ops of integers, beside floats that are held."""
    count = Op("count", lambda i, x: (i + 1, x * i), "..., ... -> ..., ...")
    pair = differentiable(lambda x: ((x * 2, jnp.int32([1, 2])), None), lambda _, d: (2 * d[0],))

    def loss(x):
        y, i = pair(x)
        j, scaled = count(i, jnp.ones(2))
        return jnp.sum(y * j * scaled)

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.ones(2)), [4, 12])


def _weighted(x, weight, bias):
    y = x if weight is None else x * weight[..., None]
    return jnp.sum(y, axis=-2) if bias is None else jnp.sum(y, axis=-2) + bias


class TestAnAbsentOperand:
    """None stands for it in the reference and in kernels; rule, roles and specs are those of the others."""

    OP = Op(
        "weighted_sum",
        _weighted,
        "b t d, b t, d -> b d",
        summed=("t",),
        roles="tokens sequence ., tokens sequence, . -> tokens .",
        parameter=2,
    )

    @staticmethod
    def operands(weight, bias):
        rng = np.random.default_rng(0)
        x = rng.integers(-9, 9, (8, 4, 3)).astype(np.float32)
        w = rng.integers(-9, 9, (8, 4)).astype(np.float32) if weight else None
        return x, w, rng.integers(-9, 9, 3).astype(np.float32) if bias else None

    @staticmethod
    def want(x, w, b):
        return np.einsum("btd,bt->bd", x, np.ones(x.shape[:2]) if w is None else w) + (
            0 if b is None else b
        )

    @pytest.mark.parametrize("weight", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("kind", [None, "Explicit", "Auto"])
    def test_on_meshes(self, kind, weight, bias):
        x, w, b = self.operands(
            weight, bias and kind is None
        )  # a bias is no part of a sum over shards
        if kind is not None:
            mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, kind),) * 2)
            x = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
        got = jax.jit(lambda *given: self.OP(*given))(x, w, b)
        np.testing.assert_array_equal(got, self.want(np.asarray(x), w, b))

    def test_under_vmap_and_with_specs(self):
        x, w, b = self.operands(True, False)
        batched = jax.vmap(lambda x, w: self.OP(x, w, None, operand_specs=(None, None, None)))
        np.testing.assert_array_equal(
            batched(np.stack([x, 2 * x]), np.stack([w, w])),
            np.stack([self.want(x, w, b), 2 * self.want(x, w, b)]),
        )

    def test_the_parameters_place(self):
        x, w, b = self.operands(True, True)
        assert self.OP.of_leaves((x, None, b)).parameter == 1
        assert self.OP.of_leaves((x, w, None)).parameter is None
        assert self.OP.of_leaves((x, w, None)).sharding.replace(" ", "") == "btd,bt->bd"

    def test_a_kernel_gets_none(self):
        seen = []

        def launch(x, weight, bias):
            seen.append((weight, bias))
            return _weighted(x, weight, bias)

        def unsupported(x, weight, bias):
            return None if weight is None and bias is not None else "planted"

        kernel = Kernel("planted", jax.default_backend(), launch, unsupported=unsupported)
        op = dataclasses.replace(self.OP, kernels=(kernel,))
        x, _, b = self.operands(False, True)
        np.testing.assert_array_equal(op(x, None, b), self.want(x, None, b))
        assert len(seen) == 1 and seen[0][0] is None
        with pytest.raises(ValueError, match="planted"):
            op(x, None, None, implementation="planted")

    def test_it_is_traced_once(self):
        traced = []

        def reference(x, weight):
            traced.append(x.shape)
            return x

        op = Op("traced", reference, "a, a -> a")
        for _ in range(3):
            op(jnp.ones(3), None)
        assert len(traced) == 1


class TestAnOperandOfSeveralArrays:
    """Terms, roles and specs of a QuantizedArray's arrays follow from those of its data."""

    OP = Op(
        "rows_times_weight",
        lambda x, w, sizes: None,
        "p c k, e k n..., p g -> p c n...",
        roles="tokens . ., experts fsdp ., tokens . -> tokens . .",
        parameter=1,
    )
    BLOCKS = "blocks", (2, 64, 2), None, (1, 1, 64)
    GROUPS = "a scale of each group", (2, 3), None, ()
    EXPERTS = "a scale of each expert", (3,), None, ()
    TENSOR = "a scale of the tensor", (), None, ()
    TWO_LEVELS = "two levels", (2, 64, 8), (2, 3), (1, 1, 16)
    WANT = (
        (BLOCKS, "p c k, p c k", "tokens . ., tokens . .", [P("a", "b"), P("a", "b")]),
        (GROUPS, "p c k, p g", "tokens . ., tokens .", [P("a", "b"), P("a", None)]),
        (EXPERTS, "p c k, p", "tokens . ., tokens", [P("a", "b"), P("a")]),
        (TENSOR, "p c k, ()", "tokens . ., ()", [P("a", "b"), P()]),
        (
            TWO_LEVELS,
            "p c k, p c k, p g",
            "tokens . ., tokens . ., tokens .",
            [P("a", "b"), P("a", "b"), P("a", None)],
        ),
    )

    @staticmethod
    def quantized(_, scale, tensor_scale, block):
        of = None if tensor_scale is None else jnp.ones(tensor_scale)
        return QuantizedArray(jnp.ones((2, 64, 128)), jnp.ones(scale), of, block=block)

    @pytest.mark.parametrize("row", WANT, ids=lambda row: row[0][0])
    def test_what_follows_for_its_arrays(self, row):
        made, terms, roles, specs = row
        q = self.quantized(*made)
        operands = q, jnp.ones((3, 128, 4)), jnp.ones((2, 3), jnp.int32)
        op = self.OP.of_leaves(operands)
        assert op.sharding.replace(" ", "") == f"{terms},ekn_0,pg->pcn_0".replace(" ", "")
        assert op.roles.startswith(f"{roles}, experts fsdp .")
        assert op.parameter == len(specs)
        assert leaf_specs(operands, (P("a", "b"), None, P())) == (*specs, None, P())

    @pytest.mark.parametrize("k, split", [(512, "a"), (384, None), (250, None)])
    def test_no_block_is_cut(self, k, split):
        """Two shards of 512 hold two blocks of 128 each; of 384 each would hold one and a half."""
        op = Op("scaled", lambda q: q.data, "t k -> t k")
        q = QuantizedArray(jnp.ones((4, k)), jnp.ones((4, -(-k // 128))), block=(1, 128))
        op, shapes = op.of_leaves((q,)), [x.shape for x in jax.tree.leaves(q)]
        plan = op.make_plan(Query((P(None, "a"),) * 2, tuple(shapes), None, {"a": 2}))
        assert plan.operand_specs == (P(None, split),) * 2
        assert plan.result_specs == (P(None, split),)

    @pytest.mark.parametrize("kind", ["Explicit", "Auto"])
    def test_on_a_mesh_and_under_vmap(self, kind):
        """Each shard gets its data with their scales; the reference gets QuantizedArrays."""
        op = Op("wide", lambda q, y: q.data * jnp.repeat(q.scale, 4, 1) + y, "t k, t k -> t k")
        rng = np.random.default_rng(0)
        data, scale = (rng.integers(1, 9, s).astype(np.float32) for s in ((8, 16), (8, 4)))
        y = rng.integers(1, 9, (8, 16)).astype(np.float32)
        want = data * np.repeat(scale, 4, axis=1) + y
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, kind),) * 2)
        data, scale, y = (
            jax.device_put(x, NamedSharding(mesh, P("a", "b"))) for x in (data, scale, y)
        )
        q = QuantizedArray(data, scale, block=(1, 4))
        np.testing.assert_array_equal(jax.jit(op)(q, y), want)
        twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (q, y))
        got = jax.vmap(op)(*jax.tree.map(np.asarray, twice))
        np.testing.assert_array_equal(got, [want, 4 * (want - y) + 2 * np.asarray(y)])


class TestAResultOfSeveralArrays:
    """Of blocks along the last dimension, and the sum of those of a row if it is asked for."""

    OP = Op(
        "halved",
        lambda x, *, sums: (
            QuantizedArray(x, x[..., ::4], None, None, (*[1] * (x.ndim - 1), 4)),
            x.sum(-1) if sums else None,
        ),
        "... k -> ... k, ...",
        whole=("k",),
        results_like=lambda x, *, sums: (
            QuantizedArray(x, x, None, None, (*[1] * (x.ndim - 1), 4)),
            x if sums else None,
        ),
    )

    @pytest.mark.parametrize("sums", [False, True])
    @pytest.mark.parametrize("kind", ["Explicit", "Auto"])
    def test_on_a_mesh_and_under_vmap(self, kind, sums):
        x = np.arange(96.0, dtype=np.float32).reshape(3, 4, 8)
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, kind),) * 2)
        placed = jax.device_put(x, NamedSharding(mesh, P(None, "a", "b")))
        got = jax.jit(partial(self.OP, sums=sums))(placed)
        batched = jax.vmap(partial(self.OP, sums=sums))(x)
        for (q, total), block in ((got, (1, 1, 4)), (batched, (1, 4))):
            assert q.block == block and (total is not None) == sums
            np.testing.assert_array_equal(q.data, x)
            np.testing.assert_array_equal(q.scale, x[..., ::4])
        if sums:
            np.testing.assert_array_equal(got[1], x.sum(-1))
        if kind == "Explicit":
            assert jax.typeof(got[0].scale).sharding.spec == P(None, "a", None)
