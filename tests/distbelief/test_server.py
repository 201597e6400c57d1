import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from distbelief.errors import JobError
from distbelief.server import ServerAddress, parameter_specs


NAMES = st.text(min_size=1, max_size=40)


@given(
    token=NAMES,
    memory=st.text(max_size=60),
    n_shards=st.integers(1, 999),
    shard_copies=st.integers(1, 2),
)
def test_an_address_is_read_as_written(
    token: str, memory: str, n_shards: int, shard_copies: int
) -> None:
    address = ServerAddress(
        endpoint="tcp://127.0.0.1:41000",
        token=token,
        n_shards=n_shards,
        shard_copies=shard_copies,
        memory=memory,
    )
    assert ServerAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:41000",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:41000",
        "tcp://127.0.0.1:99999?token=a&shards=1",
        "tcp://127.0.0.1:41000?token=a&shards=0",
        "tcp://127.0.0.1:41000?token=a&shards=two",
        "tcp://127.0.0.1:41000?token=a&shards=2&copies=3",
        "http://127.0.0.1:41000?token=a&shards=1",
    ],
)
def test_what_is_no_address_is_shown_with_what_is_one(text: str) -> None:
    with pytest.raises(JobError, match="use ParameterServer") as caught:
        ServerAddress.parse(text)
    assert repr(text) in str(caught.value)


def test_parameters_are_called_by_their_position() -> None:
    specs = parameter_specs(nn.Linear(3, 2).parameters())
    assert [(spec.name, spec.shape) for spec in specs] == [
        ("000000", (2, 3)),
        ("000001", (2,)),
    ]


def test_no_parameters_and_doubles_are_refused() -> None:
    with pytest.raises(JobError, match=r"no parameters are given"):
        parameter_specs(iter(()))
    with pytest.raises(JobError, match=r"parameter 0 is torch.float64"):
        parameter_specs([nn.Parameter(torch.zeros(2, dtype=torch.float64))])
