"""Expert parallelism by loops over tokens, in float64: no sort, no prefix sum, no device.

Written from docs/architecture.md: tokens are cut over the mesh as their spec says; a participant's rows are appended
expert by expert, source rank by source rank, token by token, choice by choice.
"""

import dataclasses
import itertools

import numpy as np


def axes_of(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def shards(mesh, spec, sizes, ep):
    """Token ids of each participant, in order of participants: outer axes in order of appearance, then ep."""
    ids = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    named = [a for entry in spec for a in axes_of(entry)]
    order = [a for a in named if a not in ep] + list(ep)
    for coordinates in itertools.product(*(range(mesh[a]) for a in order)):
        at = dict(zip(order, coordinates, strict=True))
        block = ids
        for dim, entry in enumerate(spec):
            for a in axes_of(entry):
                block = np.array_split(block, mesh[a], axis=dim)[at[a]]
        yield block.reshape(-1)


@dataclasses.dataclass
class Exchange:
    """topk [N, K] over participants `blocks` (token ids) in groups of R; `rows[p][n]` is (token, k) or None."""

    topk: np.ndarray
    blocks: list
    R: int
    E: int
    C: int
    A: int = 1

    def __post_init__(self):
        self.e = self.E // self.R
        self.P, (self.N, self.K) = len(self.blocks), self.topk.shape
        self.rows, self.raw, self.sizes, self.total, self.dropped = [], [], [], [], []
        for p in range(self.P):
            self._receive(p)

    def _receive(self, p):
        first = p // self.R * self.R
        rows, raw, sizes = [], [], []
        for x in range(self.e):
            begin = len(rows)
            for s in range(self.R):
                for token in self.blocks[first + s]:
                    for k in range(self.K):
                        if self.topk[token, k] == p % self.R * self.e + x:
                            rows.append((token, k))
            raw.append(len(rows) - begin)
            while (len(rows) - begin) % self.A:
                rows.append(None)
            sizes.append(max(0, min(len(rows), self.C) - begin))
        self.raw.append(raw)
        self.sizes.append(sizes)
        self.total.append(len(rows))
        self.dropped.append(sum(row is not None for row in rows[self.C :]))
        self.rows.append((rows + [None] * self.C)[: self.C])

    def live(self):
        """(p, n, token, k) of every row."""
        for p, rows in enumerate(self.rows):
            for n, row in enumerate(rows):
                if row is not None:
                    yield p, n, *row

    def dispatch(self, tokens):
        out = np.zeros((self.P, self.C, tokens.shape[-1]))
        for p, n, t, _ in self.live():
            out[p, n] = tokens[t]
        return out

    def combine(self, rows):
        out = np.zeros((self.N, rows.shape[-1]))
        for p, n, t, _ in self.live():
            out[t] += rows[p, n]
        return out

    def dispatch_weights(self, weights):
        out = np.zeros((self.P, self.C))
        for p, n, t, k in self.live():
            out[p, n] = weights[t, k]
        return out

    def combine_weights(self, rows):
        out = np.zeros((self.N, self.K))
        for p, n, t, k in self.live():
            out[t, k] = rows[p, n]
        return out

    def slot(self):
        out = np.full((self.N, self.K), -1)
        for p, n, t, k in self.live():
            out[t, k] = p % self.R * self.C + n
        return out

    def source(self):
        """Choices numbered over the group: rank, token of the rank, k."""
        out = np.full((self.P, self.C), -1)
        for p, n, t, k in self.live():
            first = p // self.R * self.R
            group = np.concatenate(self.blocks[first : first + self.R])
            out[p, n] = np.flatnonzero(group == t)[0] * self.K + k
        return out

    def row(self):
        T = len(self.blocks[0]) if self.blocks else 0
        out = np.full((self.P, self.R * T, self.K), -1)
        for p, n, c in (
            (p, n, c) for p, row in enumerate(self.source()) for n, c in enumerate(row)
        ):
            if c >= 0:
                out[p, c // self.K, c % self.K] = n
        return out


def routing(kind, num_tokens, top_k, num_experts, seed=0):
    """int32[N, K]; "holes" has ids outside the range and repeated experts."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, top_k)
    if kind == "uniform":
        scores = rng.random((num_tokens, max(num_experts, top_k)))
        idx = np.argsort(scores, axis=1)[:, :top_k] % num_experts
    elif kind == "skewed":
        idx = np.minimum(rng.integers(0, num_experts, shape), rng.geometric(0.5, shape) - 1)
    elif kind == "one":
        idx = np.full(shape, num_experts - 1)
    elif kind == "none":
        idx = np.full(shape, -1)
    else:
        bad = rng.choice([-1, -5, num_experts, num_experts + 9], shape)
        idx = np.where(rng.random(shape) < 0.3, bad, rng.integers(0, num_experts, shape))
    return idx.astype(np.int32)


KINDS = ("uniform", "skewed", "one", "none", "holes")
