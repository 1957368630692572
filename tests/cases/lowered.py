"""Reads lowered StableHLO, in which XLA:CPU has not yet widened what devices add."""

import re

_SUM = r"stablehlo\.(all_reduce|reduce_scatter)\"[\s\S]*?\}\) : .*? -> tensor<(\w+)>"


def sums(text: str) -> list[tuple[str, str]]:
    """(kind, type of the result, such as "4x3xbf16") of each sum over devices."""
    return re.findall(_SUM, text)
