"""The kernels that are limited by memory assemble for the GPUs that they are for: no spills, wide loads and stores."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from aot.test_kernels import _stack_bytes
from cases.marks import needs_triton

pytestmark = [pytest.mark.aot, needs_triton]
NAMES = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32", "uint8": "*u8"}


@pytest.fixture(params=[90, 100])
def compiled(request, monkeypatch):
    """What the launches of this test compile to; they run nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from expertmesh.core.kernels import launcher

    found = []

    def call(*operands, kernel, out_type, grid, num_warps, **constants):
        del grid
        arrays = [*operands, *jax.tree.leaves(out_type)]
        types = [NAMES[jnp.dtype(x.dtype).name] for x in arrays]
        signature = dict(zip(kernel.arg_names, types, strict=False))
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
        source = ASTSource(
            kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned
        )
        target = GPUTarget("cuda", request.param, 32)
        options = {"num_warps": num_warps, "enable_fp_fusion": True}
        found.append(triton.compile(source, target=target, options=options))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

    monkeypatch.setattr(launcher, "triton_call", call)
    return found


def _trace(function, *types):
    # A function of its own, since a trace is kept.
    jax.eval_shape(
        lambda *operands: function(*operands),
        *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types),
    )


def _check(found, *, wide=True):
    assert found
    for kernel in found:
        assert _stack_bytes(kernel.asm["cubin"]) == 0, f"{kernel.name}: registers spill"
        assert not wide or "st.global.v4" in kernel.asm["ptx"], kernel.name


T, K, E = 4096, 8, 256
IDS = ((1, T, K), "int32")


@pytest.mark.parametrize("D, dtype", [(4096, "bfloat16"), (7168, "bfloat16"), (4096, "float32")])
def test_rows(D, dtype, compiled):
    from expertmesh.core.kernels.triton import gather_rows, permute

    tokens, rows, source = ((1, T, D), dtype), ((1, T * K, D), dtype), ((1, T * K), "int32")
    weights = ((1, T, K), "float32")
    _trace(gather_rows.gather, tokens, ((1, T * K, 1), "int32"))
    _trace(gather_rows.gather, rows, IDS)
    _trace(gather_rows.gather, rows, IDS, weights)
    _trace(permute.spread, tokens, IDS, source)
    for top_k in (2, K, 32):
        choices = ((1, T, top_k), "int32")
        _trace(permute.unpermute_grad, tokens, rows, ((1, T, top_k), "float32"), choices, source)
    _check(compiled)


@pytest.mark.parametrize("experts, num_ranks", [(256, 1), (8, 2), (500, 1), (256, 8)])
def test_plan(experts, num_ranks, compiled):
    from expertmesh.core.kernels.triton import permute

    options = {"num_experts": experts, "num_rows": T * K, "alignment": 16, "num_ranks": num_ranks}
    _trace(lambda idx, rank: permute.plan(idx, rank, **options), IDS, ((1,), "int32"))
    _check(compiled, wide=False)


@pytest.mark.parametrize(
    "ranks, experts, spare", [(64, 256, 2), (8, 128, 2), (256, 256, 4), (1024, 1024, 1)]
)
def test_plan_of_copies(ranks, experts, spare, compiled):
    from expertmesh.core.kernels.triton import plan_copies
    from expertmesh.ep.copy_plan import LEVELS

    plan = partial(plan_copies.plan, num_spare=spare, least_rows=0, levels=LEVELS)
    _trace(plan, ((ranks, experts // ranks), "int32"))
    _check(compiled, wide=False)


@pytest.mark.parametrize(
    "experts, dtype, options",
    [
        (256, "float32", {"top_k": 8}),
        (512, "float32", {"top_k": 8, "use_pre_softmax": True}),
        (200, "bfloat16", {"top_k": 16, "score_function": "sigmoid"}),
        (256, "float32", {"top_k": 4, "score_function": "sigmoid", "normalize": False}),
        (
            256,
            "float32",
            {"top_k": 8, "score_function": "sigmoid", "num_groups": 8, "group_topk": 4},
        ),
        (256, "float32", {"top_k": 6, "num_groups": 8, "group_topk": 4, "group_best": 1}),
    ],
    ids=str,
)
def test_router(experts, dtype, options, compiled):
    from expertmesh.core import RouterConfig
    from expertmesh.core.kernels.triton import router

    config = RouterConfig(**options)
    logits, choices = ((T, experts), dtype), (T, config.top_k)
    _trace(lambda x: router.choose(x, None, None, config=config), logits)
    _trace(
        lambda *operands: router.weigh_grad(*operands, config=config),
        logits, (choices, "int32"), (choices, "float32"), (choices, "float32"),
    )  # fmt: skip
    _check(compiled, wide=False)


@pytest.mark.parametrize("experts, dtype", [(256, "float32"), (2048, "bfloat16"), (7, "float32")])
def test_balance_sums(experts, dtype, compiled):
    from expertmesh.core.kernels.triton import load_balance
    from expertmesh.core.router.balance import _SquaredLogsumexp
    from expertmesh.core.router.scores import ExpertScores

    logits, mask = ((T, experts), dtype), ((T,), "bool")
    for function in ("softmax", "sigmoid"):
        sums = partial(load_balance.sums, quantity=ExpertScores(function))
        _trace(sums, logits)
        _trace(sums, logits, mask)
    _trace(partial(load_balance.sums, quantity=_SquaredLogsumexp()), logits, mask)
    counts = partial(load_balance.counts, num_experts=experts, sequence_dims=0)
    _trace(counts, ((T, K), "int32"))
    _check(compiled, wide=False)
