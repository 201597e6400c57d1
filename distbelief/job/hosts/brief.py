"""A brief: all that the roles of a run are told, from one machine to another.

The supervisor's machine writes it; a host makes of it the file that its own processes
read (`process.Spec`). Nothing in it is a path of the supervisor's machine that would be
used here: plan and job travel as text, memory, snapshots and keys are the host's own.
What the job says of files is looked for below the host's own directory where the job's
user had it below his.
"""

import os
from pathlib import Path
from typing import Final, cast

import msgspec

from distbelief.errors import JobError
from distbelief.job.configuration.sections import QUANTITIES, ClusterTable
from distbelief.job.configuration.tables import decode
from distbelief.job.processes.process import Spec
from distbelief.roles import Seconds
from distbelief.transport.reach import Reach


_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError)


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is told.

    Attributes:
        spec: As for roles of the supervisor's machine.
        plan: The plan's text, where replicas are split over machines.
        shares: Whether roles of one machine share memory.
    """

    spec: Spec
    plan: str | None = None
    shares: bool = True


def write_brief(spec: Spec, *, plan: Path | None) -> bytes:
    """Return the brief of a run.

    Args:
        spec: Of the roles of this machine.
        plan: Where their plan is.
    """
    told = msgspec.structs.replace(
        spec, supervisor="", memory="", snapshots="", plan=None, initial_file=None, reach=Reach()
    )
    text = None if plan is None else plan.read_text()
    shares = bool(spec.memory)
    return msgspec.json.encode(Brief(spec=told, plan=text, shares=shares))


def read_brief(content: bytes) -> Brief:
    """Return the brief that `write_brief` wrote, on another machine.

    Raises:
        JobError: it is none.
    """
    try:
        return msgspec.json.decode(content, type=Brief)
    except _UNREADABLE as error:
        raise JobError(
            f"what the supervisor says of its job cannot be read: {error!s:.200}. Use "
            "the same version of distbelief on both machines"
        ) from None


def patience_of(job: msgspec.Raw) -> Seconds:
    """Return how long roles of this job wait for a supervisor that is silent.

    Raises:
        JobError: it is no job.
    """
    try:
        tables = msgspec.json.decode(bytes(job), type=dict[str, object])
    except _UNREADABLE as error:
        raise JobError(f"the supervisor sent no job: {error!s:.200}") from None
    table, quantities = tables.get("cluster", {}), QUANTITIES["cluster"]
    cluster = decode(table, ClusterTable, path=("cluster",), quantities=quantities)
    return cluster.patience


def moved_here(job: msgspec.Raw, directory: Path) -> msgspec.Raw:
    """Return a job as if its user had started it in this directory.

    Raises:
        JobError: it is no job.
    """
    try:
        tables = msgspec.json.decode(bytes(job), type=dict[str, object])
        source = msgspec.convert(tables["source"], type=dict[str, object])
        paths = msgspec.convert(source["import_paths"], type=list[str])
    except _UNREADABLE as error:
        raise JobError(f"the supervisor sent no job: {error!s:.200}") from None
    # The innermost directory first: it may lie within the other.
    bases = sorted((path.rstrip("/") for path in paths), key=len, reverse=True)
    here = str(directory.absolute())
    moved = cast("dict[str, object]", _moved(tables, bases, here))
    moved["source"] = source | {"import_paths": [here]}
    return msgspec.Raw(msgspec.json.encode(moved))


def _moved(value: object, bases: list[str], here: str) -> object:
    match value:
        case dict():
            return {key: _moved(item, bases, here) for key, item in value.items()}
        case list():
            return [_moved(item, bases, here) for item in value]
        case str() if os.path.isabs(value):  # noqa: PTH117 -- perhaps no path
            for base in bases:
                if value == base or value.startswith(f"{base}/"):
                    return here + value[len(base) :]
            return value
        case _:
            return value
