"""The census of collectives: what each op and layer moves between devices, read from compiled programs.

    python tests/census.py                    write tests/conformance/census.txt, which takes minutes
    python tests/census.py --check            compare only, and print what differs
        --only PATTERN                        of the rows whose name has the pattern
        --covering                            of the rows of `make test`

A line of the table is

    op | layout of the operands | pass | mesh modes | what crosses devices

The mesh is 8 virtual CPU devices: fsdp, ep and a third axis of 2 each, or a of 2 and b of 4. Modes are Explicit axes,
Auto axes under a MeshResource ("resource") or not ("auto"), and a user's shard_map over all axes ("manual"); those that
agree share a line. One that holds for one version of JAX only is named with it, such as auto/0.12. The pass "gradients"
is one program of the result and of all gradients, for given cotangents. What crosses devices is listed as

    number x kind over mesh axes, bytes, dtype

where the bytes are those of the collective's result on one device: of an all-gather the whole, of a reduce-scatter the
part, of an all-to-all all that it returns. A collective in a loop counts once. Programs are read as XLA's partitioner
leaves them, before XLA:CPU widens 8 and 16 bits, and before equal collectives become one, as the gathers of a weight
for forward and backward over Explicit axes do. Over Explicit axes and inside of a shard_map results are where types
say; if that is elsewhere than wanted, the line says so. Over Auto axes the program is told where they are wanted.

After a change that is meant to move other bytes, write the table anew, once for each version of JAX, and review its
difference.
"""

import argparse
import pathlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.census import MODES, Row, all_rows, covering_rows
from cases.virtual import use_virtual_devices
from expertmesh.core import global_shard_guard, hlo
from expertmesh.core.testing import compile_partitioned

TABLE = pathlib.Path(__file__).parent / "conformance/census.txt"
VERSION = ".".join(jax.__version__.split(".")[:2])
SEPARATOR = " | "
VERSIONS = "jax "  # begins the file
NOTHING = "nothing"
BY_TYPE = ("explicit", "manual")  # modes in which types say where results are

Key = tuple[str, str, str, str]  # of a Row
Table = dict[str, dict[Key, str]]  # version of JAX -> row -> what crosses devices


def measured(row: Row) -> str:
    """What crosses devices in the row's program; a warning, such as of an axis that shards no work, is an error."""
    under = row.mode in ("resource", "manual") or (row.mode == "explicit" and row.where.roles)
    with global_shard_guard(row.where.resource if under else None), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        program, wanted = _program(row, row.where.given if under else {})
        compiled, text = compile_partitioned(program)
    found = Counter(moved(one, row.where.axes) for one in hlo.collectives(text))
    parts = [f"{f'{n} x ' * (n > 1)}{one}" for one, n in sorted(found.items())]
    return ", ".join(parts + _elsewhere(compiled, wanted)) or NOTHING


def moved(found: hlo.Collective, axes: Mapping[str, int]) -> str:
    """Kind, axes, bytes and dtype of a collective."""
    over = _axes(found, axes)
    dtypes = "+".join(sorted({shape.partition("[")[0] for shape in found.shapes}))
    size = sum(map(hlo.num_bytes, found.shapes))
    return f"{found.kind} {'+'.join(over or ('unknown',))} {size} {dtypes}"


