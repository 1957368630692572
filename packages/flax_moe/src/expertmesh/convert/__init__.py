"""Whole models: the MoE layers of a checkpoint folder between Hugging Face's names and ours.

`python -m expertmesh.convert` runs it; `--help` lists the options.
"""

from expertmesh.convert.cli import main

__all__ = ["main"]
