"""The error contract (appendix A): each wrong call raises at once, at trace time too, and names what is wrong."""

import dataclasses
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from jax.export import symbolic_shape
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import (
    DelayedScaling,
    Format,
    Kernel,
    MeshResource,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Op,
    QuantizedArray,
    RouterConfig,
    TensorFormat,
    as_recipe,
    dense,
    dequantize,
    from_routing_map,
    gated_activation,
    gemm,
    global_shard_guard,
    grouped_gemm,
    grouped_quantize,
    init_delayed,
    plan_permute,
    quantize,
    quantize_delayed,
    route,
    shard_rows,
    specs,
    to_routing_map,
    unpermute,
)
from expertmesh.ep import (
    EpConfig,
    agreement,
    balance,
    bootstrap,
    combine,
    dispatch,
    dispatch_weights,
    find_overflow,
    plan_copies,
    prepare,
    raise_overflow,
    recv_capacity,
)
from expertmesh.flax_moe import MoEConfig, init_params, merge_wi, moe

IDX, X = jnp.zeros((8, 2), jnp.int32), jnp.ones((8, 16))
CONFIG = MoEConfig(num_experts=8, top_k=2, expert_dim=4, use_bias=True)
BIASED = dataclasses.replace(CONFIG, score_function="sigmoid", use_expert_bias=True)
SIZES = jnp.array([2, 2])


def params(*without):
    tree = init_params(jax.random.key(0), 16, CONFIG)
    return {name: array for name, array in tree.items() if name not in without}


def on_mesh(x, *spec, sizes=(2, 4), names=("dp", "ep"), kind=AxisType.Explicit):
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def under(resource, function):
    with global_shard_guard(resource):
        return function()


F8 = jnp.float8_e4m3fn
E4M3, E5M2 = TensorFormat(dtype="float8_e4m3fn"), TensorFormat(dtype="float8_e5m2")
MX, NV = MXFP8BlockScaling().formats(), NVFP4BlockScaling().formats()


