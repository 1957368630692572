"""Which kernels in Triton a GPU gets from the public functions, and that all of them fit: the table beside this file.

What a function launches is traced as for a GPU of each compute capability where no kernel in CUDA C++ runs, and
compiled for it.
"""

import ast
import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest

import expertmesh.core
from aot.test_kernels import SHARED_LIMIT, _assemble, _stack_bytes
from cases.marks import needs_triton
from expertmesh.core import (
    Float8CurrentScaling,
    NVFP4BlockScaling,
    RouterConfig,
    _jax,
    as_recipe,
    dequantize,
    gathered_gemm,
    permute,
    plan_permute,
    quantize,
    route,
    unpermute,
)
from expertmesh.core.ops.activation import activate
from expertmesh.core.quantization.grouped_requantize import grouped_requantize
from expertmesh.ep.copy_plan import LEVELS, plan_op
from expertmesh.flax_moe import LoRA, MoEConfig, lora_shapes, moe, with_lora
from expertmesh.flax_moe.params import param_shapes

pytestmark = [pytest.mark.aot, needs_triton]

TABLE = pathlib.Path(__file__).with_name("architectures.txt")
FOLDER = pathlib.Path(expertmesh.core.__file__).parent / "kernels/triton"
E, K, T, D, F = 8, 2, 1024, 512, 256


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def block(recipe, dtype="bfloat16"):
    config = MoEConfig(
        num_experts=E, top_k=K, expert_dim=F, recipe=recipe, use_bias=recipe is None, dtype=dtype,
        aux_loss_coeff=0.01, z_loss_coeff=0.001,
    )  # fmt: skip
    params = {n: struct(*s, dtype="float32") for n, s in param_shapes(D, config).items()}

    def loss(params, x):
        out = moe(params, x, config)
        return out.y.astype(jnp.float32).sum() + out.aux_loss + out.z_loss

    return jax.value_and_grad(loss, argnums=(0, 1)), (params, struct(1, T, D, dtype=dtype))


def adapted(recipe):
    """A block with adapters: its thin GEMMs."""
    config = MoEConfig(num_experts=E, top_k=K, expert_dim=F, recipe=recipe)
    lora = LoRA(rank=16, alpha=16)
    shapes = lora_shapes(D, config, lora)
    parts = jax.tree.map(lambda s: struct(*s), shapes, is_leaf=lambda s: isinstance(s, tuple))
    params = {n: struct(*s) for n, s in param_shapes(D, config).items()}

    def loss(adapters, x, params):
        return moe(with_lora(params, adapters, lora), x, config).y.astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1)), (parts, struct(1, T, D), params)


def permuted(x, w, idx, weights):
    plan = plan_permute(idx, num_experts=E)

    def both(x, w, weights):
        return gathered_gemm(x, w, plan), unpermute(permute(x, plan), plan, weights)

    results, pull = jax.vjp(both, x, w, weights)
    return pull(results)


def quantized(name):
    format, of_weight = as_recipe(name).formats().x, as_recipe(name).formats().weight

    def run(x, w, sizes):
        q, weight = quantize(x, format), quantize(w, of_weight, axis=1, across=2, batch_dims=1)
        return dequantize(q), dequantize(weight), grouped_requantize(q, sizes, format)

    return run, (struct(1, T, D), struct(E, D, F), struct(1, E, dtype="int32"))


def routed(logits):
    weights = functools.partial(route, config=RouterConfig(top_k=K))
    return jax.value_and_grad(lambda logits: weights(logits).topk_weights.sum())(logits)


def probe(x):
    from expertmesh.core.kernels.triton import probe

    return probe.copy(x)


