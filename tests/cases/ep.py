"""OpCases of the exchange: tokens to their experts, a linear map per expert, and back."""

import numpy as np
from jax.sharding import PartitionSpec as P

from expertmesh.core import grouped_gemm
from expertmesh.core.testing import OpCase, magnitudes
from expertmesh.ep import EpConfig, combine, dispatch, dispatch_weights, prepare

NUM_EXPERTS = 8


def _operands(rng, size, dtype):
    batch, seq, k, width = {"regular": (8, 8, 2, 16), "odd": (8, 8, 3, 24), "empty": (8, 0, 2, 8)}[
        size
    ]
    idx = rng.integers(-1, NUM_EXPERTS, size=(batch, seq, k)).astype(np.int32)
    if seq:
        idx[0] = 3  # a participant whose tokens all go to one expert, more than once
    weights = rng.normal(size=idx.shape).astype(np.float32)
    rhs = magnitudes(rng, (NUM_EXPERTS, width, 5), dtype)
    return magnitudes(rng, (batch, seq, width), dtype), idx, weights, rhs


def _oracle(x, idx, weights, rhs):
    out = np.zeros((*x.shape[:2], rhs.shape[2]))
    for b, s, k in np.ndindex(*idx.shape):
        if idx[b, s, k] >= 0:
            out[b, s] += weights[b, s, k] * (x[b, s] @ rhs[idx[b, s, k]])
    return out


def _exchange(transport, alignment):
    def function(x, idx, weights, rhs):
        # Tokens may repeat an expert, which the default capacity does not count on.
        most = 8 * idx.size + NUM_EXPERTS * (alignment - 1)
        handle = prepare(
            idx,
            EpConfig(
                num_experts=NUM_EXPERTS,
                alignment=alignment,
                transport=transport,
                capacity=max(-(-most // alignment), 1) * alignment,
            ),
        )
        rows = grouped_gemm(dispatch(handle, x), rhs, handle.group_sizes)
        return combine(
            handle, rows * dispatch_weights(handle, weights)[..., None].astype(rows.dtype)
        )

    return function


def _poison(x, idx, weights, rhs):
    x, weights = x.copy(), weights.copy()
    weights[idx < 0] = np.nan
    x[(idx < 0).all(axis=-1)] = np.nan
    return x, idx, weights, rhs


def _case(transport, alignment):
    return OpCase(
        name=f"exchange_{transport}",
        function=_exchange(transport, alignment),
        operands=_operands,
        oracle=_oracle,
        wrt=(0, 2, 3),
        layouts={
            "one": (P("b"), P("b"), P("b"), P("b")),
            "several": (P("a", "b"), P("a", "b"), P("a", "b"), P("b")),
            "tuple": (P(("a", "b")), P(("a", "b")), P(("a", "b")), P("b", "a")),
        },
        independent={"one": (P("b"),), "several": (P("a", "b"),)},
        exchanges=True,
        poison=_poison,
    )


CASES = [_case("auto", 1), _case("ring", 4), _case("all_to_all", 16)]
