"""A standing parameter server on this host, for loops that use `DownpourSGD`."""

from collections.abc import Iterable
from typing import Self
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import torch

from distbelief.errors import JobError
from distbelief.parameter_server.layout import TensorSpec


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to find its server, and to be let in.

    Written tcp://HOST:PORT?token=…&shards=2&memory=….
    """

    endpoint: str
    token: str  # whoever knows it may push: keep it as you would a password
    n_shards: int
    memory: str  # the directory of shared memory, for workers of this host

    def __str__(self) -> str:
        """Write it as one line."""
        query = {"token": self.token, "shards": self.n_shards, "memory": self.memory}
        return f"{self.endpoint}?{urlencode(query)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote.

        Raises:
            JobError: it is no such address.
        """
        parts = urlsplit(text)
        query = parse_qs(parts.query)
        try:
            port = parts.port
            token, n_shards = query["token"][0], int(query["shards"][0])
        except (KeyError, ValueError):
            port, token, n_shards = None, "", 0
        if parts.scheme != "tcp" or not port or n_shards < 1:
            raise JobError(
                f"{text!r} is no address of a parameter server: use "
                "ParameterServer(...).address, which looks like "
                "tcp://127.0.0.1:41000?token=…&shards=2"
            )
        return cls(
            endpoint=f"tcp://{parts.netloc}",
            token=token,
            n_shards=n_shards,
            memory=query.get("memory", [""])[0],
        )


def parameter_specs(parameters: Iterable[torch.nn.Parameter]) -> list[TensorSpec]:
    """Return how the parameters of one's own loop are called: by their position.

    Raises:
        JobError: there is none, or one of an element type that shards do not keep.
    """
    specs = []
    for index, parameter in enumerate(parameters):
        if parameter.dtype != torch.float32:
            raise JobError(
                f"parameter {index} is {parameter.dtype}: a parameter server keeps "
                "float32; use net.float()"
            )
        specs.append(
            TensorSpec(
                name=f"{index:06d}", shape=tuple(parameter.shape), kind="parameter"
            )
        )
    if not specs:
        raise JobError("no parameters are given: is it net.parameters()?")
    return specs
