"""Benchmarks: everything compared in one run, in turns, and told as ratios.

Run one as `python experiments/benchmarks/NAME.py`; its last line is one JSON object,
`{"benchmark": NAME, "figures": {KEY: NUMBER, ...}}`.
"""
