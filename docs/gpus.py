"""Writes the tables of GPUs of docs/gpus.md and README.md: what is known of each recipe on each, from committed files.

python docs/gpus.py            write them
python docs/gpus.py --check    exit status 1 if a page is not what would be written

Facts: the devices of benchmarks/results and ci/summaries, the capabilities for which tests/aot compiles kernels and
those whose kernels tests run as PTX (tests/cases/gpus.py), and `is_supported`.
"""

import argparse
import ast
import dataclasses
import functools
import json
import pathlib
import sys
import types
from unittest import mock

from marks import filled

from expertmesh.core import RECIPES, features, is_supported

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
BEGIN = "<!-- docs/gpus.py -->"
COMPILING, RUNNING = ROOT / "tests/aot/test_kernels.py", ROOT / "tests/cases/gpus.py"
BFLOAT16 = "bfloat16"
WHOLE = (BFLOAT16, *RECIPES)
SHORT = (BFLOAT16, "fp8_current", "fp8_block", "mxfp8")
OLDEST = 80  # for which there are kernels


@dataclasses.dataclass(frozen=True)
class Gpu:
    """GPUs of one chip.

    Attributes:
      name: as people call them.
      capability: ten times the compute capability.
      device: in what JAX calls one.
    """

    name: str
    capability: int
    device: str


GPUS = (
    Gpu("V100, T4", 75, "V100"),
    Gpu("A100", 80, "A100"),
    Gpu("A10, RTX 30", 86, "A10"),
    Gpu("L40, RTX 40", 89, "L40"),
    Gpu("H100", 90, "H100"),
    Gpu("H200", 90, "H200"),
    Gpu("B200", 100, "B200"),
    Gpu("RTX 50", 120, "RTX 50"),
)


def constants(path: pathlib.Path) -> dict[str, object]:
    """The literals that a module gives names to."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:  # no literal
                continue
    return found


@functools.cache
def compiled() -> dict[bool, tuple[int, ...]]:
    """The capabilities for which kernels are compiled: of 16 bits, and of 8."""
    found = constants(COMPILING)
    return {False: tuple(found["SHARED_LIMIT"]), True: found["ARCHS_OF_8_BITS"]}


@functools.cache
def run_as_ptx() -> dict[bool, tuple[int, ...]]:
    """The capabilities whose kernels a GPU of another runs as PTX: of 16 bits, and of 8."""
    found = constants(RUNNING)
    of_16 = {name: of for name, of in found["CHOSEN_FOR"].items() if name.startswith("PTX")}
    of_8 = [name for name, of in of_16.items() if of >= found["FIRST_OF_8_BITS"]]
    return {
        bits: tuple(int(name.rpartition("_")[2]) for name in names)
        for bits, names in ((False, of_16), (True, of_8))
    }


@functools.cache
def tested() -> tuple[str, ...]:
    """The devices on which all of core's tests passed."""
    paths = (ROOT / "ci/summaries").glob("core-*.json")
    summaries = [summary for path in paths for summary in json.loads(path.read_text())]
    return tuple(summary["device"] for summary in summaries if summary["ok"])


@functools.cache
def measured() -> frozenset[tuple[str, str]]:
    """(device, first word of the case) of benchmarks' results."""
    paths = (ROOT / "benchmarks/results").glob("*.json")
    rows = [row for path in paths for row in json.loads(path.read_text())]
    return frozenset((row["device"], row["case"].split()[0].strip(",")) for row in rows)


def is_native(gpu: Gpu, recipe: str) -> bool:
    """Whether GEMMs multiply a recipe's operands as they are, where Triton is installed."""
    device = types.SimpleNamespace(
        platform="gpu", compute_capability=str(gpu.capability / 10), device_kind=gpu.name
    )
    with mock.patch.object(features, "triton_unsupported", lambda: None):
        return recipe == BFLOAT16 or is_supported(recipe, device)[0]


def evidence(gpu: Gpu, recipe: str) -> str:
    """The best that the files have for a recipe on a GPU."""
    if gpu.capability < OLDEST:
        return "reference"
    of_8_bits = recipe != BFLOAT16 and is_native(gpu, recipe)
    alike = [each.device for each in GPUS if each.capability == gpu.capability]
    if any(gpu.device in device and case == recipe for device, case in measured()):
        return "measured"
    if any(gpu.device in device for device in tested()):
        return "run"
    if any(each in device for each in alike for device in tested()):
        return "run elsewhere"
    if tested() and gpu.capability in run_as_ptx()[of_8_bits]:
        return "run elsewhere"
    return "compiled" if gpu.capability in compiled()[of_8_bits] else "not compiled"


def cell(gpu: Gpu, recipe: str) -> str:
    found = evidence(gpu, recipe)
    emulated = found != "reference" and not is_native(gpu, recipe)
    return f"{found}, emulated" if emulated else found


def table(recipes: tuple[str, ...], oldest: int = 0) -> str:
    """Of GPUs from a capability on."""
    rows = [["GPU", "compute capability", *(f"`{name}`" for name in recipes)]]
    rows.append(["---"] * len(rows[0]))
    for gpu in (gpu for gpu in GPUS if gpu.capability >= oldest):
        capability = (
            f"{gpu.capability / 10}" if gpu.capability >= OLDEST else f"below {OLDEST / 10}"
        )
        rows.append([gpu.name, capability, *(cell(gpu, recipe) for recipe in recipes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = 0
    for page, *of in ((DOCS / "gpus.md", WHOLE), (ROOT / "README.md", SHORT, OLDEST)):
        old = page.read_text()
        new = filled(old, BEGIN, table(*of))
        stale += new != old
        if not options.check:
            page.write_text(new)
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
