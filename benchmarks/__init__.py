"""Benchmarks, one module per op; `python -m benchmarks` runs them all. Not in the wheels."""