def programs():
    """Functions and the types of their operands: together they launch each kernel somewhere."""
    yield block(None)
    yield adapted(None)
    yield adapted("fp8_block")
    yield block(NVFP4BlockScaling(disable_stochastic_rounding=True))
    yield block(Float8CurrentScaling(use_split_accumulator=True))
    for recipe in ("fp8_current", "fp8_block", "mxfp8"):
        yield block(recipe)
        if recipe != "fp8_current":
            yield quantized(recipe)
    choices = (struct(T, K, dtype=dtype) for dtype in ("int32", "float32"))
    yield permuted, (struct(T, D), struct(E, D, F), *choices)
    few = functools.partial(plan_permute, num_experts=E)
    yield few, (struct(64, K, dtype="int32"),)
    yield (
        (lambda h: jax.vjp(lambda h: activate(h, "silu"), h)[1](h[:, :, 0])),
        (struct(1, T, 2, F),),
    )
    copies = functools.partial(plan_op, num_spare=2, least_rows=0, levels=LEVELS)
    yield copies, (struct(8, 16, dtype="int32"),)
    yield routed, (struct(T, 64, dtype="float32"),)
    yield probe, (struct(128, dtype="float32"),)


def name_of(kernel) -> str:
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"


@pytest.fixture
def fitting(request, monkeypatch):
    """The kernels that the programs launch on such a GPU, each compiled for it."""
    from expertmesh.core.kernels import device, launcher

    arch, found, tried, problems = request.param, set(), set(), []

    def compiled(
        *operands, kernel, out_type, grid, num_warps=4, num_stages=3, backend_options=None, **constants
    ):  # fmt: skip
        del grid
        given = dict(zip(kernel.arg_names, operands, strict=False))
        constants |= {name: None for name, x in given.items() if x is None}
        types = [launcher.type_name(x) for x in given.values() if x is not None]
        types += map(launcher.type_name, jax.tree.leaves(out_type))
        options = dict(backend_options or {})
        key = kernel, *types, *constants.items(), num_warps, num_stages, *options.items()
        if key not in tried:
            made = _assemble(kernel, types, constants, num_warps, num_stages, arch, **options)
            spilled, shared = _stack_bytes(made.asm["cubin"]), made.metadata.shared
            # With a term of low rank ptxas of Triton 3.9 leaves 8 bytes in memory.
            if spilled > 8 * bool(constants.get("R")) or shared > SHARED_LIMIT[arch]:
                problems.append((name_of(kernel), spilled, shared, constants))
            tried.add(key)
            found.add(name_of(kernel))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

    jax.clear_caches()
    monkeypatch.setattr(launcher, "triton_call", compiled)
    monkeypatch.setattr(device, "nvrtc", lambda: None)
    monkeypatch.setattr(_jax, "platform", lambda operands: "cuda")
    monkeypatch.setattr(_jax, "compute_capability", lambda: arch / 10)
    for function, operands in programs():
        jax.eval_shape(lambda *x, function=function: function(*x), *operands)
    yield arch, found, problems
    jax.clear_caches()


def table() -> dict[str, dict[int, str]]:
    """kernel -> compute capability, times ten -> "fits", "other" (another kernel does that), "refused"."""
    head, *lines = TABLE.read_text().splitlines()
    archs = [round(10 * float(word)) for word in head.split()[1:]]
    rows = (line.split() for line in lines)
    return {name: dict(zip(archs, words, strict=True)) for name, *words in rows}


@pytest.mark.parametrize("fitting", SHARED_LIMIT, indirect=True)
def test_the_kernels_of_a_gpu(fitting):
    arch, found, problems = fitting
    assert not problems, "spilled registers, or shared memory that the GPU lacks"
    assert found == {name for name, of in table().items() if of[arch] == "fits"}


def test_the_table_has_all_kernels_and_gpus():
    launched = {
        f"{path.stem}.{name.id}"
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
        for name in [ast.Name(node.name)]
        if node.name.endswith("_kernel") or node.name == "_kernel"
    }
    assert table().keys() == launched
    assert all(of.keys() == SHARED_LIMIT.keys() for of in table().values())


def _is_jit(decorator) -> bool:
    return ast.unparse(decorator) == "triton.jit"
