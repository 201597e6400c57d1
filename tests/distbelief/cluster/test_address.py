"""Where machines join a job."""

import pytest

from distbelief.cluster.listen import JobAddress
from distbelief.errors import JobError
from distbelief.transport.keys import KeyPair


KEY = "ab" * 32
SECRET = "5f" * 32
PAIR = KeyPair.parse(SECRET)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (f"tcp://10.0.0.1:7700?key={KEY}", JobAddress(host="10.0.0.1", port=7700, key=KEY)),
        (
            f"tcp://node-3.example.org:1?secret={SECRET}",
            JobAddress(host="node-3.example.org", port=1, key=PAIR.public, secret=SECRET),
        ),
    ],
)
def test_printed_addresses_can_be_read_and_keys_show_no_secret(
    text: str, address: JobAddress
) -> None:
    assert str(address) == text
    assert JobAddress.parse(text) == address
    half = JobAddress(host=address.host, port=address.port)
    assert JobAddress.parse(text.partition("?")[0]) == half


def test_a_secret_that_is_none_is_not_shown() -> None:
    with pytest.raises(JobError, match="copy the whole address") as caught:
        JobAddress.parse(f"tcp://h:1?secret={SECRET[:-1]}")
    assert SECRET[:8] not in str(caught.value)


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
