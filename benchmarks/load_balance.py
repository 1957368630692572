"""The sums of the balance losses and the counts of experts, against plain JAX in the same run. Ratios are speed-ups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from benchmarks.grouped_gemm import on_gpu
from expertmesh.core.router import balance as ops
from expertmesh.core.router.scores import ExpertScores
from expertmesh.core.testing import relative_error

# tokens, experts, choices
GPU, CPU = (32768, 256, 8), (256, 64, 4)


def sums(logits, topk_idx):
    """name -> function of an implementation and an operand, the operand."""
    experts = logits.shape[-1]
    scores, weight = ExpertScores("softmax"), jnp.ones(experts)
    sizes = dict(num_experts=experts, sequence_dims=0)
    return {
        "sums of scores, softmax": (
            lambda name, x: ops.sum_op(x, weight, None, quantity=scores, implementation=name),
            logits,
        ),
        "sum of the z loss": (
            lambda name, x: ops.sum_op(
                x, weight[:1], None, quantity=ops._SquaredLogsumexp(), implementation=name
            ),
            logits,
        ),
        "counts": (
            lambda name, i: ops._counts_op(i, None, **sizes, implementation=name),
            topk_idx,
        ),
    }


def check(function, given):
    got, want = (
        jax.jit(functools.partial(function, name))(given) for name in ("auto", "reference")
    )
    assert relative_error(got, np.asarray(want, np.float64)) < 1e-5


def cases():
    tokens, experts, choices = GPU if on_gpu() else CPU
    logits = jax.random.normal(jax.random.key(0), (tokens, experts))
    topk_idx = jax.lax.top_k(logits, choices)[1].astype(jnp.int32)
    for name, (function, given) in sums(logits, topk_idx).items():
        ours, other = (
            (functools.partial(function, which), (given,)) for which in ("auto", "reference")
        )
        yield _measure.time_case(
            "load_balance",
            f"{name}, {tokens} tokens, {choices} of {experts} experts",
            ours,
            other,
            "plain JAX, our reference",
            (1e-5, 6e-5),
            functools.partial(check, function, given),
        )


def main():
    options = _measure.parser(__doc__).parse_args()
    _measure.write(options.json, _measure.measured(cases()))


if __name__ == "__main__":
    main()
