"""Draws the pictures of concepts: what is in 8 bits where, what a mesh splits, and what an uneven load costs.

python docs/pictures.py            write fp8_flow.svg, mesh.svg and balance.svg
python docs/pictures.py --check    exit status 1 if they are not what would be written
"""

import argparse
import pathlib
import sys

from exchange import arrow, box, picture, words

DOCS = pathlib.Path(__file__).resolve().parent
BYTE, TWO, FOUR = "#fdd0a2", "#c6dbef", "#eee"  # 8, 16 and 32 bits


def legend(x: int, y: int) -> list[str]:
    parts = []
    for color, name in ((BYTE, "8 bits and scales"), (TWO, "16 bits"), (FOUR, "float32")):
        parts += [box(x, y, 22, 16, "", color), words(x + 28, y + 13, name)]
        x += 150
    return parts


def fp8_flow() -> str:
    """The forward and the backward of a block's experts under `fp8_block`."""
    parts = [words(20, 26, "Forward", size=15), *legend(330, 12)]
    rows = (
        (50, "tokens", (("x", TWO), ("quantized", BYTE), ("dispatched", BYTE)), "over ep"),
        (110, "weights", (("masters", FOUR), ("quantized", BYTE), ("gathered", BYTE)), "over fsdp"),
    )
    for y, name, steps, over in rows:
        parts.append(words(20, y + 24, name))
        for i, (label, color) in enumerate(steps):
            x = 90 + 130 * i
            parts.append(box(x, y, 96, 38, label, color))
            if i:
                parts.append(arrow(x - 34, y + 19, x - 2, y + 19))
        parts.append(words(350 - 17, y - 6, over, "middle", 11))
        parts.append(arrow(446, y + 19, 478, 98 if y == 50 else 110))
    parts += [
        box(480, 80, 70, 50, "GEMM up"),
        arrow(550, 105, 578, 105),
        box(580, 80, 92, 50, "activation", TWO),
        arrow(672, 105, 700, 105),
        box(702, 80, 92, 50, "quantized", BYTE),
        words(626, 74, "one pass, one kernel", "middle", 11),
        arrow(748, 130, 748, 158),
        box(702, 160, 92, 38, "GEMM down"),
        arrow(702, 179, 594, 179),
        box(500, 160, 92, 38, "combined", TWO),
        words(648, 172, "over ep", "middle", 11),
        arrow(500, 179, 392, 179),
        box(294, 160, 96, 38, "y", TWO),
        words(20, 246, "Backward", size=15),
        words(20, 294, "dy"),
        box(90, 270, 96, 38, "dispatched", TWO),
        arrow(186, 289, 218, 289),
        box(220, 270, 130, 38, "quantized, both ways", BYTE),
        arrow(350, 282, 398, 272),
        arrow(350, 296, 398, 316),
        box(400, 252, 150, 38, "GEMMs to dx"),
        box(400, 300, 150, 38, "GEMMs to dw"),
        words(285, 324, "along features, along rows", "middle", 11),
        arrow(550, 271, 598, 271),
        box(600, 252, 194, 38, "dx combined over ep", TWO),
        arrow(550, 319, 598, 319),
        box(600, 300, 194, 38, "dw reduce-scattered", FOUR),
    ]
    return picture(820, 356, parts)


def mesh() -> str:
    """What each of 2 x 2 devices holds, and what moves along which axis."""
    parts = [words(310, 24, "fsdp", "middle", 15), arrow(350, 19, 470, 19), arrow(270, 19, 150, 19)]
    parts += [words(20, 176, "ep", size=15), arrow(28, 190, 28, 250), arrow(28, 158, 28, 98)]
    for row in range(2):
        for column in range(2):
            x, y, device = 60 + 280 * column, 40 + 150 * row, 2 * column + row
            parts.append(box(x, y, 220, 110, "", "white"))
            experts, half = ("0 to 3", "4 to 7")[row], ("first", "second")[column]
            for i, (text, color) in enumerate(
                (
                    (f"tokens: part {device} of 4", TWO),
                    (f"wi, wo: experts {experts}", FOUR),
                    (f"of these the {half} half of D", FOUR),
                )
            ):
                parts.append(box(x + 8, y + 8 + 32 * i, 204, 28, text, color))
    for y in (95, 245):
        parts += [arrow(290, y, 332, y), arrow(330, y + 14, 288, y + 14)]
    for x in (170, 450):
        parts += [arrow(x - 8, 154, x - 8, 184), arrow(x + 8, 186, x + 8, 156)]
    parts += [
        words(620, 80, "Along fsdp: weights are gathered"),
        words(620, 98, "before their GEMM; their gradients"),
        words(620, 116, "are reduce-scattered."),
        words(620, 220, "Along ep: tokens go to their experts"),
        words(620, 238, "and come back. No weight moves."),
    ]
    return picture(860, 320, parts)


def balance() -> str:
    """Two ranks of four experts each, under three loads; the step ends with the fuller rank."""
    loads = (
        ("left alone", (9, 7, 6, 4, 2, 2, 1, 1)),
        ("placed by load", (9, 4, 2, 1, 7, 6, 2, 1)),
        ("balanced", (4, 4, 4, 4, 4, 4, 4, 4)),
    )
    parts = []
    for i, (name, counts) in enumerate(loads):
        x = 30 + 270 * i
        parts.append(words(x, 24, name, size=14))
        for j, count in enumerate(counts):
            left = x + 27 * j + (10 if j > 3 else 0)
            height = 12 * count
            parts.append(box(left, 150 - height, 22, height, "", TWO if j < 4 else BYTE))
        ranks = sum(counts[:4]), sum(counts[4:])
        for rank, rows in enumerate(ranks):
            parts.append(words(x + 118 * rank, 172, f"rank {rank}: {rows} rows"))
        parts.append(words(x, 192, f"the step waits for {max(ranks)}; even is {sum(ranks) // 2}"))
    return picture(840, 206, parts)


PICTURES = {"fp8_flow.svg": fp8_flow, "mesh.svg": mesh, "balance.svg": balance}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    drawn = {DOCS / name: draw() for name, draw in PICTURES.items()}
    if options.check:
        return int(any(not p.exists() or p.read_text() != text for p, text in drawn.items()))
    for path, text in drawn.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
