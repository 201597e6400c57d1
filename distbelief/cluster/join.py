"""`distbelief join`: lets a job use this machine, until it is over or Ctrl+C.

This process is the role `host-...`, with a fork server of its own; the run's roles are
its children's. It computes nothing, and holds no values.
"""

import errno
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

import msgspec
import torch

from distbelief.cluster.address import JobAddress
from distbelief.cluster.agent import (
    AgentLauncher,
    AgentStorage,
    AgentStorageConfig,
    HostAgent,
    HostAgentConfig,
)
from distbelief.core import files
from distbelief.core.signals import EXIT_CODES, REASONS, caught_signals
from distbelief.core.writer import Writer
from distbelief.errors import JobError, TransportError
from distbelief.launch.local import LocalLauncher
from distbelief.partition.profiling import this_host as profiling
from distbelief.protocol import Stop
from distbelief.protocol.codec import JOINING
from distbelief.roles.role import HOST, SUPERVISOR, USER, PeerLost, Received, Seconds
from distbelief.transport.address import Endpoint, number_of, own_number_towards
from distbelief.transport.config import KeyConfig, ListenConfig
from distbelief.transport.keys import KeyFiles
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.transport.zmq_transport import ZmqTransport


# A knock at a port: does anything listen there? Nobody has to wait for the answer.
#
# ZeroMQ connects again and again, and does not say why it has to. The kernel at the other
# side does: where nothing listens it refuses at once, and of a link that is cut nothing
# is heard.

SECONDS: Final = 2.0
"""Between two knocks, and for the answer to one."""


@final
class PortProbe:
    """Again and again, at one place, for as long as somebody asks.

    Args:
        place: Where.
    """

    def __init__(self, place: Endpoint) -> None:
        self._place = place
        self._link: socket.socket | None = None
        self._begun_at: Seconds | None = None

    def finds_nobody(self, now: Seconds) -> bool:
        """Return whether an answer has just come, and is that nothing listens."""
        if self._begun_at is None or now - self._begun_at >= SECONDS:
            self._begin(now)
        if self._link is None or not _is_answered(self._link):
            return False
        error = self._link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.close()
        return error == errno.ECONNREFUSED

    def close(self) -> None:
        """Wait for no answer."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _begin(self, now: Seconds) -> None:
        self.close()
        self._begun_at = now
        self._link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._link.settimeout(0.0)
        try:
            self._link.connect((self._place.host, self._place.port))
        except BlockingIOError:
            pass  # as expected: the answer is on its way
        except OSError:  # there is no way there at all
            self.close()


def _is_answered(link: socket.socket) -> bool:
    poller = select.poll()
    poller.register(link, select.POLLOUT)
    return bool(poller.poll(0))


# What a machine that joins sees of the supervisor, beside what that says to it.
#
#     it lets in no key like this one     the user is told how to change that; it is tried
#                                         again
#     somebody else listens there         the user is told
#     nothing listens there               the run is over, if this machine was of it; at
#                                         the beginning the user is told
#
# Of a link that is cut nothing is seen: that may pass. What this machine's own address
# is, may change meanwhile.

DIAL_SECONDS: Final = 3.0
"""Between two tries of who is not let in."""

ONCE_SECONDS: Final = 1.5
"""In which there is but one knock: where something listens, it is a stranger's."""


