"""The benchmark suite; start it with `python benchmarks/run.py`."""
