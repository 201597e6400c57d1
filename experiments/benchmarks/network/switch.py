"""Several hosts in one, at a switch: network namespaces with links of a given speed.

    distbelief-PID-lan-0   distbelief-PID-lan-1   ...        10.78.0.1, 10.78.0.2, ...
            |                      |
            +------- switch -------+--- ...                  each link: tc tbf

Only root may make them. A link can be taken down, and up again.
"""

import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, cast, final

from experiments.benchmarks.network.hosts import INTERFACE, Host


_BURST_BYTES: Final = 1 << 17
_QUEUE_BYTES: Final = 1 << 23
_LANS: Final = itertools.count()


@final
class Lan:
    """Hosts at one switch.

    Attributes:
        hosts: In order of their addresses.
    """

    def __init__(self, name: str, hosts: Sequence[Host]) -> None:
        self._name = name
        self.hosts = hosts

    def cut(self, host: Host) -> None:
        """Let nothing through to or from this host."""
        self._set(host, "down")

    def mend(self, host: Host) -> None:
        """Let everything through again."""
        self._set(host, "up")

    def n_bytes(self, host: Host) -> tuple[int, int]:
        """Return how many bytes this host has received, and sent, so far."""
        command = ["ip", "-n", host.name, "-s", "-j", "link", "show", INTERFACE]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        told = cast("list[dict[str, dict[str, dict[str, int]]]]", json.loads(done.stdout))
        counts = told[0]["stats64"]
        return counts["rx"]["bytes"], counts["tx"]["bytes"]

    def limit(self, host: Host, *, bits_per_second: float) -> None:
        """Let this host send no more than that from now on."""
        bucket = _bucket(bits_per_second)
        root = ["dev", INTERFACE, "root", "tbf"]
        _do(["tc", "-n", host.name, "qdisc", "replace", *root, *bucket])

    def _set(self, host: Host, state: str) -> None:
        port = f"port{self.hosts.index(host)}"
        _do(["ip", "-n", self._name, "link", "set", port, state])


@contextmanager
def switched(n_hosts: int, *, bits_per_second: float) -> Iterator[Lan]:
    """Make so many hosts, and take them away afterwards.

    Raises:
        OSError: a command failed; its words.
    """
    base = f"distbelief-{os.getpid()}-lan{next(_LANS)}"
    switch = f"{base}-switch"
    names = [f"{base}-{index}" for index in range(n_hosts)]
    try:
        _do(["ip", "netns", "add", switch])
        _do(["ip", "-n", switch, "link", "add", "switch", "type", "bridge"])
        _do(["ip", "-n", switch, "link", "set", "switch", "up"])
        hosts = []
        for index, name in enumerate(names):
            address = f"10.78.0.{index + 1}"
            _plug(name, switch, f"port{index}", address, bits_per_second)
            hosts.append(Host(name, address))
        yield Lan(switch, hosts)
    finally:
        for name in [*names, switch]:
            with suppress(OSError):
                _do(["ip", "netns", "del", name])


def _plug(name: str, switch: str, port: str, address: str, bits_per_second: float) -> None:
    _do(["ip", "netns", "add", name])
    _do(
        [
            *("ip", "link", "add", INTERFACE, "netns", name),
            *("type", "veth", "peer", "name", port, "netns", switch),
        ]
    )
    _do(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE])
    _do(["ip", "-n", name, "link", "set", "lo", "up"])
    _do(["ip", "-n", name, "link", "set", INTERFACE, "up"])
    _do(["ip", "-n", switch, "link", "set", port, "master", "switch", "up"])
    for namespace, device in ((name, INTERFACE), (switch, port)):
        root = ["dev", device, "root", "tbf"]
        bucket = _bucket(bits_per_second)
        _do(["tc", "-n", namespace, "qdisc", "add", *root, *bucket])


def _bucket(bits_per_second: float) -> list[str]:
    rate = ["rate", f"{bits_per_second:.0f}bit", "burst", f"{_BURST_BYTES}"]
    return [*rate, "limit", f"{_QUEUE_BYTES}"]


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
