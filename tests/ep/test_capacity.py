"""recv_capacity against an exhaustive search of loads."""

import dataclasses
import itertools

import numpy as np
import pytest

from expertmesh.ep import EpConfig, recv_capacity
from expertmesh.ep.capacity import most_hosts


def search(num_local, num_tokens, most, alignment):
    """The most rows that any loads of distinct experts need."""
    loads = itertools.product(range(num_tokens + 1), repeat=num_local)
    return max(sum(-(-n // alignment) * alignment for n in x) for x in loads if sum(x) <= most)


@pytest.mark.parametrize("E, R", [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 2)])
@pytest.mark.parametrize("K", [1, 2, 5])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("A", [1, 2, 3, 8])
def test_worst_case_never_drops_and_wastes_less_than_alignment(E, R, K, T, A):
    e = E // R
    need = search(e, R * T, R * T * min(K, e), A)
    assert need <= recv_capacity(E, K, T, R, A) < need + A + (A - 1) * e


def test_values():
    assert recv_capacity(8, 2, 16, 4, 1) == 128  # 64 tokens, both choices here
    assert recv_capacity(8, 2, 16, 4, 16) == 128  # every expert full: aligned already
    assert recv_capacity(8, 1, 16, 4, 16) == 96  # roundup(64 + 15 * 2, 16)
    assert recv_capacity(64, 8, 1024, 8, 128) == 65536
    assert recv_capacity(8, 4, 10, 4, 1) == 80  # two experts here, so two of four choices
    assert recv_capacity(8, 2, 16, 4, 1, factor=1) == 32
    assert recv_capacity(8, 2, 16, 4, 1, factor=1.25) == 40
    assert recv_capacity(8, 2, 16, 4, 16, factor=1.25) == 48  # roundup(40, 16)
    assert recv_capacity(8, 2, 17, 4, 16, factor=1.0) == 64  # 17 rows each, roundup to 32
    assert recv_capacity(8, 2, 16, 4, 1, factor=100.0) == 128
    assert recv_capacity(3, 1, 3, 1) == 3, "no alignment"
    assert type(recv_capacity(8, 2, 16, 4, 1, factor=1.25)) is int, "it is a shape"


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(num_experts=0), "num_experts=0"),
        (dict(top_k=0), "top_k=0"),
        (dict(tokens_per_rank=-1), "tokens_per_rank=-1"),
        (dict(ep_size=0), "ep_size=0"),
        (dict(alignment=0), "alignment=0"),
        (dict(ep_size=3), "num_experts=8, ep_size=3"),
        (dict(factor=0.9), "factor=0.9"),
        (dict(factor=float("nan")), "factor=nan"),
        (dict(factor=float("inf")), "factor=inf"),
    ],
)
def test_errors(changed, words):
    good = dict(num_experts=8, top_k=2, tokens_per_rank=16, ep_size=4, alignment=1)
    with pytest.raises(ValueError) as error:
        recv_capacity(**(good | changed))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "name", ["num_experts", "top_k", "tokens_per_rank", "ep_size", "alignment"]
)
@pytest.mark.parametrize("value", [2.5, True, "2", None])
def test_sizes_are_ints(name, value):
    good = dict(num_experts=8, top_k=2, tokens_per_rank=16, ep_size=4, alignment=1)
    with pytest.raises(TypeError, match=f"recv_capacity: {name} must be an int; got"):
        recv_capacity(**good | {name: value})


def test_numpys_ints_are_ints():
    found = recv_capacity(*map(np.int32, (8, 2, 16, 4)))
    assert found == recv_capacity(8, 2, 16, 4) and type(found) is int