@final
class SupervisorMonitor:
    """Of one machine; to be closed.

    Args:
        transport: Of this machine.
        key: Likewise; "": it has none.
        place: Of the supervisor.
        tell: Tells the user.
    """

    def __init__(
        self, transport: ZmqTransport, *, key: str, place: Endpoint, tell: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._key = key
        self._place = place
        self._knock = PortProbe(place)
        self._begun_at: Seconds | None = None
        self._tell = tell
        self._told: set[str] = set()
        self._dial_at: Seconds | None = None

    def close(self) -> None:
        """Knock no more."""
        self._knock.close()

    def dial(self) -> None:
        """Connect to the supervisor; again, too: ZeroMQ gives up when refused."""
        self._transport.disconnect(SUPERVISOR)
        self._transport.connect(SUPERVISOR, 0, str(self._place), watched=True)

    def look(self, *, is_alone: bool, is_known: bool) -> str | None:
        """Tell the user what is new; return why the run is over, if it seems so.

        Args:
            is_alone: Whether this machine was of the run, and hears nothing now.
            is_known: Whether the supervisor has spoken to it. Who closes a connection
                then is busy, or stands still: its key is the right one.
        """
        now, where = time.monotonic(), self._place.endpoint
        if self._dial_at is not None and now >= self._dial_at:
            self._dial_at = None
            self.dial()
        if self._transport.is_refused(SUPERVISOR):
            self._dial_at = now + DIAL_SECONDS
            self._say(
                f"{where} does not let this machine in. On its machine: distbelief "
                f"keys allow {self._key} NAME --role host; then it will"
            )
        elif self._transport.is_another(SUPERVISOR) and not is_known:
            self._say(
                f"who listens at {where} has another key than this address, or none: "
                "use the address that `distbelief train --listen` prints there"
            )
        self._begun_at = now if self._begun_at is None else self._begun_at
        is_new = now - self._begun_at < ONCE_SECONDS
        if (is_alone or is_new) and self._knock.finds_nobody(now):
            if is_alone:
                return f"nothing listens at {where} any more"
            self._say(f"nothing listens at {where} so far")
        return None

    def own_number(self, *, known: str) -> str:
        """Return the number by which the supervisor can reach this machine now.

        Args:
            known: What it was; returned as long as there is no way there.
        """
        with suppress(TransportError):
            return own_number_towards(self._place.host)
        return known

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


INCARNATION: Final = 1  # the name is new each time

NAME_SECONDS: Final = 5.0
"""Between two looks at where the supervisor's name leads to, while no job is there."""

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """What the machine's user wants.

    Attributes:
        address: As `distbelief train --listen` prints it.
        keys: Directory of this machine's keys; None: a run without keys.
        cores: To be used; None: all that there are.
        memory_bytes: Likewise.
        devices: Likewise; None: all GPUs.
        allowed: Modules whose functions a job may name.
        code: Where a job's modules and files are looked for.
        directory: For logs.
        stays: Whether to wait for another job when one is over.
        wait_seconds: For a job to take this machine.
    """

    address: str
    keys: Path | None
    cores: int | None = None
    memory_bytes: int | None = None
    devices: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    code: Path = Path()
    directory: Path = Path("runs/joined")
    stays: bool = False
    wait_seconds: float = 600.0


def join(wanted: JoinOptions, *, tell: Tell) -> int:
    """Offer this machine; return the exit code.

    Raises:
        JobError: the address or the keys make no sense.
        StorageError: a directory or shared memory cannot be had.
    """
    address = JobAddress.parse(wanted.address)
    reach = _reach(address, wanted)
    was_taken = False
    while True:
        stay = _Membership(wanted, reach=reach, address=address, tell=tell)
        exit_code = stay.run(returns=was_taken)
        if stay.moved_to is None or exit_code:
            return exit_code
        reach = msgspec.structs.replace(reach, host=stay.moved_to)
        was_taken = stay.was_taken


@final
class _Membership:
    """This machine at one address, under a name of its own.

    Everything listens at that address: at another, all is begun anew.

    Args:
        wanted: What its user wants.
        reach: From where it can be reached.
        address: Of the supervisor.
        tell: Tells the user.

    Attributes:
        moved_to: The address that it has now; None: it has ended for good.
        was_taken: Whether it has been of a job.
    """

    def __init__(
        self, wanted: JoinOptions, *, reach: ListenConfig, address: JobAddress, tell: Tell
    ) -> None:
        self._wanted = wanted
        self._reach = reach
        self._address = address
        self._place = address.place(_server(reach, address))
        self._tell = tell
        self._name_at = time.monotonic() + NAME_SECONDS
        self.moved_to: str | None = None
        self.was_taken = False

    def run(self, *, returns: bool) -> int:
        """Offer it until it ends; return the exit code.

        Args:
            returns: Whether a job took it before, at another address.

        Raises:
            StorageError: a directory or shared memory cannot be had.
        """
        wanted, reach = self._wanted, self._reach
        name = HOST + secrets.token_hex(4)
        with ExitStack() as stack:
            launcher = stack.enter_context(LocalLauncher())
            FileMemory.sweep()
            log = stack.enter_context(_Log(wanted.directory, tell=self._tell))
            tell = self._tell = log.say
            transport = stack.enter_context(
                reach.transport(name=name, incarnation=INCARNATION, run=JOINING, log=log.add)
            )
            lookout = SupervisorMonitor(
                transport, key=_own_key(reach), place=self._place, tell=tell
            )
            stack.callback(lookout.close)
            lookout.dial()
            site = AgentStorage(self._site_config(), launcher=launcher)
            stack.callback(site.clear)
            stack.callback(launcher.close)  # before that
            config = _config(wanted, transport.endpoint, returns=returns)
            host = HostAgent(config, site=site)
            tell(f"{name} waits for a job at {self._place.endpoint}")
            node = RoleRunner(
                host, transport=transport, log=log.add, launcher=AgentLauncher(launcher)
            )
            exit_code = _run(node, lambda: self._look(host, node, lookout=lookout), log=log)
            self.was_taken = host.was_taken
        return exit_code

    def _look(self, host: HostAgent, node: RoleRunner, *, lookout: SupervisorMonitor) -> None:
        """See what nobody says: whether the job, or this machine's address, is gone."""
        is_alone = host.is_left_alone(time.monotonic())
        lost = lookout.look(is_alone=is_alone, is_known=host.was_taken)
        if lost is not None:
            node.post(PeerLost(peer=SUPERVISOR, incarnation=0, reason=lost))
        if self.moved_to is None and host.is_offering:
            self._look_at_addresses(node, lookout=lookout)

    def _look_at_addresses(self, node: RoleRunner, *, lookout: SupervisorMonitor) -> None:
        """See whether this machine has another one now, or the supervisor has."""
        was = self._reach.host
        now = lookout.own_number(known=was)
        text = f"this machine's address is {now}, no longer {was}"
        if now == was:
            if time.monotonic() < self._name_at:
                return
            is_left = self._address.is_left_by(self._place)
            self._name_at = time.monotonic() + NAME_SECONDS
            if not is_left:
                return
            text = f"{self._address.host} is at {self._place.host} no longer"
        self.moved_to = now
        self._tell(f"{text}: offering it anew")
        stop = Stop(reason=text)
        node.post(Received(sender=USER, incarnation=0, message=stop))

    def _site_config(self) -> AgentStorageConfig:
        return AgentStorageConfig(
            supervisor=str(self._place),
            reach=self._reach,
            allowed=self._wanted.allowed,
            code=self._wanted.code.absolute(),
            directory=self._wanted.directory.absolute(),
        )


def _run(node: RoleRunner, look: Callable[[], None], *, log: "_Log") -> int:
    with caught_signals() as caught:

        def stop(number: signal.Signals) -> None:
            message = Stop(reason=REASONS[number])
            node.post(Received(sender=USER, incarnation=0, message=message))

        caught.tell = stop
        error = node.run(look)
    if error is not None:
        log.conclude(error)
        return 1
    return EXIT_CODES.get(caught.number, 0) if caught.number else 0


def _server(reach: ListenConfig, address: JobAddress) -> str:
    return address.key if reach.keys is None else reach.keys.server_key


def _own_key(reach: ListenConfig) -> str:
    return "" if reach.keys is None else reach.keys.public


def _config(wanted: JoinOptions, endpoint: str, *, returns: bool) -> HostAgentConfig:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostAgentConfig(
        label=socket.gethostname()[:100] or "nameless",
        endpoint=endpoint,
        cores=wanted.cores or cores,
        memory_bytes=wanted.memory_bytes or memory,
        devices=wanted.devices,
        flops=_flops(),
        stays=wanted.stays,
        returns=returns,
        wait_seconds_max=wanted.wait_seconds,
    )


def _flops() -> float:
    """Return what one core does in a second."""
    torch.set_num_threads(1)  # of this process, which computes nothing else
    return profiling.flops()


def _reach(address: JobAddress, wanted: JoinOptions) -> ListenConfig:
    """Return from where this machine can be reached."""
    host = own_number_towards(number_of(address.host))
    if wanted.keys is None:
        if not address.secret:
            raise JobError(
                "the job knows machines by their keys: name the directory of this "
                "one's, as in --keys ~/.distbelief/keys (distbelief keys new makes "
                "one). Without keys, the address has a secret"
            )
        return ListenConfig(host=host, secret=address.secret)
    directory = wanted.keys.expanduser().absolute()
    ring = KeyConfig(
        directory=str(directory),
        role="host",
        server_key=address.key or _server_key(KeyFiles(directory)),
        believes=True,
    )
    return ListenConfig(host=host, keys=ring).pinned()


def _server_key(keys: KeyFiles) -> str:
    """Return the one key that may be a server, if there is one."""
    servers = [entry.key for entry in keys.allowed() if "server" in entry.roles]
    if len(servers) == 1:
        return servers[0]
    raise JobError(
        f"{keys.directory} allows {len(servers)} keys as a server, so it is not clear "
        "which is the job's: give its address with ?key=..., as `distbelief train` "
        "prints it, or allow one: distbelief keys allow KEY NAME --role server"
    )


@final
class _Log:
    """The host's own log; what matters is told to the user as well.

    Neither the disk nor the terminal is waited for.
    """

    def __init__(self, directory: Path, *, tell: Tell) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise files.explained(error, directory, doing="make") from error
        self._lines = files.LineFile(directory / "host.log", tell=self.say)
        self._tell = tell
        self._disk = Writer("disk", tell=self.say)
        self._screen = Writer("screen", tell=self._write)
        self._error = ""  # the last one told

    def __enter__(self) -> Self:
        self._disk.start()
        self._screen.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._disk.close()
        self._screen.close()

    def say(self, text: str) -> None:
        """Tell the user, without waiting for the terminal."""
        self._screen.write(partial(self._tell, text))

    def add(self, level: str, text: str) -> None:
        """Add a line."""
        self._write(f"{level}: {text}")
        if level in {"info", "warning", "error"}:
            self.say(text)
        if level == "error":
            self._error = text

    def conclude(self, error: str) -> None:
        """Tell the user why it ends, unless that is what was told last."""
        if not self._error.startswith(error):  # which may have been shortened since
            self.say(error)

    def _write(self, text: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
        self._disk.write(partial(self._lines.append, f"{now} {text}"))
