"""Benchmarks: everything compared in one run, in turns, and told as ratios.

Run one as `python experiments/benchmarks/NAME.py`; its last line is one JSON object,
`{"benchmark": NAME, "figures": {KEY: NUMBER, ...}}`. With `--small` it takes the least
of everything: that shows that it runs, and its figures say nothing.

`make bench` runs them all, but for those whose first lines say why not.
"""
