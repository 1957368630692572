"""Draws the figure of docs/architecture.md: which room of the house uses which, as the sources say.

python docs/house.py            write house.svg
python docs/house.py --check    exit status 1 if it is not what would be written
"""

import argparse
import ast
import pathlib
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter

DOCS = pathlib.Path(__file__).resolve().parent
PACKAGES = DOCS.parent / "packages"
# Rooms by their modules; a module is in the room whose name here is the longest that fits.
ROOMS = {
    "expertmesh.core": "core: Op, rules, meshes",
    "expertmesh.core.ops": "core/ops",
    "expertmesh.core.quantization": "core/quantization",
    "expertmesh.core.kernels": "core/kernels",
    "expertmesh.core.features": "core/features.py",
    "expertmesh.core.linear": "core/linear",
    "expertmesh.core.router": "core/router",
    "expertmesh.core.te_compat": "core/te_compat",
    "expertmesh.ep": "ep",
    "expertmesh.flax_moe": "flax_moe",
    "expertmesh.convert": "convert",
    "expertmesh.maxtext": "maxtext",
    "expertmesh.train": "train",
    "expertmesh.report": "report",
}
FACADE = "expertmesh.core"  # its __init__.py names what is public of all rooms
CELL, LEFT, TOP = 26, 190, 34


def modules() -> dict[str, str]:
    """Every module's source, by its dotted name."""
    texts = {}
    for root in PACKAGES.glob("*/src"):
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            texts[name] = path.read_text()
    del texts[FACADE]
    return texts


def uses(text: str) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it is imported); else a string has it, as of a kernel that is imported when launched."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", True) for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(
            "expertmesh.core.kernels."
        ):
            yield node.value, False


def room_of(name: str) -> str | None:
    while name and name not in ROOMS:
        name = name.rpartition(".")[0]
    return ROOMS.get(name)


def arrows() -> dict[tuple[str, str], bool]:
    """(a room, another that it uses): whether it imports it, or only names its kernels."""
    found: dict[tuple[str, str], bool] = {}
    for module, text in modules().items():
        for name, imported in uses(text):
            pair = room_of(module), room_of(name)
            if pair[0] and pair[1] and pair[0] != pair[1]:
                found[pair] = found.get(pair, False) or imported
    return found


def ordered(found: dict[tuple[str, str], bool]) -> list[str]:
    """The rooms, each behind those that it imports; an error where these go in circles."""
    graph = {
        room: sorted(b for (a, b), imported in found.items() if a == room and imported)
        for room in ROOMS.values()
    }
    return list(TopologicalSorter(graph).static_order())


def words(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="13" text-anchor="{anchor}">{text}</text>'


def figure() -> str:
    found = arrows()
    rooms = ordered(found)
    size = len(rooms) * CELL
    area = f'width="{LEFT + size + 20}" height="{TOP + size + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {area} font-family="sans-serif">'
    parts = [head, f'<rect {area} fill="white"/>']
    for i, room in enumerate(rooms):
        at = TOP + i * CELL
        parts += [
            f'<line x1="10" y1="{at}" x2="{LEFT + size}" y2="{at}" stroke="#ddd"/>',
            words(LEFT - 14, at + 18, f"{room} &#160; {i + 1}", "end"),
            words(LEFT + (i + 0.5) * CELL, TOP - 10, str(i + 1), "middle"),
            f'<rect x="{LEFT + i * CELL}" y="{at}" width="{CELL}" height="{CELL}" fill="#ccc"/>',
        ]
    for (a, b), imported in sorted(found.items()):
        x, y = LEFT + (rooms.index(b) + 0.5) * CELL, TOP + (rooms.index(a) + 0.5) * CELL
        fill = "#08519c" if imported else "white"
        parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{fill}" stroke="#08519c" stroke-width="2"/>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    path, text = DOCS / "house.svg", figure()
    if parser.parse_args().check:
        return int(path.read_text() != text)
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
