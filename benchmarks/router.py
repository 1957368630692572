"""The router, forward and backward, against plain JAX in the same run. Ratios are speed-ups.

"our reference" is the op's definition in this package, whose gradient is written by hand, without a scatter; the others
are what a user writes with JAX's own functions, and what JAX derives from it. The last rows are the same calls against
a copy of as many bytes as any program must move: the logits once, or their gradient, and what a token's choices need.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.core.router import route as ops
from expertmesh.core.testing import relative_error

# tokens, experts
GPU, CPU = (32768, 256), (256, 64)
SECONDS = {"forward": (3e-5, 3e-4), "backward": (15e-6, 3e-5)}  # ours and another's, about
CONFIGS = {
    "softmax": ops.RouterConfig(top_k=8),
    "sigmoid, 4 of 8 groups": ops.RouterConfig(
        top_k=8, score_function="sigmoid", num_groups=8, group_topk=4
    ),
}


def passes(config, logits, d_weights):
    """pass -> (function of an implementation and the operands, the operands)."""

    def forward(implementation, logits):
        options = dict(config=config, implementation=implementation)
        return ops._choose_op(logits, None, None, None, **options)

    def backward(implementation, *operands):
        return ops._weigh_grad_op(*operands, config=config, implementation=implementation)

    idx, weights = jax.jit(lambda x: forward("reference", x))(logits)
    return {
        "forward": (forward, (logits,)),
        "backward": (backward, (logits, idx, weights, d_weights)),
    }


def plain(config, logits):
    """What a user writes without this package: softmax of the chosen by JAX's own functions."""
    chosen, idx = jax.lax.top_k(logits, config.top_k)
    return idx, jax.nn.softmax(chosen)


def plain_after_softmax(config, logits):
    """The other way to write it: softmax of all, those of the chosen made to sum to 1. The weights are the same."""
    scores = jax.nn.softmax(logits)
    _, idx = jax.lax.top_k(scores, config.top_k)
    chosen = jnp.take_along_axis(scores, idx, axis=-1)
    return idx, chosen / chosen.sum(-1, keepdims=True)


def plain_cases(config, logits, d_weights):
    """(name, pass, function and operands) of what JAX derives from plain functions."""
    for name, function in (
        ("jax.lax.top_k and softmax", plain),
        ("softmax, jax.lax.top_k, take_along_axis", plain_after_softmax),
    ):
        yield name, "forward", (partial(function, config), (logits,))
        # The cotangent's part of the derivative alone: what it needs of the forward is there.
        weights, pull = jax.vjp(lambda x, f=function: f(config, x)[1], logits)
        yield name, "backward", (lambda pull, d: pull(d), (pull, d_weights))


def check(function, given):
    """`function` of an implementation and what is given."""
    got, want = (
        jax.tree.leaves(jax.jit(partial(function, name))(*given)) for name in ("auto", "reference")
    )
    if len(got) == 2:
        np.testing.assert_array_equal(got[0], want[0])
    assert relative_error(got[-1], want[-1]) < 1e-4


def bytes_that_move(which, config, given):
    """Forward: the logits, read, indices and weights, written. Backward: those and the weights' cotangents, read, and
    the logits' cotangent, written; of the logits themselves softmax needs none, other scores those of the choices."""
    logits = given[0]
    chosen = logits.shape[0] * config.top_k * 4  # bytes of an index or a number for each choice
    if which == "forward":
        return logits.nbytes + 2 * chosen
    return logits.nbytes + (3 if config.score_function == "softmax" else 4) * chosen


def cases_of(name, config, shape):
    logits = jax.random.normal(jax.random.key(0), shape)
    d_weights = jax.random.normal(jax.random.key(1), (shape[0], config.top_k))
    ours = {}
    for which, (function, given) in passes(config, logits, d_weights).items():
        case = f"float32 {which}, {name}, {shape[0]} tokens, {config.top_k} of {shape[1]} experts"
        ours[which] = case, (partial(function, "auto"), given)
        yield _measure.time_case(
            "router",
            *ours[which],
            (partial(function, "reference"), given),
            "our reference",
            SECONDS[which],
            partial(check, function, given),
        )
    for which, (case, (function, given)) in ours.items():
        moved = bytes_that_move(which, config, given)
        yield _measure.copy_case("router", case, function, given, moved)
    if config.score_function == "softmax":
        for name, which, other in plain_cases(config, logits, d_weights):
            yield _measure.time_case("router", *ours[which], other, name, SECONDS[which])


def main():
    options = _measure.parser(__doc__).parse_args()
    shape = GPU if jax.default_backend() == "gpu" else CPU
    cases = (case for name, config in CONFIGS.items() for case in cases_of(name, config, shape))
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
