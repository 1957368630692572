"""The version of this package, which processes of a job compare."""

__version__ = "0.1.0"