def eight_bits(format, axis=1):
    """Ones, [32, 32]."""
    data, dtype = jnp.ones((32, 32), format.dtype), "float32"
    if format.block is None:
        return QuantizedArray(data, jnp.ones(()), format=format, dtype=dtype)
    block = (1, format.block[1]) if axis else (format.block[1], 1)
    scale = jnp.ones([32 // b for b in block], format.scale)
    tensor = jnp.ones(()) if format.scale == "float8_e4m3fn" else None
    return QuantizedArray(data, scale, tensor, block=block, format=format, dtype=dtype)


def eight_bit_groups():
    """Ones: rows [1, 32, 32] and weights [2, 32, 32]."""
    return (
        quantize(jnp.ones((1, 32, 32)), MX.x, axis=2),
        quantize(jnp.ones((2, 32, 32)), MX.weight, axis=1, batch_dims=1),
    )


def handle():
    return prepare(IDX, EpConfig(num_experts=4))


def small_handle():
    return prepare(IDX, EpConfig(num_experts=4, capacity=8, overflow="error"))


def quantized():
    return quantize(jnp.ones((8, 32)), MXFP8)


def ep(**changes):
    return EpConfig(**dict(num_experts=8, axis="ep") | changes)


def router(**changes):
    return RouterConfig(**dict(top_k=4, score_function="sigmoid") | changes)


@dataclasses.dataclass(frozen=True)
class Row:
    """A situation of the table: the call, what it raises, and what the message names."""

    situation: str
    call: Callable
    error: type[Exception]
    words: tuple[str, ...]

    def __str__(self):
        return self.situation


def row(situation, call, error, *words):
    return Row(situation, call, error, words)


MISSING_KERNEL = Op(
    "double",
    lambda x: 2 * x,
    "... -> ...",
    kernels=(
        Kernel(
            "fast",
            "cpu",
            jnp.sin,
            unsupported_here=lambda: (
                "the package no_such_package is not installed (`pip install 'x[fast]'`)"
            ),
        ),
    ),
)
RUNS = Op("double", lambda x: 2 * x, "... -> ...", kernels=(Kernel("fast", "cpu", jnp.sin),))
NATIVE = Op(
    "native",
    lambda x: 2 * x,
    "... -> ...",
    kernels=(
        Kernel("elsewhere", "tpu", jnp.sin),
        Kernel("format", "cpu", jnp.sin, unsupported=lambda x: "this device has no such format"),
    ),
)
MXFP8 = MXFP8BlockScaling().formats().x
AUTO_RESOURCE = MeshResource(dp_resource="dp", ep_resource="ep")

TABLE = [
    # Parameters
    row("only wi_bias", lambda: moe(params("wo_bias"), X, CONFIG), ValueError, "missing wo_bias"),
    row("only wo_bias", lambda: moe(params("wi_bias"), X, CONFIG), ValueError, "missing wi_bias"),
    row(
        "no biases under use_bias",
        lambda: moe(params("wi_bias", "wo_bias"), X, CONFIG),
        ValueError,
        *("missing wi_bias, wo_bias", "use_bias=False"),
    ),
    row(
        "no bias under use_expert_bias",
        lambda: moe(params(), X, BIASED),
        ValueError,
        *("expert_bias=None", "use_expert_bias", "zeros"),
    ),
    row(
        "an integer parameter",
        lambda: jax.eval_shape(moe, params() | {"wo": jnp.ones((8, 4, 16), jnp.int32)}, X, CONFIG),
        TypeError,
        *("moe: wo", "floats", "int32", "param_dtype"),
    ),
    row(
        "a parameter of 8 bits",
        lambda: moe(params() | {"wo": jnp.ones((8, 4, 16), F8)}, X, CONFIG),
        TypeError,
        *("moe: wo", "16 bits", "float8_e4m3fn", "recipe"),
    ),
    row("no tree", lambda: moe(None, X, CONFIG), TypeError, "params", "mapping", "NoneType"),
    row(
        "a list among the parameters",
        lambda: moe(params() | {"wi": [1.0]}, X, CONFIG),
        TypeError,
        *("moe: wi must be an array", "list", "asarray"),
    ),
    row(
        "a list of tokens",
        lambda: moe(params(), [[1.0] * 16], CONFIG),
        TypeError,
        *("moe: x must be an array", "list", "asarray"),
    ),
    row(
        "a derivative of the block in forward mode",
        lambda: jax.jvp(lambda x: moe(params(), x, CONFIG).y, (X,), (X,)),
        TypeError,
        *("forward-mode", "jvp"),
    ),
    row(
        "a symbolic number of tokens",
        lambda: jax.eval_shape(
            lambda x: moe(params(), x, CONFIG),
            jax.ShapeDtypeStruct((*symbolic_shape("b"), 16), jnp.float32),
        ),
        ValueError,
        *("x.shape=(b, 16)", "export"),
    ),
    row(
        "experts in 8 bits without a recipe",
        lambda: dataclasses.replace(CONFIG, dtype="float8_e4m3fn"),
        ValueError,
        *("dtype=float8_e4m3fn", "bfloat16", "recipe"),
    ),
    row(
        "experts in 64 bits",
        lambda: dataclasses.replace(CONFIG, dtype="float64"),
        ValueError,
        *("dtype=float64", "float32"),
    ),
    row(
        "parameters in 8 bits",
        lambda: dataclasses.replace(CONFIG, param_dtype="float8_e4m3fn"),
        ValueError,
        *("param_dtype=float8_e4m3fn", "float32"),
    ),
    row(
        "only one split bias",
        lambda: merge_wi(dict(wi_0=X, wi_1=X, wi_0_bias=X)),
        ValueError,
        "missing wi_1_bias",
    ),
    # Divisibility
    row(
        "E % R of the exchange",
        lambda: prepare(on_mesh(IDX), ep(num_experts=6)),
        ValueError,
        *("num_experts=6", "ep_size=4", "'ep'"),
    ),
    row(
        "E % R of the block",
        lambda: under(
            AUTO_RESOURCE,
            lambda: moe(
                init_params(jax.random.key(0), 16, dataclasses.replace(CONFIG, num_experts=6)),
                on_mesh(X, kind=AxisType.Auto),
                dataclasses.replace(CONFIG, num_experts=6),
            ),
        ),
        ValueError,
        *("num_experts=6", "ep_size=4", "'ep'"),
    ),
    row(
        "B % P",
        lambda: prepare(on_mesh(IDX[:6]), ep()),
        ValueError,
        *("(6,)", "'ep'", "[4]"),
    ),
    row("N_out % shards", lambda: shard_rows(41, 10, 3, 4), ValueError, "41", "num_shards=4"),
    row(
        "dim % axis size",
        lambda: specs.local_shape((8, 6), PartitionSpec(None, ("dp", "ep")), dict(dp=2, ep=4)),
        ValueError,
        *("of size 6", "8 shards", "('dp', 'ep')"),
    ),
    row(
        "E % R of the capacity",
        lambda: recv_capacity(6, 2, 8, 4),
        ValueError,
        *("num_experts=6", "ep_size=4"),
    ),
    # Meshes
    row("no mesh", lambda: prepare(IDX, ep()), ValueError, "'ep'", "mesh axes=()"),
    row(
        "no mesh for the block",
        lambda: moe(params(), X, dataclasses.replace(CONFIG, ep_axis="ep")),
        ValueError,
        *("'ep'", "mesh axes=()"),
    ),
    row(
        "axis not in the mesh",
        lambda: prepare(on_mesh(IDX), ep(axis="expert")),
        ValueError,
        *("'expert'", "('dp', 'ep')"),
    ),
    row(
        "spec with an axis that the mesh lacks",
        lambda: specs.constrain(on_mesh(X), PartitionSpec("fsdp")),
        ValueError,
        *("'fsdp'", "('dp', 'ep')"),
    ),
    row(
        "operands on two meshes",
        lambda: gemm(on_mesh(X, "dp"), on_mesh(X.T, "ep", sizes=(4, 2))),
        ValueError,
        *("gemm", "on one mesh", "'dp': 2", "'dp': 4", "device_put"),
    ),
    row(
        "operands of a recipe on two meshes",
        lambda: dense(
            on_mesh(X, "dp"), on_mesh(jnp.ones((16, 16)), sizes=(4, 2)), recipe="fp8_current"
        ),
        ValueError,
        *("gemm: ", "on one mesh", "'dp': 2", "'dp': 4"),
    ),
    row(
        "operands on an Explicit and on an Auto mesh",
        lambda: gemm(on_mesh(X, "dp"), on_mesh(X.T, "ep", kind=AxisType.Auto)),
        ValueError,
        *("gemm", "on one mesh", "Explicit", "Auto"),
    ),
    row(
        "parameters of the block on another mesh",
        lambda: jax.jit(lambda p, x: moe(p, x, CONFIG))(
            {name: on_mesh(p, "ep", sizes=(4, 2)) for name, p in params().items()}, on_mesh(X, "dp")
        ),
        ValueError,
        *("on one mesh", "'dp': 2", "'dp': 4"),
    ),
    row(
        "EP axis of the resource not in the mesh",
        lambda: under(
            MeshResource(ep_resource="expert"),
            lambda: moe(params(), on_mesh(X, kind=AxisType.Auto), CONFIG),
        ),
        ValueError,
        *("'expert'", "('dp', 'ep')"),
    ),
    row(
        "one axis for FSDP and EP",
        lambda: MeshResource(fsdp_resource="x", ep_resource="x"),
        ValueError,
        *("'x'", "fsdp_resource", "ep_resource"),
    ),
    row(
        "Auto axes beside Manual ones, without roles",
        lambda: jax.jit(
            jax.shard_map(
                lambda x: gemm(x, jnp.ones((16, 16))),
                mesh=jax.make_mesh((2, 4), ("pp", "ep"), axis_types=(AxisType.Auto,) * 2),
                in_specs=PartitionSpec("pp"),
                out_specs=PartitionSpec("pp"),
                axis_names={"pp"},
                check_vma=False,
            )
        )(X),
        NotImplementedError,
        *("gemm", "MeshResource", "'ep'"),
    ),
    row(
        "no EP axis in the resource",
        lambda: under(
            MeshResource(dp_resource="dp"),
            lambda: prepare(on_mesh(IDX, kind=AxisType.Auto), EpConfig(num_experts=4)),
        ),
        ValueError,
        *("ep_resource", "axis=()"),
    ),
    # Capacity
    row("no capacity", lambda: ep(capacity=0), ValueError, "capacity=0"),
    row(
        "capacity that is not aligned",
        lambda: ep(capacity=24, alignment=16),
        ValueError,
        *("capacity=24", "alignment=16"),
    ),
    row("alignment", lambda: ep(alignment=12), ValueError, "power of two", "alignment=12"),
    row(
        "capacity factor below 1",
        lambda: dataclasses.replace(CONFIG, capacity_factor=0.5),
        ValueError,
        "capacity_factor=0.5",
    ),
    row(
        "capacity below one participant's tokens where overflow is an error",
        lambda: prepare(IDX, EpConfig(num_experts=4, capacity=4, overflow="error")),
        ValueError,
        *("capacity=4", "tokens=8", "recv_capacity"),
    ),
    row(
        "room for less than level ranks need",
        lambda: balance(IDX, EpConfig(num_experts=4), num_spare=1, capacity_factor=0.5),
        ValueError,
        "capacity_factor=0.5",
    ),
    row(
        "E % R of a plan of copies",
        lambda: plan_copies(jnp.ones(6, jnp.int32), num_ranks=4, num_spare=1),
        ValueError,
        *("shape=(6,)", "num_ranks=4"),
    ),
    row(
        "spare slots of experts that fsdp splits too",
        lambda: dataclasses.replace(CONFIG, num_spare_experts=1, shard_exp_on_fsdp=True),
        ValueError,
        *("num_spare_experts", "shard_exp_on_fsdp=True"),
    ),
    row(
        "spare slots under a recipe with a state of experts",
        lambda: dataclasses.replace(CONFIG, num_spare_experts=1, recipe=DelayedScaling()),
        ValueError,
        *("num_spare_experts", "DelayedScaling"),
    ),
    row(
        "overflow",
        lambda: raise_overflow(find_overflow(small_handle())),
        RuntimeError,
        *("demand=16", "capacity"),
    ),
    row(
        "overflow raised under jit",
        lambda: jax.jit(lambda: raise_overflow(find_overflow(small_handle())))(),
        RuntimeError,
        "outside jit",
    ),
    row(
        "bootstrap under jit",
        lambda: jax.jit(lambda: bootstrap(EpConfig(num_experts=4), X, top_k=2).handle)(),
        RuntimeError,
        "outside jit",
    ),
    # Dtypes
    row(
        "tokens that are no numbers",
        lambda: dispatch(handle(), X.astype(bool)),
        TypeError,
        *("bool", "floating or integer"),
    ),
    row(
        "tokens of the block",
        lambda: moe(params(), IDX, CONFIG),
        TypeError,
        "int32",
        "config.dtype",
    ),
    row("experts' dtype", lambda: dataclasses.replace(CONFIG, dtype=int), ValueError, "dtype"),
    row("float choices", lambda: prepare(X, EpConfig(num_experts=4)), TypeError, "float32"),
    row(
        "float choices of a permutation",
        lambda: plan_permute(X, num_experts=4),
        TypeError,
        "float32",
    ),
    row("integer weights", lambda: dispatch_weights(handle(), IDX), TypeError, "int32"),
    row(
        "integer weights of a permutation",
        lambda: unpermute(jnp.ones((16, 3)), plan_permute(IDX, num_experts=4), IDX),
        TypeError,
        "int32",
    ),
    row("integer logits", lambda: route(IDX, RouterConfig(top_k=1)), TypeError, "int32"),
    row(
        "float group sizes",
        lambda: grouped_gemm(X[:4], jnp.ones((2, 16, 5)), jnp.ones(2)),
        TypeError,
        "float32",
    ),
    # Shapes
    row(
        "K of given choices",
        lambda: route(X, RouterConfig(top_k=2), topk_idx=jnp.zeros((8, 3), int)),
        ValueError,
        *("(8, 3)", "top_k=2"),
    ),
    row("K of the weights", lambda: dispatch_weights(handle(), X), ValueError, "(8, 16)", "(8, 2)"),
    row("tokens of another handle", lambda: dispatch(handle(), X[:7]), ValueError, "(7,)", "(8,)"),
    row(
        "rows of another handle",
        lambda: combine(handle(), jnp.ones((1, 15, 3))),
        ValueError,
        *("(1, 15)", "(1, 16)"),
    ),
    row("contraction", lambda: gemm(X, jnp.ones((4, 5))), ValueError, "(8, 16)", "(4, 5)", "gemm"),
    row(
        "weights of rank 2",
        lambda: grouped_gemm(X[:4], jnp.ones((16, 5)), SIZES),
        ValueError,
        *("(16, 5)", "[E, K, *N]"),
    ),
    row(
        "groups that are not the experts",
        lambda: grouped_gemm(X[:4], jnp.ones((3, 16, 5)), SIZES),
        ValueError,
        *("(3, 16, 5)", "(2,)"),
    ),
    row(
        "contraction of a group",
        lambda: grouped_gemm(X[:4], jnp.ones((2, 7, 5)), SIZES),
        ValueError,
        *("(4, 16)", "(2, 7, 5)"),
    ),
    # Quantization
    row("e5m2 x e5m2", lambda: gemm(eight_bits(E5M2), eight_bits(E5M2)), ValueError, "e4m3fn"),
    row(
        "mixed scaling modes",
        lambda: gemm(eight_bits(E4M3), eight_bits(MX.weight, 0)),
        ValueError,
        *("one kind", "float8_e8m0fnu"),
    ),
    row(
        "one-sided RHT",
        lambda: gemm(eight_bits(NV.x_wgrad), eight_bits(NV.x, 0)),
        ValueError,
        *("Hadamard", "hadamard=True"),
    ),
    row(
        "half a pair",
        lambda: gemm(eight_bits(E4M3), jnp.ones((32, 8))),
        ValueError,
        "QuantizedArray",
        "float32",
    ),
    row(
        "dtype of sums over devices",
        lambda: gemm(eight_bits(E4M3), eight_bits(E4M3), reduce_dtype="int8"),
        ValueError,
        *("gemm", "reduce_dtype=int8"),
    ),
    row(
        "dtype of sums over devices of quantized groups",
        lambda: grouped_gemm(*eight_bit_groups(), SIZES[None], reduce_dtype="int8"),
        ValueError,
        *("grouped_gemm", "reduce_dtype=int8"),
    ),
    row(
        "quantized rows without participants",
        lambda: grouped_gemm(eight_bits(MX.x), eight_bit_groups()[1], SIZES),
        ValueError,
        *("grouped_gemm", "[P, C, K]", "(32, 32)"),
    ),
    row(
        "scales of an operand of another shape",
        lambda: gemm(
            dataclasses.replace(eight_bits(MX.x), data=jnp.ones((32, 64), F8)),
            dataclasses.replace(eight_bits(MX.weight, 0), data=jnp.ones((64, 32), F8)),
        ),
        ValueError,
        *("(32, 2)", "(32, 1)"),
    ),
    row(
        "block that does not divide the contraction",
        lambda: dense(X, jnp.ones((16, 32)), recipe="mxfp8"),
        ValueError,
        *("16", "block, 32"),
    ),
    row(
        "delayed scaling without state",
        lambda: dense(X, jnp.ones((16, 32)), recipe="fp8_delayed"),
        ValueError,
        *("state=None", "init_dense_state"),
    ),
    # Choices among names
    row(
        "activation",
        lambda: gated_activation(jnp.ones((3, 2, 4)), activation="swish"),
        ValueError,
        *("'swish'", "silu", "gelu"),
    ),
    row(
        "activation of the block",
        lambda: dataclasses.replace(CONFIG, activation="swish"),
        ValueError,
        *("'swish'", "silu", "gelu"),
    ),
    row("score", lambda: router(score_function="tanh"), ValueError, "'tanh'", "sqrtsoftplus"),
    row(
        "map format",
        lambda: to_routing_map(IDX, 4, "csr"),
        ValueError,
        *("'csr'", "bytemap", "bitmap"),
    ),
    row(
        "format of a map to read",
        lambda: from_routing_map(jnp.ones((3, 4), bool), 4, 2, "csr"),
        ValueError,
        *("'csr'", "bytemap", "bitmap"),
    ),
    row("transport", lambda: ep(transport="smoke"), ValueError, "'smoke'", "ring", "all_to_all"),
    row(
        "transport of one call",
        lambda: dispatch(handle(), X, transport="smoke"),
        ValueError,
        *("'smoke'", "ring"),
    ),
    row(
        "transport inside a host",
        lambda: ep(transport="two_level:smoke"),
        ValueError,
        *("'two_level:smoke'", "'two_level:' and another of them"),
    ),
    row(
        "two levels over one axis",
        lambda: dispatch(prepare(on_mesh(IDX), ep(transport="two_level")), on_mesh(X)),
        ValueError,
        *("'two_level'", "two mesh axes", "transport='auto'"),
    ),
    row("groups without their number", lambda: ep(group_topk=2), ValueError, "num_groups=None"),
    row(
        "implementation",
        lambda: MISSING_KERNEL(X, implementation="quick"),
        ValueError,
        *("'quick'", "reference", "fast"),
    ),
    row(
        "kernel whose package is missing",
        lambda: MISSING_KERNEL(X, implementation="fast"),
        ImportError,
        *("no_such_package", "pip install 'x[fast]'"),
    ),
    row(
        "kernel of another platform",
        lambda: NATIVE(X, implementation="elsewhere"),
        ValueError,
        *("'elsewhere'", "it runs on tpu", "implementation='auto'"),
    ),
    row(
        "kernel under vmap",
        lambda: jax.vmap(lambda x: RUNS(x, implementation="fast"))(X),
        ValueError,
        *("double: ", "vmap", "implementation='fast'", "'auto'", "jax.lax.map"),
    ),
    row(
        "dtype of sums over devices of an op",
        lambda: RUNS(X, reduce_dtype="int8"),
        ValueError,
        *("double: ", "reduce_dtype=int8", "float32"),
    ),
    row(
        "recipe that the kernel asked for does not take on this device",
        lambda: NATIVE(X, implementation="format"),
        ValueError,
        *("'format'", "this device has no such format"),
    ),
    # The router
    row(
        "bias of other experts",
        lambda: route(X, RouterConfig(top_k=2), expert_bias=jnp.zeros(9)),
        ValueError,
        *("expert_bias", "(9,)"),
    ),
    row(
        "bias of a block of other experts",
        lambda: moe(params(), X, CONFIG, expert_bias=jnp.zeros(9)),
        ValueError,
        *("expert_bias", "(9,)"),
    ),
    row("array as scaling", lambda: router(scaling_factor=jnp.ones(())), TypeError, "scaling"),
    row("one of two group settings", lambda: router(num_groups=2), ValueError, "group_topk=None"),
    row("no groups", lambda: router(num_groups=0, group_topk=1), ValueError, "num_groups=0"),
    row(
        "more groups chosen than there are",
        lambda: router(num_groups=2, group_topk=4),
        ValueError,
        *("group_topk=4", "num_groups=2"),
    ),
    row(
        "K % group_topk",
        lambda: router(num_groups=4, group_topk=3),
        ValueError,
        *("group_topk=3", "top_k=4"),
    ),
    row(
        "E % groups",
        lambda: route(X, router(num_groups=5, group_topk=2)),
        ValueError,
        *("16 experts", "num_groups=5"),
    ),
    row(
        "groups that hold too few experts",
        lambda: route(X, router(num_groups=8, group_topk=1)),
        ValueError,
        *("top_k=4", "num_groups=8", "16 experts"),
    ),
    row("more choices than experts", lambda: route(X, router(top_k=17)), ValueError, "top_k=17"),
    row(
        "a gradient of a gradient",
        lambda: jax.hessian(lambda x: jnp.sin(gemm(x, jnp.ones((16, 2)))).sum())(X),
        NotImplementedError,
        *("gemm", "no derivative", "gradient of a gradient"),
    ),
    # Quantization
    row(
        "a block does not divide the dimension",
        lambda: quantize(X, MXFP8),
        ValueError,
        *("quantize", "dimension 1", "16", "32"),
    ),
    row(
        "a block does not divide the shard",
        lambda: quantize(on_mesh(jnp.ones((4, 96)), None, "dp"), MXFP8),
        ValueError,
        *("quantize", "(4, 96)", "dim=1", "32", "'dp'"),
    ),
    row(
        "a block of grouped rows does not divide the dimension",
        lambda: grouped_quantize(jnp.ones((1, 8, 16)), SIZES[None], MXFP8),
        ValueError,
        *("grouped_quantize", "dimension 2", "16", "32"),
    ),
    row(
        "scales of another shape, to be dequantized",
        lambda: dequantize(dataclasses.replace(quantized(), scale=quantized().scale[:1])),
        ValueError,
        *("dequantize", "(8, 1)", "(1, 1)"),
    ),
    row(
        "no state for delayed scaling",
        lambda: quantize_delayed(X, None, DelayedScaling()),
        TypeError,
        *("quantize_delayed", "DelayedState", "init_delayed"),
    ),
    row(
        "a state of another length",
        lambda: quantize_delayed(
            X, init_delayed(DelayedScaling()), DelayedScaling(amax_history_len=8)
        ),
        ValueError,
        *("quantize_delayed", "8", "(1024,)"),
    ),
    row(
        "both operands in e5m2",
        lambda: MXFP8BlockScaling(fp8_format=Format.E5M2),
        ValueError,
        *("MXFP8BlockScaling", "float8_e5m2"),
    ),
    row("an unknown recipe", lambda: as_recipe("fp9"), ValueError, "'fp9'", "mxfp8, nvfp4"),
    row(
        "no key for random rounding",
        lambda: quantize(X, NVFP4BlockScaling().formats().grad_dgrad),
        ValueError,
        *("quantize", "key=None"),
    ),
    # Data that break a contract, where someone looks
    row(
        "more rows in groups than there are",
        lambda: checked(
            lambda s: grouped_gemm(X[:4], jnp.ones((2, 16, 5)), s, debug=True), SIZES + 1
        ),
        checkify.JaxRuntimeError,
        *("grouped_gemm", "group_sizes must add up to at most 4, the rows; got a sum of 6"),
    ),
    row(
        "more rows in groups of quantized rows than there are",
        lambda: checked(
            lambda s: grouped_gemm(*eight_bit_groups(), s, debug=True), SIZES[None] * 9
        ),
        checkify.JaxRuntimeError,
        *("grouped_gemm", "add up to at most 32", "got a sum of 36"),
    ),
    row(
        "a negative group",
        lambda: checked(
            lambda s: grouped_gemm(X[:4], jnp.ones((2, 16, 5)), s, debug=True), SIZES * -1
        ),
        checkify.JaxRuntimeError,
        *("grouped_gemm", "group_sizes must be at least 0; got a size of -2"),
    ),
    row(
        "expert ids beyond the experts",
        lambda: checked(lambda i: prepare(i, EpConfig(num_experts=4, debug=True)).source, IDX + 9),
        checkify.JaxRuntimeError,
        *("prepare", "num_experts=4", "9"),
    ),
]


# Both of two processes make the call, the second with other options, and it raises in both alike.
TABLE_OF_PROCESSES = [
    row(
        "options that differ between processes, at the first step",
        lambda: raise_overflow(find_overflow(prepare(over_processes(IDX), own_config()))),
        RuntimeError,
        *("same exchange", "got another at rank", "nothing was exchanged", "call bootstrap"),
    ),
    row(
        "options that differ between processes, before the first step",
        lambda: bootstrap(own_config(), over_processes(X), top_k=2),
        ValueError,
        *("same exchange", "alignment=1 in process 0, 2 in process 1", "same script"),
    ),
    row(
        "sizes that differ between processes, before the first step",
        lambda: bootstrap(ep(), over_processes(X), top_k=2 + jax.process_index()),
        ValueError,
        *("same exchange", "top_k=2 in process 0, 3 in process 1", "same script"),
    ),
    row(
        "versions that differ between processes, before the first step",
        lambda: under_own_version(lambda: bootstrap(ep(), over_processes(X), top_k=2)),
        ValueError,
        *("same exchange", "jax=0.0 in process 0, 0.1 in process 1", "same script"),
    ),
]


def under_own_version(call):
    """Each process says that it has another JAX."""
    said = agreement.versions() | {"jax": f"0.{jax.process_index()}"}
    with mock.patch.object(agreement, "versions", lambda: said):
        return call()


def over_processes(x):
    """The major axis goes over them."""
    return on_mesh(x, ("ep", "dp"), sizes=(4, 2), names=("ep", "dp"))


def own_config():
    """Of this process; blocks have a capacity, so that all collectives are of the same sizes."""
    return ep(capacity=16, alignment=1 + jax.process_index(), transport="all_to_all")


def call_each():
    """Runs in each process: what each call raises."""
    errors = []
    for case in TABLE_OF_PROCESSES:
        with pytest.raises(Exception) as info:
            case.call()
        errors.append([info.type.__name__, str(info.value)])
    return errors


@pytest.mark.multiprocess
def test_rows_of_processes(multiprocess):
    first, second = multiprocess(
        "conformance.test_errors:call_each", processes=2, devices=4, timeout=120
    )
    assert first == second
    for case, (error, message) in zip(TABLE_OF_PROCESSES, first, strict=True):
        assert error == case.error.__name__, message
        assert all(word in message for word in case.words), message


def checked(function, operand):
    """Data are checked in a function that `checkify` transforms, and only there."""
    error, _ = jax.jit(checkify.checkify(function))(operand)
    jax.block_until_ready(jax.jit(function)(operand))
    error.throw()


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_row(case: Row):
    assert sum(case.situation == other.situation for other in TABLE) == 1
    with pytest.raises(case.error) as info:
        case.call()
    message = str(info.value)
    assert all(word in message for word in case.words), message


def test_tokens_sharded_on_their_last_dimension_are_resharded_with_a_warning():
    """EP-10; the expected layout is named."""
    made = prepare(on_mesh(IDX, ("dp", "ep")), ep())
    with pytest.warns(RuntimeWarning, match=r"dispatch: .*resharded to P.*\('dp', 'ep'\)"):
        dispatch(made, on_mesh(X, None, "ep"))


def test_an_axis_that_shards_no_work_is_warned_of():
    """On a grouped op; what it shards is gathered."""
    lhs = on_mesh(jnp.ones((4, 8, 16)), "ep", "dp")
    sizes = on_mesh(jnp.ones((4, 2), jnp.int32), "ep")
    with pytest.warns(RuntimeWarning, match="grouped_gemm.*dp"):
        grouped_gemm(lhs, on_mesh(jnp.ones((8, 16, 4)), "ep"), sizes)
