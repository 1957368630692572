"""Routing that is skewed in one way each: the workloads that tests and benchmarks share.

A choice depends on the workload, the seed, the step and the sizes alone, so that every layout of EP and every method of
exchange sees the same tokens. Each token's experts differ. Names and kinds are those of Megatron-LM's pull request
7488; heat is how much likelier than others a hot expert is to be chosen.

| name | what is skewed |
|---|---|
| W0 | nothing: the experts take turns |
| W1 | a sixteenth of the experts, side by side, have heat 8 |
| W2 | all experts of one rank have heat 8 |
| W3 | as many experts as in W1 have heat 8, spread over the ranks |
| W4 | rank r sends T (r + 1) / R tokens; experts' shares fall with 1 / sqrt(e + 1) |
| W5 | the experts of the last quarter of the ranks get nothing |
| W6 | as W1, and each step the next experts are hot |
| W7 | even, but for each fourth step, in which those of W1 have heat 32 |
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

__all__ = ["WORKLOADS", "make_choices"]

_HEAT, _BURST = 8.0, 32.0
_BURST_EVERY = 4


def _hot(num_experts: int) -> int:
    """How many experts are hot."""
    return max(num_experts // 16, 1)


def _heated(num_experts: int, at: np.ndarray, heat: float = _HEAT) -> np.ndarray:
    weights = np.ones(num_experts)
    weights[at % num_experts] = heat
    return weights


def _hot_rank(num_experts: int, num_ranks: int, step: int) -> np.ndarray:
    return _heated(num_experts, np.arange(num_experts // num_ranks))


def _hot_set(num_experts: int, num_ranks: int, step: int) -> np.ndarray:
    return _heated(num_experts, np.arange(_hot(num_experts)))


def _hot_spread(num_experts: int, num_ranks: int, step: int) -> np.ndarray:
    hot = _hot(num_experts)
    return _heated(num_experts, np.arange(hot) * (num_experts // hot))


def _falling(num_experts: int, num_ranks: int, step: int) -> np.ndarray:
    return (np.arange(num_experts) + 1.0) ** -0.5


def _idle_ranks(num_experts: int, num_ranks: int, step: int) -> np.ndarray:
    idle = num_ranks // 4 * (num_experts // num_ranks)
    return (np.arange(num_experts) < num_experts - idle).astype(float)


def _rotating(num_experts: int, num_ranks: int, step: int) -> np.ndarray:
    hot = _hot(num_experts)
    return _heated(num_experts, np.arange(hot) + step * hot)


def _burst(num_experts: int, num_ranks: int, step: int) -> np.ndarray:
    heat = _BURST if step % _BURST_EVERY == _BURST_EVERY - 1 else 1.0
    return _heated(num_experts, np.arange(_hot(num_experts)), heat)


# Weights of the experts' chances, by (E, R, step); None: they take turns.
WORKLOADS: Mapping[str, Callable[[int, int, int], np.ndarray] | None] = MappingProxyType(
    {
        "W0": None,
        "W1": _hot_set,
        "W2": _hot_rank,
        "W3": _hot_spread,
        "W4": _falling,
        "W5": _idle_ranks,
        "W6": _rotating,
        "W7": _burst,
    }
)


def make_choices(
    workload: str,
    *,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    tokens_per_rank: int,
    seed: int = 0,
    step: int = 0,
) -> np.ndarray:
    """The experts of each token of an EP group.

    Args:
      workload: a name of `WORKLOADS`.
      num_ranks: R.
      num_experts: E, a multiple of R.
      top_k: K, at most as many as there are experts with a chance.
      tokens_per_rank: T.
      seed, step: of the tokens; what W6 and W7 skew depends on the step.

    Returns:
      int32[R, T, K] on the host; -1 for a token that is not there, in W4. A token's experts differ.

    Raises:
      ValueError: an unknown workload.
    """
    if workload not in WORKLOADS:
        raise ValueError(
            f"make_choices: workload must be one of {', '.join(WORKLOADS)}; got workload={workload!r}; "
            "choose one of these"
        )
    shape, weigh = (num_ranks, tokens_per_rank), WORKLOADS[workload]
    if weigh is None:
        choice = np.arange(num_ranks * tokens_per_rank * top_k) + step
        return (choice % num_experts).astype(np.int32).reshape(*shape, top_k)
    rng = np.random.default_rng([list(WORKLOADS).index(workload), seed, step])
    with np.errstate(divide="ignore"):
        chances = np.log(weigh(num_experts, num_ranks, step))
    # The K largest of these are K draws without replacement, by the weights.
    keys = chances + rng.gumbel(size=(*shape, num_experts))
    idx = np.argpartition(-keys, top_k - 1)[..., :top_k].astype(np.int32)
    if workload == "W4":
        sent = tokens_per_rank * (np.arange(num_ranks) + 1) // num_ranks
        idx[np.arange(tokens_per_rank) >= sent[:, None]] = -1
    return idx
