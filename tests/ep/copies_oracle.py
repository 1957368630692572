"""The best that copies of experts can do, by an exact solver of mixed-integer programs (HiGHS)."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

GAP = 0.002  # relative, at which the solver may stop


def least_fullest(counts, num_ranks, num_spare, seconds=20.0):
    """A lower bound, within `GAP` of the optimum or of what `seconds` gave, on the fullest rank's share of the mean.

    y[x, r] rows of expert x on rank r, z[x, r] whether r != home holds a copy:
    minimize M;  sum_r y = n_x,  sum_x y <= M,  y <= n_x z away from home,  sum_x z <= S.
    """
    share_E = np.asarray(counts, float) * num_ranks / np.sum(counts)
    E, R = share_E.size, num_ranks
    away = np.arange(E)[:, None] // (E // R) != np.arange(R)
    y = np.arange(E * R).reshape(E, R)
    z, most = y + E * R, 2 * E * R
    entries, bounds = [], []

    def constrain(columns, values, low, high):
        row = np.full(len(columns), len(bounds))
        entries.append((row, np.asarray(columns), np.broadcast_to(values, len(columns))))
        bounds.append((low, high))

    for x in range(E):
        constrain(y[x], 1, share_E[x], share_E[x])
    for r in range(R):
        constrain([*y[:, r], most], [1] * E + [-1], -np.inf, 0)
        constrain(z[away[:, r], r], 1, 0, num_spare)
    for x, r in np.argwhere(away):
        constrain([y[x, r], z[x, r]], [1, -share_E[x]], -np.inf, 0)
    rows, columns, values = map(np.concatenate, zip(*entries, strict=True))
    matrix = coo_array((values, (rows, columns)), shape=(len(bounds), most + 1)).tocsr()
    is_z = (np.arange(most + 1) >= E * R) & (np.arange(most + 1) < most)
    found = milp(
        np.arange(most + 1) == most,
        constraints=LinearConstraint(matrix, *np.transpose(bounds)),
        integrality=is_z,
        bounds=Bounds(0, np.where(is_z, 1, R)),
        options={"time_limit": seconds, "mip_rel_gap": GAP},
    )
    return max(found.mip_dual_bound, 1.0)


def loads_by_loops(counts, plan, num_ranks):
    """Rows of each rank, row by row of a plan; refuses a plan that breaks a rule."""
    expert, rows = np.asarray(plan.expert), np.asarray(plan.rows)
    left = [int(n) for n in counts]
    num_local = len(left) // num_ranks
    load = [0] * num_ranks
    for rank in range(num_ranks):
        held = [int(x) for x in expert[rank] if x >= 0]
        assert len(set(held)) == len(held) and not any(x // num_local == rank for x in held)
        for x, n in zip(expert[rank], rows[rank], strict=True):
            assert n > 0 if x >= 0 else n == 0
            if x >= 0:
                left[x] -= int(n)
                load[rank] += int(n)
    assert min(left) >= 0
    return np.array(load) + np.reshape(left, (num_ranks, -1)).sum(axis=1)
