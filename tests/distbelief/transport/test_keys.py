"""Keys: public ones have text, secret ones do not."""

import string

import pytest
from hypothesis import given, strategies as st

from distbelief.errors import JobError
from distbelief.transport.keys import KeyPair, public_key


def test_a_pair_is_known_by_its_secret() -> None:
    pair = KeyPair.new()
    assert KeyPair.of(pair.secret).public == pair.public
    assert KeyPair.new().public != pair.public


def test_a_pair_has_no_text_with_its_secret() -> None:
    pair = KeyPair.new()
    for text in (repr(pair), str(pair), f"{[pair]!r}"):
        assert pair.secret.hex() not in text
        assert repr(pair.secret) not in text


def test_a_public_key_is_taken_as_users_paste_it() -> None:
    key = KeyPair.new().public
    assert public_key(f" {key.upper()}\n") == key


@given(text=st.text(max_size=70))
def test_what_is_no_public_key_is_shown(text: str) -> None:
    is_key = len(text.strip()) == 64 and set(text.strip().lower()) <= set(string.hexdigits.lower())
    if is_key:
        assert public_key(text) == text.strip().lower()
        return
    with pytest.raises(JobError, match="not a public key") as caught:
        public_key(text)
    assert repr(text) in str(caught.value)
