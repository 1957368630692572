"""The plan of copies of experts, from the counts to what each spare slot holds, against our reference, a loop in XLA.

Counts are those of the workloads of `expertmesh.ep.testing`, with the experts placed by three steps before, and as they
are; the latter need the most steps. Ratios are speed-ups.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.ep import plan_copies
from expertmesh.ep.copy_plan import LEVELS, CopyPlan, best_of, plan_op
from expertmesh.ep.testing import make_choices
from expertmesh.flax_moe import place_experts

# ranks, experts, choices, tokens of a rank
GPU, CPU = ((64, 256, 8, 1024), (8, 64, 8, 4096)), ((8, 32, 4, 256),)
WORKLOADS = ("W1", "W4", "W7")
SPARE = 2
SECONDS = (6e-5, 3e-3)  # ours and the loop, about


def counts_of(workload, shape, step):
    """Rows of each expert, int32[E]."""
    ranks, experts, choices, tokens = shape
    sizes = dict(num_ranks=ranks, num_experts=experts, top_k=choices, tokens_per_rank=tokens)
    idx = make_choices(workload, **sizes, step=step)
    return np.bincount(idx[idx >= 0], minlength=experts).astype(np.int32)


def planned(implementation, ranks, counts):
    """The expert and the rows of each spare slot."""
    counts = counts.reshape(ranks, -1)
    options = dict(num_spare=SPARE, least_rows=0, levels=LEVELS)
    return best_of(CopyPlan(*plan_op(counts, **options, implementation=implementation)))


def check(ranks, counts):
    """The same plan, which no rank's load leaves by more than 2 %."""
    ours, other = (jax.jit(partial(planned, name, ranks))(counts) for name in ("auto", "reference"))
    for one, two in zip(ours, other, strict=True):
        np.testing.assert_array_equal(one, two)
    assert int(ours.load.max()) * ranks <= 1.02 * int(counts.sum()) + ranks
    np.testing.assert_array_equal(
        ours.rows, plan_copies(counts, num_ranks=ranks, num_spare=SPARE).rows
    )


def cases_of(shape):
    ranks, experts, _, _ = shape
    for workload in WORKLOADS:
        before = sum(counts_of(workload, shape, step) for step in range(3))
        counts = counts_of(workload, shape, 3)
        for where, now in (
            ("placed before", counts[place_experts(before, ranks)]),
            ("not placed", counts),
        ):
            given = (jnp.asarray(now),)
            case = f"EP {ranks}, {experts} experts, {SPARE} spare, {workload} {where}"
            ours, other = ((partial(planned, name, ranks), given) for name in ("auto", "reference"))
            yield _measure.time_case(
                "plan_copies", case, ours, other, "our reference", SECONDS,
                partial(check, ranks, *given),
            )  # fmt: skip


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes = GPU if jax.default_backend() == "gpu" else CPU
    cases = (case for shape in shapes for case in cases_of(shape))
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
