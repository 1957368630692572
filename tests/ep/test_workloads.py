"""Each workload is skewed in its own way, and in no other."""

import numpy as np
import pytest

from expertmesh.ep.testing import WORKLOADS, make_choices

R, E, K, T = 8, 32, 4, 512


def choices(workload, **changes):
    sizes = dict(num_ranks=R, num_experts=E, top_k=K, tokens_per_rank=T)
    return make_choices(workload, **sizes | changes)


def shares(idx):
    """Of each expert, of the mean."""
    counts = np.bincount(idx[idx >= 0], minlength=E)
    return counts * E / counts.sum()


def by_rank(idx):
    return shares(idx).reshape(R, -1).mean(axis=1)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_experts_of_a_token_differ_and_the_seed_says_which(workload):
    idx = choices(workload, step=3)
    assert idx.shape == (R, T, K) and idx.dtype == np.int32 and idx.max() < E
    ordered = np.sort(idx[(idx >= 0).all(axis=-1)], axis=-1)
    assert len(ordered) and (np.diff(ordered) > 0).all()
    np.testing.assert_array_equal(idx, choices(workload, step=3))
    assert (idx != choices(workload, step=4)).any()
    assert workload == "W0" or (idx != choices(workload, step=3, seed=1)).any()


@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w != "W4"])
def test_every_rank_sends_all_of_its_tokens(workload):
    assert (choices(workload) >= 0).all()


def test_nothing_is_skewed():
    assert (shares(choices("W0")) == 1).all()


def test_hot_experts():
    hot = shares(choices("W1"))
    assert (hot[:2] > 3).all() and (hot[2:] < 1.2).all()


def test_a_hot_rank():
    """K of its E / R experts at most are a token's."""
    assert by_rank(choices("W2"))[0] > 3 and (by_rank(choices("W2"))[1:] < 1).all()


def test_hot_experts_on_several_ranks():
    hot = shares(choices("W3"))
    assert list(np.flatnonzero(hot > 3)) == [0, 16]


def test_ranks_send_more_and_more():
    idx = choices("W4")
    sent = (idx >= 0).all(axis=-1).sum(axis=1)
    assert list(sent) == [T * (r + 1) // R for r in range(R)]
    assert shares(idx)[0] > 2 > 1 > shares(idx)[-1]


def test_idle_ranks():
    held = by_rank(choices("W5"))
    assert (held[-2:] == 0).all() and (held[:-2] > 1.2).all()


def test_the_heat_moves_on():
    for step in (0, 1, 20):
        hot = np.flatnonzero(shares(choices("W6", step=step)) > 3)
        assert list(hot) == [2 * step % E, 2 * step % E + 1]


def test_the_heat_comes_in_bursts():
    hottest = [shares(choices("W7", step=step)).max() for step in range(8)]
    assert [heat > 5 for heat in hottest] == [False, False, False, True] * 2


def test_a_workload_that_is_not_there():
    with pytest.raises(ValueError, match=r"workload must be one of W0, .*got workload='W8'"):
        choices("W8")
