"""`ParameterServer`: the handle of a parameter server on this host, and server addresses."""

import select
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast, final
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import torch
from safetensors.torch import save_file
from typing_extensions import override

from distbelief.core.files import Scratch
from distbelief.errors import JobError, PeerLostError
from distbelief.parameter_server.layout import TensorSpec
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.parameter_server.replication import COPIES_MAX
from distbelief.serve.server_process import ServerReady
from distbelief.transport.address import Endpoint, number_of, own_address_towards
from distbelief.transport.config import KeyConfig, ListenConfig
from distbelief.transport.keys import DIRECTORY, KeyPair, public_key
from distbelief.transport.shared_memory import FileMemory


CLOSE_SECONDS_MAX: Final = 10.0
SHARDS_MAX: Final = 4096


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a parameter server, with all that a worker needs to join it.

    for this user    ipc://DIRECTORY/.supervisor.1?run=…&shards=2&copies=1&memory=…
    with keys        tcp://HOST:PORT?key=…&run=…&shards=2&copies=1
    without keys     tcp://HOST:PORT?secret=…&run=…&shards=2&copies=1
    """

    endpoint: str
    run: str  # name of the run
    key: str = ""  # public key of the server
    secret: str = ""  # a password: every process that knows it may push
    n_shards: int
    shard_copies: int = 1
    memory: str  # directory of shared memory, for workers on this host

    @override
    def __str__(self) -> str:
        query: dict[str, str | int] = {"key": self.key} if self.key else {}
        if self.secret:
            query = {"secret": self.secret}
        query |= {"run": self.run}
        query |= {"shards": self.n_shards, "copies": self.shard_copies}
        if self.memory:
            query["memory"] = self.memory
        return f"{self.endpoint}?{urlencode(query)}"

    def place(self) -> Endpoint:
        """Return the endpoint to connect to.

        Raises:
            JobError: the host name cannot be resolved.
        """
        parts = urlsplit(self.endpoint)
        if parts.scheme == "ipc":
            return Endpoint(path=parts.path)
        host, port = number_of(parts.hostname or ""), parts.port or 0
        key = KeyPair.parse(self.secret).public if self.secret else self.key
        return Endpoint(host=host, port=port, key=key)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address, as `str` writes it.

        Raises:
            JobError: `text` is not an address of a parameter server.
        """
        if not isinstance(text, str):
            raise JobError(
                f"server is {text!r}, which is no address: use "
                "ParameterServer(...).address, or the address that `distbelief serve` prints"
            )
        try:
            return cls._read(text)
        except (KeyError, ValueError, JobError):
            raise JobError(
                f"{text!r} is no address of a parameter server: use "
                "ParameterServer(...).address, or the address that `distbelief serve` "
                "prints, such as tcp://10.0.0.1:7700?key=…&run=…&shards=2"
            ) from None

    @classmethod
    def _read(cls, text: str) -> Self:
        parts = urlsplit(text)
        query = parse_qs(parts.query)
        is_file = parts.scheme == "ipc" and not parts.netloc and parts.path
        address = cls(
            endpoint=f"{parts.scheme}://{parts.netloc}{parts.path if is_file else ''}",
            run=query["run"][0],
            key=public_key(query["key"][0]) if "key" in query else "",
            secret=query.get("secret", [""])[0],
            n_shards=int(query["shards"][0]),
            shard_copies=int(query.get("copies", ["1"])[0]),
            memory=query.get("memory", [""])[0],
        )
        if address.secret:
            KeyPair.parse(address.secret)
        if not (is_file or (parts.scheme == "tcp" and parts.port)):
            raise JobError("no endpoint")
        if bool(address.key) + bool(address.secret) != (0 if is_file else 1):
            raise JobError("a server over TCP has a key or a secret")
        makes_sense = 1 <= address.n_shards <= SHARDS_MAX
        if not (makes_sense and 1 <= address.shard_copies <= COPIES_MAX):
            raise JobError("no such server")
        return address


def listen_config_towards(
    place: Endpoint, *, secret: str = "", keys: str | Path | None = None
) -> ListenConfig:
    """Return where a worker of the server at `place` listens.

    Raises:
        JobError: the server has a key, and this host has none.
    """
    if place.path:
        return ListenConfig(directory=str(Path(place.path).parent))
    host = own_address_towards(place.host)
    if secret:
        return ListenConfig(host=host, secret=secret)
    directory = Path(DIRECTORY if keys is None else keys).expanduser()
    key_config = KeyConfig(directory=str(directory), role="worker", server_key=place.key)
    return ListenConfig(host=host, keys=key_config)


def parameter_specs(parameters: Iterable[torch.nn.Parameter]) -> list[TensorSpec]:
    """Return the specs of a training loop's parameters, named by their positions.

    Raises:
        JobError: there are no parameters, or one is not float32.
    """
    specs = []
    for index, parameter in enumerate(parameters):
        if not isinstance(cast("object", parameter), torch.Tensor):
            raise JobError(
                f"parameter {index} is a {type(parameter).__name__}, not a parameter: "
                "give net.parameters()"
            )
        if parameter.dtype != torch.float32:
            raise JobError(
                f"parameter {index} is {parameter.dtype}: a parameter server keeps "
                "float32; use net.float()"
            )
        specs.append(
            TensorSpec(name=f"{index:06d}", shape=tuple(parameter.shape), kind="parameter")
        )
    if not specs:
        raise JobError("no parameters are given: is it net.parameters()?")
    return specs


