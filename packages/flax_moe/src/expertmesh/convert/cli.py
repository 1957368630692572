"""The command line. Exit codes are 0: done; 2: bad input, one line on stderr says which; 130: interrupted."""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

PROGRAM = "python -m expertmesh.convert"
NAMES = ("expertmesh", "huggingface")
_DTYPES = ("bfloat16", "float16", "float32")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses `argv` (`sys.argv[1:]` when None), converts, and returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        _convert(**vars(options))
    except (ValueError, OSError) as error:
        print(f"convert: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert: interrupted; the target is not whole: remove it", file=sys.stderr)
        return 130
    return 0


def _convert(*, quiet: bool, **options: Any) -> None:
    # Nothing here is worth a GPU, whose memory JAX would take.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from expertmesh.convert.model import convert  # after the options: it imports JAX

    convert(**options, progress=None if quiet else ProgressLine(sys.stderr))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Convert the MoE layers of a checkpoint folder of safetensors files between Hugging Face's names "
        "and expertmesh's. All other weights and files are copied unchanged.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", help="a folder with config.json and *.safetensors, under either names")
    add("target", help="a new folder")
    add("--to", choices=NAMES, required=True, help="whose names the target has")
    add(
        "--dtype",
        choices=_DTYPES,
        help="of the MoE layers' weights that are not in 8 bits (default: their own)",
    )
    add(
        "--fp8",
        action="store_true",
        help="experts in 8 bits, a scale for each 128 x 128 block (weight_block_size); default: widened",
    )
    add("--prefix", default="model.", help="what stands before `layers.` (default %(default)s)")
    add(
        "--max-shard-size",
        type=_size,
        default=_size("5GB"),
        metavar="SIZE",
        help="of a file (default 5GB)",
    )
    add("--quiet", action="store_true", help="no progress line")
    return parser


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", text.upper())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"must be a size above 0; got {text!r}; write it like 5GB or 200MB"
        )
    return int(float(found[1]) * _UNITS[found[2]])


class ProgressLine:
    """One line that is written again and again; where nobody watches, a line for each tenth.

    Attributes:
      stream: what it is written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self._begun, self._shown = stream, time.monotonic(), -1.0

    def __call__(self, what: str, fraction: float) -> None:
        """Takes what has just been written, and which fraction of all there is."""
        watched = self.stream.isatty()
        if fraction < 1 and fraction - self._shown < (0.001 if watched else 0.1):
            return
        self._shown = fraction
        left = (time.monotonic() - self._begun) * (1 / max(fraction, 1e-9) - 1)
        text = f"convert: {fraction:4.0%} {left:.0f} s left, {what}"
        end = "\n" if fraction >= 1 or not watched else ""
        self.stream.write(f"\r{text:<100.100}{end}" if watched else f"{text}\n")
        self.stream.flush()
