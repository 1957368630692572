"""The trainer: a byte-level decoder language model with MoE layers, trained on real text.

`python -m expertmesh.train` runs it; `--help` lists the options.
"""

__version__ = "0.1.0"

from expertmesh.train.cli import main

__all__ = ["main"]