def _axes(found: hlo.Collective, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    if not found.groups:
        return tuple(axes)
    if found.kind != "collective-permute":
        return hlo.axes_of(found.groups, axes)
    places = [np.unravel_index(pair, tuple(axes.values())) for pair in found.groups]
    return tuple(
        axis for axis, of in zip(axes, zip(*places, strict=True), strict=True) if _differ(of)
    )


def _differ(pairs) -> bool:
    return any(source != target for source, target in pairs)


def _program(row: Row, given: Mapping):
    """(lowered program, where each of its results is wanted, None where that is not said)."""
    where, wrt = row.where, row.subject.wrt if row.direction == "gradients" else ()
    mesh = _mesh(row)
    place = partial(_placed, mesh)
    operands = tuple(
        jax.tree.map(place, *of)
        for of in zip(row.subject.operands(where), where.specs, strict=True)
    )
    function = _on_leaves(row, mesh, given)
    results = jax.eval_shape(function, *operands)
    specs = [*(where.results or ()), *[None] * (len(results) - len(where.results or ()))]
    both = [(x, spec) for x, spec in zip(results, specs, strict=True) if not wrt or _is_float(x)]
    cotangents = [place(x, PartitionSpec() if s is None else s) for x, s in both] if wrt else []
    wanted = [None if s is None else NamedSharding(mesh, s) for _, s in both]
    wanted += [x.sharding for i in wrt for x in jax.tree.leaves(operands[i])]
    # Over Auto axes nothing but a consumer says where results are wanted.
    options = {} if row.mode in BY_TYPE else dict(out_shardings=wanted)
    jitted = jax.jit(partial(_with_gradients, function, wrt), **options)
    return jitted.lower(operands, cotangents), wanted


def _mesh(row: Row):
    kind = AxisType.Explicit if row.mode == "explicit" else AxisType.Auto
    axes = row.where.axes
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def _placed(mesh, x, spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _on_leaves(row: Row, mesh, given: Mapping):
    """The row's function, in its mode: all results as a list of arrays."""

    def function(*operands):
        return jax.tree.leaves(row.subject.function(*operands, **given))

    if row.mode != "manual":
        return function
    results = list(row.where.results)
    return jax.shard_map(function, mesh=mesh, in_specs=row.where.specs, out_specs=results)


def _with_gradients(function, wrt, operands, cotangents):
    """The results, and if `wrt` those of floats and the gradients of these operands."""
    if not wrt:
        return function(*operands)

    def of(*chosen):
        chosen = dict(zip(wrt, chosen, strict=True))
        results = function(*(chosen.get(i, x) for i, x in enumerate(operands)))
        return [x for x in results if _is_float(x)]

    results, pull = jax.vjp(of, *(operands[i] for i in wrt))
    like_results = map(_laid_out_like, cotangents, results)
    return results + jax.tree.leaves(pull(list(like_results)))


def _laid_out_like(x, like):
    sharding = jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, sharding) if explicit else x


def _elsewhere(compiled, wanted) -> list[str]:
    """Where a result is, if it is not where it is wanted."""
    got = zip(compiled.output_shardings, jax.tree.leaves(compiled.out_info), strict=True)
    return [
        f"result {i} over {sharding.spec}"
        for i, ((sharding, x), want) in enumerate(zip(got, wanted, strict=True))
        if want is not None and not sharding.is_equivalent_to(want, len(x.shape))
    ]


def read(text: str) -> Table:
    """The table of a file."""
    first, *lines = text.splitlines()
    table: Table = {version: {} for version in first.removeprefix(VERSIONS).split(", ")}
    for line in lines:
        subject, layout, direction, modes, outcome = line.split(SEPARATOR)
        for mode in modes.split(", "):
            mode, _, version = mode.partition("/")
            for of in [version] if version else table:
                table[of][subject, layout, direction, mode] = outcome
    return table


def written(table: Table) -> str:
    """The file of a table."""
    lines = [VERSIONS + ", ".join(sorted(table))]
    keys = dict.fromkeys(key[:3] for rows in table.values() for key in rows)
    for key in keys:
        modes: dict[str, list[str]] = {}
        for mode in MODES:
            found = {v: rows[*key, mode] for v, rows in table.items() if (*key, mode) in rows}
            alike = len(set(found.values())) == 1
            for version, outcome in {"": [*found.values()][0]}.items() if alike else found.items():
                modes.setdefault(outcome, []).append(mode + f"/{version}" * bool(version))
        lines += [SEPARATOR.join((*key, ", ".join(m), outcome)) for outcome, m in modes.items()]
    return "\n".join(lines) + "\n"


def renewed(table: Table, found: dict[Key, str]) -> Table:
    """The table with what this version of JAX gives; of others, rows that are new are taken to be the same."""
    others = {
        version: {key: rows.get(key, outcome) for key, outcome in found.items()}
        for version, rows in table.items()
    }
    return others | {VERSION: found}


def differences(table: Table, rows: Iterable[Row]) -> list[str]:
    """A line for each row that is not as in the table, before and after."""
    lines = []
    for row in rows:
        want, got = table[VERSION].get(row.key), measured(row)
        if got != want:
            lines += [f"  {SEPARATOR.join(row.key)}", f"    - {want}", f"    + {got}"]
    return lines


def main() -> int:
    use_virtual_devices()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of a row's name")
    parser.add_argument("--covering", action="store_true", help="the rows of `make test`")
    args = parser.parse_args()
    rows = covering_rows() if args.covering else all_rows()
    rows = [row for row in rows if re.search(args.only, SEPARATOR.join(row.key))]
    table = read(TABLE.read_text()) if TABLE.exists() else {}
    if args.check and VERSION not in table:
        table[VERSION] = next(iter(table.values()))
    if args.check:
        lines = differences(table, rows)
        print(*lines, sep="\n")
        return bool(lines)
    found = {}
    for i, row in enumerate(rows):
        found[row.key] = measured(row)
        if i % 100 == 99:
            print(f"{i + 1} of {len(rows)} rows", file=sys.stderr)
    # Rows that are not compiled now are as they were, under another version if this one is new.
    before = table.get(VERSION) or next(iter(table.values()), {})
    every = {row.key: found.get(row.key, before.get(row.key)) for row in all_rows()}
    TABLE.write_text(written(renewed(table, {k: v for k, v in every.items() if v is not None})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
