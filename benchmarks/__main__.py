"""Runs the benchmarks of this folder: `python -m benchmarks [NAME...] [--out FOLDER] [--gpus N]`.

With `--gpus` those of one GPU run side by side, each on a GPU and on cores of its own, the longest first; then those of
several GPUs, alone. All rows are printed at the end once more.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import subprocess
import sys
import time

from benchmarks import _measure, runnable

SEVERAL = (
    "block_launches",
    "dispatch",
    "moe_block",
    "weight_copies",
)  # use all GPUs that there are
# Of the others, in order of their time.
LONG = (
    "compile_time",
    "quantized_by_tensor",
    "grouped_gemm",
    "quantized_gemm",
    "uneven_groups",
    "quantized_by_32",
)


def run(name: str, out: pathlib.Path, env: dict[str, str], log=None) -> bool:
    """Whether a benchmark ended well."""
    path = out / f"{name}.json"
    path.unlink(missing_ok=True)  # of a run before
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
    print("+", *command[1:], flush=True)
    start = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | env, stdout=log, stderr=log and subprocess.STDOUT
    )
    print(f"{name} ended with {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
    return done.returncode == 0


def side_by_side(names: list[str], out: pathlib.Path, count: int) -> dict[str, bool]:
    """The same of several, each on one of so many GPUs; what they print goes to files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    cores = sorted(os.sched_getaffinity(0))
    free: queue.Queue[int] = queue.Queue()
    for place in range(count):
        free.put(place)

    def one(name):
        place = free.get()
        os.sched_setaffinity(0, cores[place::count])  # of this thread, and what it starts
        try:
            with (out / f"{name}.log").open("w") as log:
                return run(name, out, {"CUDA_VISIBLE_DEVICES": visible[place]}, log)
        finally:
            free.put(place)

    names = sorted(names, key=lambda name: LONG.index(name) if name in LONG else len(LONG))
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def print_rows(names: list[str], out: pathlib.Path) -> None:
    """Also of a benchmark that failed: the rows that it wrote before."""
    for path in (out / f"{name}.json" for name in names):
        for row in json.loads(path.read_text()) if path.exists() else ():
            print(f"{path.stem}: {_measure.line(row)}", flush=True)


def main() -> int:
    names = runnable()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(names)}")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench"))
    parser.add_argument("--gpus", type=int, metavar="N", help="how many to use side by side")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {names}")
    options.out.mkdir(parents=True, exist_ok=True)
    wanted, ok = options.names or names, {}
    if options.gpus:
        ok = side_by_side([n for n in wanted if n not in SEVERAL], options.out, options.gpus)
    ok |= {name: run(name, options.out, {}) for name in wanted if name not in ok}
    print_rows(wanted, options.out)
    failed = [name for name in wanted if not ok[name]]
    print(f"failed: {', '.join(failed)}" if failed else f"results are in {options.out}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
