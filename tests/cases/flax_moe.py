"""OpCases of the whole block."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from expertmesh.core.testing import OpCase
from expertmesh.flax_moe import MoEConfig, moe

NUM_EXPERTS, TOP_K = 8, 2


def _operands(rng, size, dtype):
    batch, seq, d, f = {"regular": (8, 8, 16, 16), "odd": (8, 8, 24, 7), "empty": (8, 0, 8, 8)}[
        size
    ]
    x = np.asarray(rng.normal(size=(batch, seq, d))).astype(jnp.dtype(dtype))
    gate = rng.normal(size=(d, NUM_EXPERTS)).astype(np.float32)
    wi = (rng.normal(size=(NUM_EXPERTS, d, 2, f)) / np.sqrt(d)).astype(np.float32)
    wo = (rng.normal(size=(NUM_EXPERTS, f, d)) / np.sqrt(f)).astype(np.float32)
    return x, gate, wi, wo


def _oracle(x, gate, wi, wo):
    """Every expert on every token; the weights of the experts that were not chosen are zero."""
    logits = x @ gate
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :TOP_K]
    top = np.take_along_axis(logits, chosen, axis=-1)
    weights = np.exp(top - top.max(axis=-1, keepdims=True, initial=-np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    dense = np.zeros(logits.shape)
    np.put_along_axis(dense, chosen, weights, axis=-1)
    h = np.einsum("bsd,edcf->bsecf", x, wi)
    act = h[..., 0, :] / (1 + np.exp(-h[..., 0, :])) * h[..., 1, :]
    return np.einsum("bse,bsef,efd->bsd", dense, act, wo)


def _case(name, **options):
    def function(x, gate, wi, wo):
        config = MoEConfig(
            num_experts=NUM_EXPERTS, top_k=TOP_K, expert_dim=wo.shape[1], dtype=x.dtype, **options
        )
        return moe({"gate_kernel": gate, "wi": wi, "wo": wo}, x, config).y

    return OpCase(
        name=name,
        function=function,
        operands=_operands,
        oracle=_oracle,
        wrt=(0, 1, 2, 3),
        layouts={
            "one": (P("b"), P(), P("b"), P("b")),
            "several": (P("a", "b"), P(), P("b", "a"), P("b", None, "a")),
            "tuple": (P(("a", "b")), P(), P("b", "a"), P("b", None, "a")),
        },
        independent={"one": (P("b"),)},
        exchanges=True,
    )


CASES = [_case("moe", alignment=8)]
