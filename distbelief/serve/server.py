"""`ParameterServer`: the handle of a parameter server in processes on this host."""

import logging
import math
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Literal, Self, cast, final

import msgspec
import torch

from distbelief.config.presets import expand
from distbelief.core.arguments import checked
from distbelief.core.errors import JobError, PeerLostError
from distbelief.core.files import Scratch, explaining, make_directory
from distbelief.job.launch.forkserver import ONE_THREAD
from distbelief.job.run.directory import RunDirectory
from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard_config import COPIES_MAX
from distbelief.serve.address import (
    SHARDS_MAX,
    ServerAddress,
    Tensors,
    by_position,
    exchange_policy,
    named,
    parameter_specs,
    rule_from,
)
from distbelief.serve.server_process import ServerReady, ServerRequest
from distbelief.serve.session import in_order, set_values
from distbelief.task.imports import check_is_no_import
from distbelief.transport.shared_memory import FileMemory


LOGGING: Final = logging.getLogger("distbelief.server")
CLOSE_SECONDS_MAX: Final = 10.0
END_SECONDS_MAX: Final = 5.0  # of a process that has closed its output
_RULE: Final = "Give the rule its options, as in rule=distbelief.SGD(learning_rate=0.1)."
_ELSEWHERE: Final = {
    **dict.fromkeys(("lr", "learning_rate", "momentum", "weight_decay", "schedule"), _RULE),
    **dict.fromkeys(
        ("workers", "num_workers", "world_size"), "Any number of workers may join: leave it out."
    ),
    **dict.fromkeys(
        ("host", "port", "address", "bind"),
        "It serves this host; for others run `distbelief serve --bind tcp://0.0.0.0:7700`.",
    ),
    "optimizer": _RULE,
    "every": "Each Exchange has its own: Exchange(..., every=64).",
}


