"""The router, forward and backward, against its reference in the same run. Ratios are speed-ups."""

import argparse
import pathlib
from functools import partial

import jax
import numpy as np

from benchmarks import _measure
from expertmesh.core.ops import router as ops
from expertmesh.core.testing import relative_error

# tokens, experts
GPU, CPU = (32768, 256), (256, 64)
CONFIGS = {
    "softmax": ops.RouterConfig(top_k=8),
    "sigmoid, 4 of 8 groups": ops.RouterConfig(
        top_k=8, score_function="sigmoid", num_groups=8, group_topk=4
    ),
}


def passes(config, logits, d_weights):
    """pass -> (function of an implementation and the operands, the operands)."""

    def forward(implementation, logits):
        return ops._choose_op(logits, config=config, implementation=implementation)

    def backward(implementation, *operands):
        return ops._weigh_grad_op(*operands, config=config, implementation=implementation)

    idx, weights = jax.jit(lambda x: forward("reference", x))(logits)
    return {
        "forward": (forward, (logits,)),
        "backward": (backward, (logits, idx, weights, d_weights)),
    }


def check(function, given):
    """What is wrong is not timed."""
    got, want = (
        jax.tree.leaves(jax.jit(partial(function, name))(*given)) for name in ("auto", "reference")
    )
    if len(got) == 2:
        np.testing.assert_array_equal(got[0], want[0])
    assert relative_error(got[-1], want[-1]) < 1e-4


def rows_of(name, config, shape, pairs):
    logits = jax.random.normal(jax.random.key(0), shape)
    d_weights = jax.random.normal(jax.random.key(1), (shape[0], config.top_k))
    for which, (function, given) in passes(config, logits, d_weights).items():
        check(function, given)
        case = f"float32 {which}, {name}, {shape[0]} tokens, {config.top_k} of {shape[1]} experts"
        yield _measure.against_reference("router", case, function, given, pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    shape = GPU if jax.default_backend() == "gpu" else CPU
    found = (
        row
        for name, config in CONFIGS.items()
        for row in rows_of(name, config, shape, options.pairs)
    )
    _measure.write(options.json, found)


if __name__ == "__main__":
    main()
