"""Exchanges by "nvlink" against XLA's ragged_all_to_all in the same run, over all GPUs of this process.

A dispatch begins with tokens and ends with rows in order of experts, which a grouped GEMM can take; a combine begins
with such rows and ends with the tokens' sums. Each is measured on at most 48 SMs and on as many as are fastest. Where
there are not two GPUs: "auto" against "all_to_all", to see it run. Then how time grows from half as many GPUs, and
"nvlink" against the other transports for few and many tokens. docs/exchange.py draws the rates.
"""

import functools
import itertools
import statistics

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
TOKENS = (16, 512, 8192)  # of a GPU
PUSH = (65536, 4096)  # tokens of a GPU, width
# Calls that are timed at least: of XLA's, which takes over 10 ms; where all take milliseconds; else.
FEW, SOME, MANY = 3, 30, 100


@jax.jit
def relative_error(a, b):
    """On the devices: rows are gigabytes."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def on_gpus() -> bool:
    return jax.default_backend() == "gpu" and jax.device_count() > 1


def ours() -> tuple[str, ...]:
    return ("nvlink:48", "nvlink") if on_gpus() else ("auto",)


def other() -> str:
    """The transport to compare with."""
    return "ragged" if on_gpus() else "all_to_all"


def pushes(ranks, tokens):
    """Whom tokens go to -> how many ranks further on that is, [tokens, K]."""
    token, others = np.arange(tokens)[:, None], ranks - 1
    found = {"the next rank": 1 + 0 * token}
    if others > 1:
        found[f"one of {others} ranks in turn"] = 1 + token % others
        found[f"all {others} others"] = 1 + 0 * token + np.arange(others)
    return found if others else {}


def operands(shape, ranks, ahead=None):
    """A handle and tokens, each of drawn experts; or of one of each rank that is so far ahead, int[tokens, choices]."""
    tokens, width, choices, experts = shape
    devices = jax.devices()[:ranks]
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(AxisType.Explicit,), devices=devices)
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    rng = np.random.default_rng(0)
    if ahead is not None:
        owner = (np.arange(ranks)[:, None, None] + ahead).reshape(-1, choices) % ranks
        local = experts // ranks
        topk_idx = owner * local + rng.integers(local, size=owner.shape)
        capacity = tokens * choices  # as many arrive as leave
    else:
        topk_idx = np.argsort(rng.random((ranks * tokens, experts)), axis=1)[:, :choices]
        most = recv_capacity(experts, choices, tokens, ranks)
        capacity = min(most, int(1.1 * tokens * choices) + 64)
    config = EpConfig(num_experts=experts, capacity=capacity, axis="ep")
    handle = prepare(jax.device_put(topk_idx.astype(np.int32), sharding), config)
    assert int(jnp.max(handle.num_dropped)) == 0
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)
    return handle, draw(jax.random.key(0), (ranks * tokens, width), jnp.bfloat16)


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


def both_wide(transport, handle, x):
    return combine(handle, dispatch(handle, x, transport=transport), transport=transport)


def move(transport, handle, x):
    return dispatch(handle, x, transport=transport)


def there_and_back(transport, handle, x):
    rows = dispatch(handle, x, transport=transport)
    return combine(handle, rows, transport=transport, wire_format="bfloat16")


def check(case, function, given, names):
    """What is wrong is not timed."""
    want = jax.jit(functools.partial(function, "all_to_all"))(*given)
    for name in names:
        mine = jax.jit(functools.partial(function, name))(*given)
        for a, b in zip(*map(jax.tree.leaves, (mine, want)), strict=True):
            assert relative_error(a, b) < 1e-2, (name, case)


def times(function, given, names, pairs, least=MANY):
    """transport -> seconds of each turn."""
    programs = {
        name: _measure.program(
            functools.partial(function, name), given, least=FEW if name == "ragged" else least
        )
        for name in names
    }
    turns = [{name: once() for name, once in programs.items()} for _ in range(pairs)]
    return {name: [turn[name] for turn in turns] for name in names}


def rows_of(case, function, given, pairs, num_bytes=0, names=None, references=None, least=MANY):
    """A row for each of our transports against each of `references`."""
    names, references = names or ours(), references or (other(),)
    check(case, function, given, names)
    timed = times(function, given, (*names, *references), pairs, least)
    for name, reference in itertools.product(names, references):
        seconds, theirs = (statistics.median(timed[which]) for which in (name, reference))
        rate = f"; {num_bytes / seconds / 1e9:.0f} GB/s leave a GPU" if num_bytes else ""
        ratios = [b / a for a, b in zip(timed[name], timed[reference], strict=True)]
        yield _measure.row(
            bench="dispatch",
            case=f"{name}, {case}",
            metric="time",
            value=1e6 * seconds,
            unit="us",
            reference=f"{reference}, {1e6 * theirs:.0f} us{rate}",
            ratio=statistics.median(ratios),
            bytes=int(num_bytes),
        )


def drawn(ranks):
    """What tokens of drawn experts give: (case, function, operands, bytes that leave a GPU)."""
    shape = GPU if on_gpus() else CPU
    tokens, width, choices, experts = shape
    handle, x = operands(shape, ranks)
    case = f"{ranks} ranks, {tokens} tokens each x {width}, {choices} of {experts} experts"
    for name, (function, given, num_bytes) in passes(handle, x).items():
        yield f"{name}, {case}", function, given, num_bytes


def rows_for(ranks, pairs):
    for case, function, given, num_bytes in drawn(ranks):
        yield from rows_of(case, function, given, pairs, num_bytes)
    if on_gpus():
        handle, x = operands(DECODE, ranks)
        case = f"dispatch and combine, {ranks} ranks, {DECODE[0]} tokens each"
        yield from rows_of(case, there_and_back, (handle, x), pairs)
    tokens, width = PUSH if on_gpus() else CPU[:2]
    for where, ahead in pushes(ranks, tokens).items():
        handle, x = operands((tokens, width, ahead.shape[1], GPU[-1]), ranks, ahead)
        num_bytes = 2 * width * remote_copies(handle)
        case = f"every token to {where}, {ranks} ranks, {tokens} tokens each x {width}"
        # XLA's would take 5 us for each row.
        compared = {"references": ("all_to_all",), "least": SOME}
        yield from rows_of(case, move, (handle, x), pairs, num_bytes, **compared)


def rows_by_tokens(ranks, pairs):
    """A dispatch and a combine of few and many tokens, against what else could be taken."""
    _, width, choices, experts = GPU
    for tokens in TOKENS:
        handle, x = operands((tokens, width, choices, experts), ranks)
        case = f"both ways, {ranks} ranks, {tokens} tokens each x {width}"
        num_bytes = 6 * width * remote_copies(handle)  # sums go back in float32
        others = ("all_to_all", "ring")
        yield from rows_of(
            case, both_wide, (handle, x), pairs, num_bytes, names=("nvlink",), references=others
        )


def growth(rows, ranks, pairs):
    """Rows: how much longer what `rows` say takes than with fewer ranks, and how many more bytes leave a GPU."""
    many = {row["case"]: row for row in rows if row["bytes"]}
    for case, function, given, num_bytes in drawn(ranks):
        for name, seconds in times(function, given, ours(), pairs).items():
            row = many[f"{name}, {case}".replace(f"{ranks} ranks", f"{jax.device_count()} ranks")]
            longer = row["value"] / (1e6 * statistics.median(seconds))
            more = row["bytes"] / num_bytes
            yield row | {
                "case": f"{row['case']}, time against {ranks} ranks",
                "metric": "ratio",
                "value": round(longer, 3),
                "unit": "times",
                "reference": f"bytes, {more:.2f} times",
                "ratio": round(more / longer, 4),
            }


def all_rows(pairs):
    count, rows = jax.device_count(), []
    for one in rows_for(count, pairs):
        rows.append(one)
        yield one
    if not on_gpus():
        return
    if count > 2:
        yield from growth(rows, count // 2, pairs)
    yield from rows_by_tokens(count, pairs)


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    _measure.write(options.json, all_rows(options.pairs))


if __name__ == "__main__":
    main()
