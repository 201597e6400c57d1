"""Several hosts in one: network namespaces at a switch, with links of a given speed.

    10.78.0.1  veth  <-- token bucket -->  port0  switch
    10.78.0.2  veth  <-- token bucket -->  port1

Each end sends through a token bucket (`tc tbf`), so a link carries that many bits per second each
way, as full-duplex Ethernet does. Only root may make them.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from distbelief.core.signals import ended_by_signals


INTERFACE: Final = "veth"
_BURST_BYTES: Final = 1 << 17  # more than the 64 KiB that the kernel sends in one piece
_QUEUE_SECONDS: Final = 0.1  # of sending: what a card or a switch holds before it drops
# Of TCP: fills a link both ways at once, as `cubic` does. `bbr` leaves up to a tenth of it free.
_CONGESTION: Final = "net.ipv4.tcp_congestion_control=reno"
_NUMBERS: Final = itertools.count()  # of this process, so that each switch has its own name


class Host(NamedTuple):
    name: str  # of its network namespace; "": the one that this process lives in
    address: str  # of its end of the link

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name] if self.name else []

    @property
    def interface(self) -> str:
        return INTERFACE if self.name else "lo"


HERE: Final = (Host("", "127.0.0.1"), Host("", "127.0.0.1"))


def obstacle() -> str | None:
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed (package iproute2)"
    try:
        with switched(1, bits_per_second=1e9):
            return None
    except OSError as error:
        return str(error)


class Lan:
    def __init__(self, name: str, hosts: Sequence[Host]) -> None:
        self._name = name
        self.hosts = hosts  # in order of their addresses

    def cut(self, host: Host) -> None:
        self._set(host, "down")

    def mend(self, host: Host) -> None:
        self._set(host, "up")

    def n_bytes(self, host: Host) -> tuple[int, int]:
        command = ["ip", "-n", host.name, "-s", "-j", "link", "show", INTERFACE]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        counts = json.loads(done.stdout)[0]["stats64"]
        return int(counts["rx"]["bytes"]), int(counts["tx"]["bytes"])

    def kill(self, host: Host) -> None:
        """Kill every process that runs at a host, as if its power were gone."""
        command = ["ip", "netns", "pids", host.name]
        while pids := subprocess.run(command, capture_output=True, check=True).stdout.split():
            for pid in map(int, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def limit(self, host: Host, *, bits_per_second: float) -> None:
        """Set what the host's card carries each way."""
        queue = max(_BURST_BYTES, _QUEUE_SECONDS * bits_per_second / 8)
        bucket = f"rate {bits_per_second:.0f}bit burst {_BURST_BYTES} limit {queue:.0f}"
        for namespace, device in ((host.name, INTERFACE), (self._name, self._port(host))):
            _do(f"tc -n {namespace} qdisc replace dev {device} root tbf {bucket}")

    def _set(self, host: Host, state: str) -> None:
        _do(f"ip -n {self._name} link set {self._port(host)} {state}")

    def _port(self, host: Host) -> str:
        return f"port{self.hosts.index(host)}"


@contextmanager
def switched(n_hosts: int, *, bits_per_second: float) -> Iterator[Lan]:
    """Make hosts at a switch; take them away afterwards, also if SIGTERM ends the program."""
    base = f"distbelief-{os.getpid()}-lan{next(_NUMBERS)}"
    switch = f"{base}-switch"
    names = [f"{base}-{index}" for index in range(n_hosts)]
    with ended_by_signals():
        try:
            _do(f"ip netns add {switch}")
            _do(f"ip -n {switch} link add switch type bridge")
            _do(f"ip -n {switch} link set switch up")
            lan = Lan(switch, [Host(name, f"10.78.0.{k}") for k, name in enumerate(names, start=1)])
            for index, host in enumerate(lan.hosts):
                name, port = host.name, f"port{index}"
                _do(f"ip netns add {name}")
                _do(f"ip netns exec {name} sysctl -qw {_CONGESTION}")
                ends = f"{INTERFACE} netns {name} type veth peer name {port} netns {switch}"
                _do(f"ip link add {ends}")
                _do(f"ip -n {name} addr add {host.address}/24 dev {INTERFACE}")
                _do(f"ip -n {name} link set lo up")
                _do(f"ip -n {name} link set {INTERFACE} up")
                _do(f"ip -n {switch} link set {port} master switch up")
                lan.limit(host, bits_per_second=bits_per_second)
            yield lan
        finally:
            for name in [*names, switch]:
                with suppress(OSError):
                    _do(f"ip netns del {name}")


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
