"""A run of the trainer as one page: `python -m expertmesh.report RUN` writes RUN/report.html.

The page needs no other file, and no network.
"""

from expertmesh.report.cli import main

__all__ = ["main"]
