"""Where machines join a job."""

import pytest

from distbelief.cluster.address import JobAddress
from distbelief.errors import JobError
from distbelief.transport.keys import KeyPair


KEY = "ab" * 32
SECRET = "5f" * 32
PAIR = KeyPair.parse(SECRET)


@pytest.mark.parametrize(
    "address",
    [
        JobAddress(host="10.0.0.1", port=7700, key=KEY),
        JobAddress(host="node-3.example.org", port=1, key=PAIR.public, secret=SECRET),
    ],
)
def test_what_is_printed_can_be_read(address: JobAddress) -> None:
    assert JobAddress.parse(str(address)) == address


def test_with_a_key_the_address_holds_no_secret() -> None:
    assert str(JobAddress(host="h", port=1, key=KEY)) == f"tcp://h:1?key={KEY}"


def test_a_secret_that_is_none_is_not_shown() -> None:
    with pytest.raises(JobError, match="copy the whole address") as caught:
        JobAddress.parse(f"tcp://h:1?secret={SECRET[:-1]}")
    assert SECRET[:8] not in str(caught.value)


def test_half_of_it_will_do() -> None:
    assert JobAddress.parse("tcp://h:7700") == JobAddress(host="h", port=7700)


@pytest.mark.parametrize(
    "text",
    [
        *("", "tcp://h", "h:1", "http://h:1", "tcp://:1", "tcp://h:99999"),
        *("tcp://h[:1", "tcp://h]:1", "tcp://1[]0:7", "tcp://h:1?secret=\udcc9"),  # fuzz
    ],
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(JobError, match="is not a job address"):
        JobAddress.parse(text)
    with pytest.raises(JobError, match="not a public key"):
        JobAddress.parse("tcp://h:1?key=abc")
