"""How many modules a reader opens to follow one push or fetch, and how often they alternate.

A job of one replica and two shards on one host runs in the simulation. The profiler notes every
library module that is entered while a role handles an event of a push or a fetch, or runs the
work that belongs to it, and while the codec encodes and decodes the messages of a push:

    push    staged, sent, applied by a shard, acknowledged
    fetch   begun, copied from shared memory, installed

The simulation itself is left out: it stands for the network and the executors.

A *stay* is an uninterrupted run of calls inside one module. Of one whole exchange (a fetch, a step,
its push and the acknowledgement), between one replica and one shard, all stays are counted.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

import msgspec
import pytest

import distbelief
from distbelief.config.job import StopTable
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.client.pushes import PushResult
from distbelief.protocol import Message, Push, PushApplied
from distbelief.protocol.codec import Codec
from distbelief.protocol.role import Action, Compute, Computed, Event, Received, Send
from distbelief.worker.member import JobMember
from tests.simulation.jobs import JobCluster


ROOT: Final = f"{Path(distbelief.__file__).parent}/"
MODULES_OF_A_PUSH: Final = 18
MODULES_OF_A_FETCH: Final = 12
"""Bounds to be lowered: a fetch through 10 is wanted."""

OF_THE_PARAMETER_SERVER: Final = {"push": 7, "fetch": 3}  # its share of them

# Stays of one exchange, by blocks and in shared memory: of the replica, of the shard, and the
# modules that every other exchange or more enters. Lower them with the code.
STAYS: Final = {"": (119, 77, 20), "host-0": (105, 36, 17)}
NOT_FOLLOWED: Final = ("simulation/", "transport/", "protocol/codec.py")

Result = TypeVar("Result")


def modules_in(call: Callable[[], Result]) -> tuple[Result, set[str]]:
    """Return the result of `call`, and the library modules that it entered."""
    modules: set[str] = set()

    def note(frame: FrameType, kind: str, _argument: object) -> None:
        name = frame.f_code.co_filename
        if kind == "call" and name.startswith(ROOT):
            modules.add(name.removeprefix(ROOT))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        return call(), modules
    finally:
        sys.setprofile(before)


def part_of(event: Event) -> str | None:
    """Return which part of a push or a fetch this event is, if it is one."""
    if isinstance(event, Computed):
        if isinstance(event.result, PushResult | FetchResult):
            return "push: staged" if isinstance(event.result, PushResult) else "fetch: installed"
        return "push: applied" if event.name == "apply" else None
    if isinstance(event, Received) and isinstance(event.message, Push | PushApplied):
        return f"push: {type(event.message).__name__}"
    return None


class Paths:
    """The modules of each part of a push and a fetch.

    Of several equal parts the smallest counts: others also report progress or begin a step.
    """

    def __init__(self) -> None:
        self.parts: dict[str, set[str]] = {}
        self.messages: list[Message] = []
        self._handle = JobMember.handle

    def of(self, path: str) -> set[str]:
        parts = [modules for part, modules in self.parts.items() if part.startswith(path)]
        return set[str]().union(*parts)

    def note(self, part: str | None, modules: set[str]) -> None:
        if part is not None:
            self.parts[part] = min(self.parts.get(part, modules), modules, key=len)

    def handle(self, member: JobMember, event: Event, now: float) -> Sequence[Action]:
        actions, modules = modules_in(lambda: self._handle(member, event, now))
        self.note(part_of(event), modules)
        self.messages += [
            action.message
            for action in actions
            if isinstance(action, Send) and isinstance(action.message, Push | PushApplied)
        ]
        return [
            self._watched(action, modules) if isinstance(action, Compute) else action
            for action in actions
        ]

    def _watched(self, action: Compute, handling: set[str]) -> Compute:
        def work() -> object:
            result, modules = modules_in(action.work)
            part = part_of(Computed(name=action.name, result=result))
            if part is not None:
                self.note(f"{part} (begun)", handling)
                self.note(f"{part} (work)", modules)
            return result

        return msgspec.structs.replace(action, work=work)


@pytest.fixture(scope="module")
def paths() -> Paths:
    paths = Paths()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobMember, "handle", lambda *args: paths.handle(*args))  # noqa: PLW0108 - binds
        job = JobCluster(n_replicas=1, n_shards=2, stop=StopTable(samples=60))
        assert job.run(within=60.0) is None
    codec = Codec(run="run")
    for kind in (Push, PushApplied):
        message = next(one for one in paths.messages if isinstance(one, kind))
        frames, encoding = modules_in(partial(codec.encode, message, sender="a", incarnation=1))
        _, decoding = modules_in(partial(codec.decode, frames))
        paths.note(f"push: {kind.__name__} on the wire", encoding | decoding)
    return paths


def test_a_push_passes_through_few_modules(paths: Paths) -> None:
    modules = paths.of("push")
    assert len(modules) <= MODULES_OF_A_PUSH, sorted(modules)


def test_a_fetch_from_shared_memory_passes_through_few_modules(paths: Paths) -> None:
    modules = paths.of("fetch")
    assert len(modules) <= MODULES_OF_A_FETCH, sorted(modules)


@pytest.mark.parametrize("path", OF_THE_PARAMETER_SERVER)
def test_few_of_them_are_the_parameter_servers(paths: Paths, path: str) -> None:
    modules = [module for module in paths.of(path) if module.startswith("parameter_server/")]
    assert len(modules) <= OF_THE_PARAMETER_SERVER[path], sorted(modules)


# --- stays ---


class Stays:
    """The modules that each role stays in, one after the other, event by event and work by work."""

    def __init__(self) -> None:
        self.of_roles: list[tuple[str, list[str]]] = []
        self.ends: list[int] = []  # of exchanges: how many of these came before

    def during(self, role: str, call: Callable[[], Result]) -> Result:
        stays: list[str] = []
        self.of_roles.append((role, stays))

        def note(frame: FrameType, kind: str, _argument: object) -> None:
            name = frame.f_code.co_filename
            if kind != "call" or not name.startswith(ROOT):
                return
            module = name.removeprefix(ROOT)
            if not module.startswith(NOT_FOLLOWED) and stays[-1:] != [module]:
                stays.append(module)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return call()
        finally:
            sys.setprofile(before)

    def handle(
        self, whole: Callable[..., Sequence[Action]], member: JobMember, event: Event, now: float
    ) -> Sequence[Action]:
        role = member._config.name.partition("-")[0]
        actions = self.during(role, lambda: whole(member, event, now))
        if isinstance(event, Received) and isinstance(event.message, PushApplied):
            self.ends.append(len(self.of_roles))
        return [
            msgspec.structs.replace(action, work=partial(self.during, role, action.work))
            if isinstance(action, Compute)
            else action
            for action in actions
        ]

    def found(self) -> tuple[float, float, int]:
        """Return means over the middle half of the exchanges, and how many modules it enters."""
        first, last = self.ends[len(self.ends) // 4], self.ends[3 * len(self.ends) // 4]
        n = sum(first < end <= last for end in self.ends)
        seen = self.of_roles[first:last]
        counts = Counter(module for _, stays in seen for module in stays)
        each = [
            sum(len(stays) for one, stays in seen if one == role) / n
            for role in ("replica", "shard")
        ]
        return each[0], each[1], sum(count >= n / 2 for count in counts.values())


@pytest.mark.parametrize("host", STAYS)
def test_an_exchange_goes_back_and_forth_between_modules_seldom(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, whole = Stays(), JobMember.handle
    monkeypatch.setattr(JobMember, "handle", lambda *args: stays.handle(whole, *args))
    job = JobCluster(n_replicas=1, n_shards=1, stop=StopTable(samples=120), host=host)
    assert job.run(within=120.0) is None
    found, most = stays.found(), STAYS[host]
    assert all(one <= bound for one, bound in zip(found, most, strict=True)), (found, most)