@pytest.mark.parametrize(
    "changed, kind, words",
    [
        (dict(num_experts=0), ValueError, "num_experts=0"),
        (dict(num_experts=2.0), TypeError, "num_experts=2.0"),
        (dict(num_experts=True), TypeError, "num_experts=True"),
        (dict(alignment=0), ValueError, "alignment=0"),
        (dict(alignment=12), ValueError, "power of two"),
        (dict(capacity=0), ValueError, "capacity=0"),
        (dict(capacity=24, alignment=16), ValueError, "capacity=24, alignment=16"),
        (dict(transport="nccl"), ValueError, "auto, local, ring, all_to_all"),
        (dict(transport="nvlink:1"), ValueError, "'nvlink:N' for at most N >= 2"),
        (dict(transport=48), ValueError, "got transport=48"),
        (dict(transport="two_level:two_level"), ValueError, "got transport='two_level:two_level'"),
        (dict(transport="two_level:nvlink:1"), ValueError, "'two_level:' and another of them"),
        (dict(transport="two_level:"), ValueError, "got transport='two_level:'"),
        (dict(transport="ring:ring"), ValueError, "got transport='ring:ring'"),
        (dict(num_groups=0, group_topk=1), ValueError, "num_groups=0"),
        (
            dict(num_groups=4),
            ValueError,
            "must go together; got num_groups=4, group_topk=None",
        ),
        (dict(group_topk=2), ValueError, "must go together"),
        (dict(overflow="warn"), ValueError, "drop, error; got overflow='warn'"),
        (dict(axis=["ep"]), TypeError, "axis=['ep']"),
        (dict(axis=("ep", 1)), TypeError, "axis=('ep', 1)"),
    ],
)
def test_config_errors(changed, kind, words):
    with pytest.raises(kind) as error:
        EpConfig(**(dict(num_experts=8) | changed))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "changed",
    [
        dict(capacity=32, alignment=16),
        dict(transport="nvlink:2"),
        dict(transport="two_level"),
        dict(transport="two_level:auto"),
        dict(transport="two_level:ring"),
        dict(transport="two_level:nvlink:48"),
        dict(num_groups=4, group_topk=2),
        dict(overflow="error"),
        dict(axis="ep"),
        dict(axis=()),
    ],
)
def test_configs_that_are_taken(changed):
    config = EpConfig(**(dict(num_experts=8) | changed))
    assert {name: getattr(config, name) for name in changed} == changed


def test_defaults():
    """A new field goes behind these and has a default."""
    fields = [(f.name, f.default) for f in dataclasses.fields(EpConfig)]
    assert fields == [
        ("num_experts", dataclasses.MISSING),
        ("capacity", None),
        ("alignment", 1),
        ("transport", "auto"),
        ("axis", None),
        ("overflow", "drop"),
        ("debug", False),
        ("num_groups", None),
        ("group_topk", None),
    ]


def test_config_is_a_value():
    assert type(EpConfig(num_experts=np.int64(8)).num_experts) is int
    assert EpConfig(num_experts=8, axis=("a", "b")) == EpConfig(num_experts=8, axis=("a", "b"))
    assert hash(EpConfig(num_experts=8)) == hash(EpConfig(num_experts=8))
    with pytest.raises(TypeError):
        EpConfig(8)


def reached(num_experts, num_hosts, top_k, num_groups, group_topk):
    """The most hosts of any allowed choice, by trying all."""
    held, size = num_experts // num_hosts, num_experts // num_groups
    most = 0
    for groups in itertools.combinations(range(num_groups), min(group_topk, num_groups)):
        hosts = {x // held for g in groups for x in range(g * size, (g + 1) * size)}
        most = max(most, min(len(hosts), top_k))
    return most


@pytest.mark.parametrize("E", [8, 12, 24])
def test_hosts_of_a_token(E):
    """As many as some choice reaches; where groups and hosts cut each other's experts, no fewer."""
    divisors = [n for n in range(1, E + 1) if E % n == 0]
    for H, G, topk, K in itertools.product(divisors, divisors, (1, 2, 3), (1, 2, 6)):
        bound, want = most_hosts(E, H, K, G, topk), reached(E, H, K, G, topk)
        nested = H % G == 0 or G % H == 0
        assert bound == want if nested else want <= bound <= min(H, K), (E, H, G, topk, K)
        assert most_hosts(E, H, K) == most_hosts(E, H, K, G) == min(H, K)
        assert most_hosts(E, H, K, group_topk=topk) == min(H, K)
