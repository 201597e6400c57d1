"""`DownpourSGD` before it has met a server; with one, see `tests/processes`."""

import threading
from typing import cast

import pytest
import torch
from torch import nn

import distbelief
from distbelief.roles import SUPERVISOR
from distbelief.server import ServerAddress
from distbelief.transport.zmq_transport import ZmqTransport


@pytest.mark.parametrize("server", [5, None, b"tcp://127.0.0.1:41000"])
def test_what_is_no_text_is_no_address_and_is_shown(server: object) -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(distbelief.JobError, match="use ParameterServer") as caught:
        distbelief.DownpourSGD(parameters, server=cast("str", server))
    assert str(caught.value).startswith(f"server is {server!r}, which is no address")


def test_a_server_that_does_not_take_the_token_is_told_from_one_that_is_away() -> None:
    over = threading.Event()

    def serve(transport: ZmqTransport) -> None:
        while not over.is_set():
            transport.poll(0.02)

    with ZmqTransport(name=SUPERVISOR, incarnation=1, token="its own") as transport:
        address = ServerAddress(
            endpoint=transport.endpoint, token="another run", n_shards=1, memory=""
        )
        server = threading.Thread(target=serve, args=(transport,))
        server.start()
        try:
            with pytest.raises(distbelief.JobError) as caught:
                distbelief.DownpourSGD(
                    [nn.Parameter(torch.zeros(3))], server=str(address)
                )
        finally:
            over.set()
            server.join()
    told = str(caught.value)
    assert transport.endpoint in told
    assert "does not take the token 'anothe…'" in told
    assert "ParameterServer(...).address" in told