def _check_unused(directory: Path) -> None:
    # Shards would restore the checkpoints of an earlier server.
    snapshots = directory / "snapshots"
    if any(snapshots.rglob("*.safetensors")):
        raise JobError(
            f"ParameterServer: directory {directory} holds the checkpoints of an earlier "
            f"server or run: use another directory, or remove {snapshots}"
        )


@final
class ParameterServer:
    """A parameter server: shards in processes on this host, for any number of workers.

    Args:
        params: The model's parameters; their current values are the initial ones.
        rule: The update rule, such as `distbelief.Adagrad(learning_rate=0.02)`.
        shards: Number of shards over which the parameters are split.
        shard_copies: Processes per shard, 1 or 2. With 2, a backup takes over when the
            primary fails, and no acknowledged push is lost.
        shared_memory: Whether workers on this host share memory with the shards.
        directory: For checkpoints and logs; default: a temporary directory.
        snapshot_every: Seconds between checkpoints, from which a failed shard restarts.
        start_seconds_max: How long the shards may take to start.

    Raises:
        JobError: an argument is not valid.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        rule: UpdateRule,
        shards: int = 1,
        shard_copies: int = 1,
        shared_memory: bool = True,
        directory: str | Path | None = None,
        snapshot_every: float = 30.0,
        start_seconds_max: float = 60.0,
    ) -> None:
        if not 1 <= shards <= SHARDS_MAX:
            raise JobError(f"ParameterServer: shards is {shards}; use 1 to {SHARDS_MAX}")
        if not 1 <= shard_copies <= COPIES_MAX:
            raise JobError(
                f"ParameterServer: shard_copies is {shard_copies}; use 1, or "
                f"{COPIES_MAX} for a backup of each shard"
            )
        if not isinstance(cast("object", rule), UpdateRule):
            raise JobError(
                f"ParameterServer: rule is {rule!r}; use an update rule, such as "
                "distbelief.Adagrad(learning_rate=0.02)"
            )
        if isinstance(params, torch.nn.Module):
            raise JobError("ParameterServer: give it net.parameters(), not net")
        self._parameters = list(params)
        self._specs = parameter_specs(self._parameters)
        self._rule = rule
        self._n_shards = shards
        self._shard_copies = shard_copies
        self._shared_memory = shared_memory
        self._snapshot_every = snapshot_every
        self._start_seconds_max = start_seconds_max
        self._directory = None if directory is None else Path(directory)
        self._own_directory: Scratch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """The address for processes of this user on this host.

        Raises:
            JobError: the server is not running.
        """
        if not self._address:
            raise JobError(
                "the parameter server is not running: use it in a `with` statement, or call start()"
            )
        return self._address

    def start(self) -> Self:
        """Start the shards, and wait until they are ready.

        Raises:
            JobError: the server runs already, or its directory has old checkpoints.
            StorageError: the disk has no space for the values.
            PeerLostError: the shards do not start.
        """
        if self._process is not None:
            raise JobError("the parameter server is running already")
        held: tuple[int, ...] = ()
        if self._directory is None:
            self._own_directory = Scratch.make()
            directory = self._own_directory.path
            held = (self._own_directory.held,)
        else:
            directory = self._directory
            directory.mkdir(parents=True, exist_ok=True)
            _check_unused(directory)
        request = directory / "request.json"
        request.write_bytes(self._request(directory.absolute()))
        self._process = subprocess.Popen(  # noqa: S603 -- our own program
            [sys.executable, "-P", "-m", "distbelief.serve.server_process", str(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=held,  # the directory stays locked until both processes have ended
        )
        try:
            self._address = self._await_address(self._process)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop the shards; does nothing if they have stopped."""
        process, self._process, self._address = self._process, None, ""
        if process is not None:
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

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, directory: Path) -> bytes:
        initial_file = directory / "initial.safetensors"
        values = {
            spec.name: parameter.detach().contiguous().clone()
            for spec, parameter in zip(self._specs, self._parameters, strict=True)
        }
        save_file(values, initial_file)
        return msgspec.json.encode(
            {
                "tensors": self._specs,
                "initial_file": str(initial_file),
                "rule": self._rule,
                "n_shards": self._n_shards,
                "shard_copies": self._shard_copies,
                "shared_memory": self._shared_memory,
                "snapshot_every": self._snapshot_every,
                "directory": str(directory),
                "keeps": self._directory is not None,
            }
        )

    def _await_address(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], self._start_seconds_max)
        line = process.stdout.readline() if ready else b""
        if not line:
            status = process.poll()
            how = (
                f"is not ready after {self._start_seconds_max:g} s"
                if status is None
                else f"ended with status {status}"
            )
            raise PeerLostError(f"the parameter server {how}")
        reply = msgspec.json.decode(line, type=ServerReady)
        if reply.error is not None:
            raise PeerLostError(f"the parameter server cannot start: {reply.error}")
        address = ServerAddress(
            endpoint=reply.endpoint,
            run=reply.run,
            n_shards=self._n_shards,
            shard_copies=self._shard_copies,
            memory=reply.memory,
        )
        return str(address)
