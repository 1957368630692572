"""Copies of experts' weights to spare slots and their gradients' return, over "nvlink" against all-to-all, on all GPUs.

A GPU has `EXPERTS` experts of 7168 x 2 x 2048 weights and two spare slots. All slots hold copies, or one hot expert is
copied to all others, or nothing is. Times are of what moves alone, and of the whole op, which writes the weights of all
slots; the gradients' are of the whole op. `bytes` leave the busiest GPU; its rate is also said as a part of the link's.
Where there are not two GPUs: "auto" against "all_to_all", to see it run. Ratios are speed-ups.
"""

import functools
import itertools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import _measure
from expertmesh.core import Float8BlockScaling
from expertmesh.core.linear.quantize_weight import quantize_weight
from expertmesh.ep import Copies, copy_experts

EXPERTS, SPARE = 8, 2
GPU, CPU = (7168, 2, 2048), (16, 2, 128)  # of an expert's weight
LINK = 450e9  # bytes/s that leave an H100 or H200 over NVLink at most, each way
OTHER = "all_to_all"


def on_gpus() -> bool:
    return jax.default_backend() == "gpu" and jax.device_count() > 1


def ours() -> tuple[str, ...]:
    return ("nvlink",) if on_gpus() else ("auto",)


def plans(ranks):
    """What slots hold, [ranks, SPARE] by name."""
    none = np.full((ranks, SPARE), -1, np.int32)
    full = (np.arange(ranks)[:, None] + 1) % ranks * EXPERTS + np.arange(SPARE)
    hot = none.copy()
    hot[1:, 0] = 0
    return {"all slots": full.astype(np.int32), "one hot expert": hot, "no copies": none}


def copies_out(held):
    """Copies that leave the busiest GPU."""
    away = held // EXPERTS != np.arange(len(held))[:, None]
    owners = held[(held >= 0) & away] // EXPERTS
    return int(np.bincount(owners, minlength=1).max())


def copy(held, name, tree):
    """Each array's copies, of the weights of all slots."""
    copies = Copies(jnp.asarray(held), ("ep",), name)
    return jax.tree.map(lambda x: copy_experts(x, copies), tree)


def copies_alone(held, name, tree):
    """What a device's spare slots hold."""
    each = PartitionSpec("ep")

    def on_device(*arrays):
        return [x[EXPERTS:] for x in copy(held, name, list(arrays))]

    return jax.shard_map(on_device, in_specs=each, out_specs=each)(*jax.tree.leaves(tree))


def gradients(held, name, given):
    """Of the experts, of those of all slots."""
    weights, cotangent = given
    return jax.vjp(functools.partial(copy, held, name), weights)[1](cotangent)[0]


def drawn(mesh, rows):
    """Weights [rows of each device, ...] in bfloat16."""
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)
    shape = (mesh.size * rows, *(GPU if on_gpus() else CPU))
    return draw(jax.random.key(0), shape, jnp.bfloat16)


def bytes_of(tree):
    """Of an expert."""
    return sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(tree))


def check(case, function, given):
    """What is wrong is not timed."""
    programs = {name: jax.jit(functools.partial(function, name)) for name in (*ours(), OTHER)}
    want = jax.tree.leaves(programs[OTHER](given))
    unlike = jax.jit(lambda a, b: jnp.any(a != b))
    for name in ours():
        for mine, other in zip(jax.tree.leaves(programs[name](given)), want, strict=True):
            assert not unlike(mine, other), (name, case)


def rows_of(case, function, given, num_bytes, pairs):
    """A row for each of our transports."""
    check(case, function, given)
    programs = {
        name: _measure.program(functools.partial(function, name), (given,), least=5)
        for name in (*ours(), OTHER)
    }
    turns = [{name: once() for name, once in programs.items()} for _ in range(pairs)]
    median = {name: statistics.median(turn[name] for turn in turns) for name in programs}
    for name in ours():
        rate = num_bytes / median[name]
        said = f"; {rate / 1e9:.0f} GB/s leave a GPU, {rate / LINK:.2f} of the link"
        yield _measure.row(
            bench="weight_copies",
            case=f"{name}, {case}",
            metric="time",
            value=1e6 * median[name],
            unit="us",
            reference=f"{OTHER}, {1e6 * median[OTHER]:.0f} us{said if num_bytes else ''}",
            ratio=statistics.median(turn[OTHER] / turn[name] for turn in turns),
            bytes=int(num_bytes),
        )


def all_rows(pairs):
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        weights = drawn(mesh, EXPERTS)
        both = weights, drawn(mesh, EXPERTS + SPARE)
        quantize = functools.partial(quantize_weight, recipe=Float8BlockScaling(), batch_dims=1)
        given = {
            "bfloat16": weights,
            "float8 with scales": jax.jit(quantize)(weights.reshape(*weights.shape[:2], -1)),
        }
        for where, held in plans(ranks).items():
            out = copies_out(held)
            functions = {"copies": copies_alone}
            if (held >= 0).all():
                functions["all slots' weights"] = copy
            for (what, function), (dtype, tree) in itertools.product(
                functions.items(), given.items()
            ):
                case = f"{what}, {dtype}, {where}, {ranks} ranks"
                yield from rows_of(
                    case, functools.partial(function, held), tree, out * bytes_of(tree), pairs
                )
            case = f"gradients, bfloat16, sums travel in float32, {where}, {ranks} ranks"
            # They come back from the GPUs that hold the copies.
            most = int((held >= 0).sum(axis=1).max())
            back = most * 2 * bytes_of(weights)
            yield from rows_of(case, functools.partial(gradients, held), both, back, pairs)


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    _measure.write(options.json, all_rows(options.pairs))


if __name__ == "__main__":
    main()
