"""Exchanges by "nvlink" against XLA's ragged_all_to_all in the same run, over all GPUs of this process.

A dispatch begins with tokens and ends with rows in order of experts, which a grouped GEMM can take; a combine begins
with such rows and ends with the tokens' sums. Where there are not two GPUs: "auto" against "all_to_all", to see it run.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import _measure
from expertmesh.core import Float8BlockScaling, quantize
from expertmesh.ep import EpConfig, combine, dispatch, prepare, recv_capacity

# tokens of a GPU, width, choices, experts
GPU, CPU = (4096, 7168, 8, 256), (32, 128, 2, 16)
DECODE = (128, 7168, 8, 256)


@jax.jit
def relative_error(a, b):
    """On the devices: rows are gigabytes."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def transports():
    """Ours, and the one to compare with."""
    on_gpus = jax.default_backend() == "gpu" and jax.device_count() > 1
    return ("nvlink", "ragged") if on_gpus else ("auto", "all_to_all")


def operands(shape, next_rank=False):
    """A handle and tokens: every token's experts are drawn, or all are the next rank's."""
    tokens, width, choices, experts = shape
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    rng = np.random.default_rng(0)
    topk_idx = np.argsort(rng.random((ranks * tokens, experts)), axis=1)[:, :choices]
    if next_rank:
        owner = (np.arange(ranks * tokens) // tokens + 1) % ranks
        topk_idx = owner[:, None] * (experts // ranks) + topk_idx % (experts // ranks)
    most = recv_capacity(experts, choices, tokens, ranks)
    capacity = min(most, int(1.1 * tokens * choices) + 64)
    config = EpConfig(num_experts=experts, capacity=capacity, axis="ep")
    handle = prepare(jax.device_put(topk_idx.astype(np.int32), sharding), config)
    assert int(jnp.max(handle.num_dropped)) == 0
    x = rng.standard_normal((ranks * tokens, width), np.float32)
    return handle, jax.device_put(jnp.asarray(x, jnp.bfloat16), sharding)


def remote_copies(handle):
    """Tokens that a GPU sends to others, each once to each, on average."""
    capacity, ranks = handle.source.shape[1], handle.ep_size
    slot = np.asarray(handle.slot).reshape(ranks, -1, handle.slot.shape[-1])
    here = np.arange(ranks)[:, None, None]
    owner = np.where(slot < 0, here, slot // capacity)
    return sum(np.any((owner == r) & (r != here), axis=-1).sum() for r in range(ranks)) / ranks


def passes(handle, x):
    """name -> function of a transport and operands, the operands, bytes that leave a GPU."""
    rows = dispatch(handle, x, transport="all_to_all")
    format = Float8BlockScaling().formats().x
    q, copies = quantize(x, format), remote_copies(handle)
    width = x.shape[-1]

    def add(transport, handle, rows):
        return combine(handle, rows, transport=transport, wire_format="bfloat16")

    def add_wide(transport, handle, rows):
        return combine(handle, rows, transport=transport)

    return {
        "dispatch bfloat16": (move, (handle, x), 2 * width * copies),
        "dispatch float8 with scales": (move, (handle, q), (width + width // 32) * copies),
        "combine bfloat16, sums travel in bfloat16": (add, (handle, rows), 2 * width * copies),
        "combine bfloat16, sums travel in float32": (add_wide, (handle, rows), 4 * width * copies),
    }


def move(transport, handle, x):
    return dispatch(handle, x, transport=transport)


def there_and_back(transport, handle, x):
    rows = dispatch(handle, x, transport=transport)
    return combine(handle, rows, transport=transport, wire_format="bfloat16")


def row(case, function, given, pairs, num_bytes=None):
    ours, other = transports()
    mine, theirs = (
        jax.jit(functools.partial(function, name))(*given) for name in (ours, "all_to_all")
    )
    for a, b in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True):
        assert relative_error(a, b) < 1e-2, case  # what is wrong is not timed
    del mine, theirs
    calls = [(functools.partial(function, name), given) for name in (ours, other)]
    seconds, reference, ratio = _measure.alternate(*calls, pairs)
    rate = "" if num_bytes is None else f"; {num_bytes / seconds / 1e9:.0f} GB/s leave a GPU"
    return _measure.row(
        bench="dispatch",
        case=case,
        metric="time",
        value=1e6 * seconds,
        unit="us",
        reference=f"{other}, {1e6 * reference:.0f} us{rate}",
        ratio=ratio,
    )


def rows_of(shape, pairs):
    tokens, width, choices, experts = shape
    handle, x = operands(shape)
    case = f"{tokens} tokens a GPU x {width}, {choices} of {experts} experts"
    for name, (function, given, num_bytes) in passes(handle, x).items():
        yield row(f"{name}, {case}", function, given, pairs, num_bytes)


def all_rows(pairs):
    shape = GPU if transports()[0] == "nvlink" else CPU
    yield from rows_of(shape, pairs)
    tokens, width, _, experts = shape
    handle, x = operands((4 * tokens, width, 1, experts), next_rank=True)
    case = f"every token to the next rank, {4 * tokens} tokens a GPU x {width}"
    yield row(case, move, (handle, x), pairs, 2 * width * remote_copies(handle))
    if shape is GPU:
        handle, x = operands(DECODE)
        yield row("dispatch and combine, 128 tokens a GPU", there_and_back, (handle, x), pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    _measure.write(options.json, all_rows(options.pairs))


if __name__ == "__main__":
    main()
