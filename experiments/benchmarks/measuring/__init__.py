"""What benchmarks have in common: processes that take turns, what they use, tables, figures.

`measurement` has the command line, turns, spreads, the table and the last line of a benchmark,
`workers` starts processes that are asked for steps, `track` lets jobs take turns with plain loops,
`network.hosts` makes hosts with links of a given speed and counts their bytes, `network.jobs` runs
a job over them.
"""
