"""What benchmarks have in common: processes that take turns, what they use, tables, figures.

    parser = argparse.ArgumentParser()
    options = measurement.options_of(parser, arguments, small={"rounds": 1})
    found = measurement.interleaved({"ours": ours, "torch": torch_alone}, n_rounds=options.rounds)
    spreads = {name: Spread.of(seconds) for name, seconds in found.items()}
    measurement.show("seconds of a step", {n: {"s": s.show(3)} for n, s in spreads.items()})
    measurement.conclude("name", {n: s.median for n, s in spreads.items()})

`workers` starts processes that are asked for steps, `track` lets jobs take turns with plain loops,
`network.hosts` makes hosts with links of a given speed and counts their bytes, `network.jobs` runs
a job over them.
"""
