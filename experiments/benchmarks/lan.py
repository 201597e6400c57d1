"""What passes the links of four hosts at a switch, 1 Gbit/s each, beside the forecast.

    python experiments/benchmarks/lan.py [--only CASE] [--small]

Jobs over network namespaces, machines that have joined.

Not in `make bench`: only root may make network namespaces.

    beyond_CASE    the share by which the links had more than that, both ways, all hosts
    beyond_worst   that of the worst link
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.network.hosts import obstacle
from experiments.benchmarks.network.switch import switched
from experiments.benchmarks.network.traffic import Link, links_of
from experiments.benchmarks.simulated.truth import JOB, SANDBLAST


N_HOSTS: Final = 4
_OF_LAN: Final = ("replicas = 2", "replicas = 4", "max_steps = 150", "max_steps = 25")
_TINY: Final = ("hidden = 1024", "hidden = 128")
_SPLIT: Final = ("replicas = 4", "replicas = 2\npartitions = 2")


def _with(text: str, *changes: str) -> str:
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        text = text.replace(old, new)
    return text


CASES: Final[Mapping[str, str]] = {
    "downpour": _with(JOB, *_OF_LAN),
    "split": _with(JOB, *_OF_LAN, *_SPLIT),
    "sandblaster": _with(SANDBLAST, *_OF_LAN),
    "split_sandblaster": _with(SANDBLAST, *_OF_LAN, *_SPLIT),
}
"""Jobs over all four."""

SMALL: Final = {"only": ("downpour",)}  # with a tiny net


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", action="append", choices=list(CASES))
    options = measurement.options_of(parser, arguments, small=SMALL)
    if (why := obstacle()) is not None:
        raise SystemExit(why)
    found: dict[str, Sequence[Link]] = {}
    rows = {}
    for case in options.only or CASES:
        with switched(N_HOSTS, bits_per_second=1e9) as lan:
            text = _with(CASES[case], *_TINY) if options.small else CASES[case]
            found[case] = links_of(lan, text)
        for index, link in enumerate(found[case]):
            rows[f"{case} {index}"] = {
                "roles": ", ".join(link.roles) or "shards, replica 0, supervisor",
                "in: foretold": f"{link.foretold_received / 1e6:,.2f} MB",
                "link": f"{link.received / 1e6:,.2f} MB",
                "out: foretold": f"{link.foretold_sent / 1e6:,.2f} MB",
                "link ": f"{link.sent / 1e6:,.2f} MB",
                "beyond": f"{link.beyond:+.2%}",
            }
            print(f"{case} {index}", rows[f"{case} {index}"], flush=True)
    measurement.show(f"{N_HOSTS} hosts at a switch, 1 Gbit/s each", rows)
    figures = {f"beyond_{case}": _beyond(links) for case, links in found.items()}
    worst = max(abs(link.beyond) for links in found.values() for link in links)
    measurement.conclude("lan", figures | {"beyond_worst": worst})


def _beyond(links: Sequence[Link]) -> float:
    passed = sum(link.received + link.sent for link in links)
    return passed / sum(x.foretold_received + x.foretold_sent for x in links) - 1.0


if __name__ == "__main__":
    # Python looks beside a program first, where a module is called sandblaster.
    beside = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != beside]
    main()