@final
class ParameterServer:
    """A parameter server: shards in processes on this host, for any number of workers.

    Args:
        params: The model, whose parameters and buffers are served; or its parameters, with names or
            without, as in torch. Their current values are the initial ones. Workers that have names
            too are matched by name, others by position.
        buffers: Of a model whose parameters are given; or the model itself, for those that it
            saves. Workers average them, and add up what they count.
        rule: The update rule, such as `distbelief.Adagrad(learning_rate=0.02)`, or a table as in a
            job file: `{"name": "AdamW", "lr": 1e-3}`; by default the preset's. It may have
            `groups`: other rules for parameters whose names match a pattern.
        preset: How workers exchange, by the name of a paper: `distbelief presets` lists them.
            Workers follow it. The next six replace choices of it.
        staleness: Exchanges that a worker may be ahead of the slowest; by default any number.
        round: Apply one push of each worker at once, as `{"quorum": 0.75, "grace_seconds": 2}`:
            a round ends so many seconds after the pushes of that share of workers are here. By
            default each push is applied by itself.
        weight: Of a push: "sum" as it is, "mean" divided by the number of workers, or "samples" by
            its share of their samples.
        damping: Of stale pushes: "none", "inverse" or "excess".
        push: How pushes are encoded, as `{"codec": "int4"}`; what is not sent is added to the next.
        fetch: What is fetched from another host: "float32", "bfloat16", "changed", or a codec such
            as `{"codec": "int4"}`.
        shards: Number of shards over which the parameters are split.
        shard_copies: Processes per shard, 1 or 2. With 2, a backup takes over when the
            primary fails, and no acknowledged push is lost.
        shared_memory: Whether workers on this host share memory with the shards.
        directory: For checkpoints and logs; default: a temporary directory. If a server with the
            same parameters, rule and shards has left checkpoints there, this one continues from
            them, as `distbelief serve` does.
        snapshot_every: Seconds between checkpoints, from which a failed shard restarts.
        start_seconds_max: How long the shards may take to start.

    Raises:
        JobError: an argument is not valid.
    """

    @checked("ParameterServer", _ELSEWHERE)
    def __init__(  # noqa: PLR0913 -- the options of one algorithm, and of its processes
        self,
        params: Tensors,
        *,
        buffers: Tensors | None = None,
        rule: UpdateRule | Mapping[str, object] | None = None,
        preset: str | None = None,
        staleness: int | None = None,
        round: Mapping[str, float] | None = None,  # noqa: A002 -- as in a job file
        weight: Literal["sum", "mean", "samples"] | None = None,
        damping: Literal["none", "inverse", "excess"] | None = None,
        push: Mapping[str, object] | None = None,
        fetch: str | Mapping[str, object] | None = None,
        shards: int = 1,
        shard_copies: int = 1,
        shared_memory: bool = True,
        directory: str | Path | None = None,
        snapshot_every: float = 30.0,
        start_seconds_max: float = 60.0,
    ) -> None:
        limits = {"shards": (shards, SHARDS_MAX), "shard_copies": (shard_copies, COPIES_MAX)}
        for name, (value, most) in limits.items():
            if type(value) is not int or not 1 <= value <= most:
                raise JobError(f"ParameterServer: {name} is {value!r}; use 1 to {most}")
        times = {"snapshot_every": snapshot_every, "start_seconds_max": start_seconds_max}
        for name, seconds in times.items():
            is_number = type(seconds) in {int, float}
            if not (is_number and 0.0 < seconds < math.inf):
                raise JobError(f"ParameterServer: {name} is {seconds!r}; use seconds, more than 0")
        exchange = exchange_policy(
            "ParameterServer",
            {},
            preset,
            staleness=staleness,
            round=round,
            weight=weight,
            damping=damping,
            push=push,
            fetch=fetch,
        )
        if isinstance(params, torch.nn.Module):
            if buffers is not None:
                raise JobError("ParameterServer: params is a module, which has buffers of its own")
            buffers = params
        names, parameters = named(params, what="parameter")
        buffer_names, own_buffers = named([] if buffers is None else buffers, what="buffer")
        all_names = [*names, *buffer_names]
        self._tensors = [*parameters, *own_buffers]
        self._request = ServerRequest(
            tensors=parameter_specs(parameters, buffers=own_buffers),
            names=tuple(all_names) if all(all_names) else (),
            rule=by_position(_rule(rule, preset), [name for name in names if name]),
            exchange=exchange,
            preset=preset or "",
            n_shards=shards,
            shard_copies=shard_copies,
            shared_memory=shared_memory,
            snapshot_every=snapshot_every,
            start_seconds_max=start_seconds_max,
            directory="" if directory is None else str(_path(directory).absolute()),
            keeps=directory is not None,
        )
        self._request.check("ParameterServer")
        self._start_seconds_max = start_seconds_max
        self._own_directory: Scratch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """The address for this user's processes on this host; JobError if it is not running."""
        if not self._address:
            raise JobError(
                "the parameter server is not running: use it in a `with` statement, or call start()"
            )
        return self._address

    def start(self) -> Self:
        """Start the shards, and wait until they are ready.

        JobError if the server runs already, or its directory has checkpoints of another;
        StorageError if the disk has no space for the values, or another server uses the directory;
        PeerLostError if the shards do not start.
        """
        if self._process is not None:
            raise JobError("the parameter server is running already")
        check_is_no_import("ParameterServer.start")
        request = self._request
        with ExitStack() as stack:  # the directory stays locked until the process has ended, too
            if request.directory:
                directory = Path(request.directory)
                with explaining(directory, doing="make"):
                    make_directory(directory)
                held = stack.enter_context(RunDirectory.take(directory)).held
            else:
                self._own_directory = Scratch.make()
                directory, held = self._own_directory.path, self._own_directory.held
                request = msgspec.structs.replace(request, directory=str(directory))
            continues = request.has_checkpoints
            request.prepare(self._tensors)
            self._process = subprocess.Popen(  # noqa: S603 -- our own program
                [sys.executable, "-P", "-m", "distbelief.serve.server_process", str(request.file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # With one thread per library it may fork, and need not import torch twice.
                env={**os.environ, **ONE_THREAD},
                pass_fds=(held,),
            )
        try:
            self._address = self._await_address(self._process)
        except BaseException:
            self.close()
            raise
        begins = "goes on from the checkpoints in" if continues else "has started in"
        LOGGING.info("the server %s %s", begins, directory)
        return self

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Set all served values, of frozen parameters too, while the server runs.

        Workers go on from them with their next fetch: what they have not pushed yet is added.
        The state of the rule stays.

        Args:
            state_dict: `net.state_dict()` of the model that is served.

        Raises:
            JobError: it is of another model, or not finite.
            PeerLostError: the server does not answer in time.
        """
        address = ServerAddress.parse(self.address)
        values = in_order(state_dict, address.names, self._tensors, user="ParameterServer")
        set_values(values, address, user="ParameterServer", timeout_seconds=self._start_seconds_max)

    def close(self) -> None:
        """Stop the shards; does nothing if they have stopped."""
        process, self._process, self._address = self._process, None, ""
        if process is not None:
            LOGGING.info("the server ends")
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(CLOSE_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()  # its shards end with it
                process.wait()
            process.stdout.close()
            if process.returncode < 0:  # killed: it could not remove its shared memory
                FileMemory.sweep()
        if self._own_directory is not None:
            self._own_directory.remove()
            self._own_directory = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _await_address(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], self._start_seconds_max)
        line = process.stdout.readline() if ready else b""
        if not line:
            if ready:  # it has ended, or does so now
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS_MAX)
            status = process.poll()
            how = f"ended with status {status}"
            if status is None:
                how = (
                    f"is not ready after {self._start_seconds_max:g} s: give it more, with "
                    "start_seconds_max"
                )
            raise PeerLostError(f"the parameter server {how}")
        reply = msgspec.json.decode(line, type=ServerReady)
        if reply.error is not None:
            raise PeerLostError(f"the parameter server cannot start: {reply.error}")
        return reply.address


def _path(directory: str | Path) -> Path:
    try:
        return Path(directory)
    except TypeError:
        raise JobError(f"ParameterServer: directory is {directory!r}; use a path") from None


def _rule(given: UpdateRule | Mapping[str, object] | None, preset: str | None) -> UpdateRule:
    if given is None and preset is not None:
        given = cast("Mapping[str, object]", expand({"preset": preset})["rule"])
    if isinstance(given, Mapping):
        given = rule_from(given, user="ParameterServer")
    if not isinstance(given, UpdateRule):
        raise JobError(
            f"ParameterServer: rule is {' '.join(repr(given).split())[:60]}; use one, as "
            "distbelief.SGD(learning_rate=0.1), or a preset"
        )
    return given
