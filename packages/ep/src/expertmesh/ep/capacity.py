"""How many rows a participant must be able to receive. Arithmetic on Python integers."""

import math

from expertmesh.core.operands import as_counts, check_numbers


def recv_capacity(
    num_experts: int,
    top_k: int,
    tokens_per_rank: int,
    ep_size: int,
    alignment: int = 1,
    factor: float | None = None,
) -> int:
    """Receive rows per participant: the number that never drops, or a bound around the balanced load.

    With e = num_experts / ep_size, T = ep_size * tokens_per_rank, a = T * min(top_k, e), A = alignment:

        worst    = min(e * roundup(T, A), roundup(a + (A - 1) * min(e, a), A))
        balanced = e * roundup(ceil(tokens_per_rank * top_k / e), A)
        result   = worst if factor is None else min(worst, roundup(ceil(factor * balanced), A))

    Args:
      num_experts: E, over all ranks of the EP group.
      top_k: choices per token; `worst` holds if they are different experts.
      tokens_per_rank: tokens that one participant sends.
      ep_size: ranks in the EP group.
      alignment: rows of each expert are padded to a multiple of it.
      factor: >= 1; how many times the balanced load is provided for. None: the worst case.

    Returns:
      A multiple of `alignment`.

    Raises:
      TypeError: a size that is no int, or a factor that is no number.
      ValueError: a size below 1, num_experts not divisible by ep_size, factor not finite or below 1.
    """
    num_experts, top_k, tokens_per_rank, ep_size, alignment = as_counts(
        "recv_capacity",
        num_experts=num_experts,
        top_k=top_k,
        tokens_per_rank=tokens_per_rank,
        ep_size=ep_size,
        alignment=alignment,
    )
    if num_experts % ep_size:
        raise ValueError(
            "recv_capacity: num_experts must be divisible by ep_size; got "
            f"num_experts={num_experts}, ep_size={ep_size}; change one of them"
        )
    num_local = num_experts // ep_size
    worst = worst_rows(num_local, top_k, ep_size * tokens_per_rank, alignment)
    if factor is None:
        return worst
    remedy = "use factor=1 for the balanced load or None for the worst case"
    check_numbers("recv_capacity", remedy, least=1, factor=factor)
    balanced = num_local * roundup(-(-tokens_per_rank * top_k // num_local), alignment)
    return min(worst, roundup(math.ceil(factor * balanced), alignment))


def worst_rows(num_local: int, top_k: int, num_tokens: int, alignment: int) -> int:
    """Rows that suffice for any choices of num_tokens tokens, if those of a token are different experts."""
    most = num_tokens * min(top_k, num_local)
    return min(
        num_local * roundup(num_tokens, alignment),
        most_rows(num_local, most, alignment),
    )


def most_rows(num_local: int, num_choices: int, alignment: int) -> int:
    """Rows that suffice for any num_choices choices of num_local experts, even if tokens repeat an expert."""
    padding = (alignment - 1) * min(num_local, num_choices)
    return roundup(num_choices + padding, alignment)


def most_hosts(
    num_experts: int,
    num_hosts: int,
    top_k: int,
    num_groups: int | None = None,
    group_topk: int | None = None,
) -> int:
    """Hosts that a token's experts can be on, if they are in `group_topk` of `num_groups` equal groups of experts."""
    bound = min(num_hosts, top_k)
    if num_groups is None or group_topk is None:
        return bound
    # A host and a group hold consecutive experts, and a group may begin within a host.
    size, held = -(-num_experts // num_groups), num_experts // num_hosts
    ends = ((first, first + size - 1) for first in range(0, num_experts, size))
    each = max(last // held - first // held + 1 for first, last in ends)
    return min(bound, group_topk * each)


def roundup(value: int, multiple: int) -> int:
    """The smallest multiple that is not less than value."""
    return -(-value // multiple) * multiple
