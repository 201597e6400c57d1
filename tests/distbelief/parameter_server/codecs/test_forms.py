"""A shard reads words by their form alone."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import RemoteProtocolError
from distbelief.parameter_server.codecs import FORMS, Codec, Form, decoder, n_words_max
from tests.distbelief.parameter_server.codecs.residuals import (
    CODECS,
    name_of,
    push,
    residual,
    tuned,
)


SEEDS = st.integers(0, 1 << 60)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@given(seed=SEEDS, n_elements=st.integers(0, 300))
def test_words_are_read_without_the_settings_of_their_codec(
    codec: Codec, seed: int, n_elements: int
) -> None:
    numbers = residual(seed, n_elements)
    pushed = push(tuned(codec, numbers, seed), numbers)
    out = np.zeros(n_elements, np.float32)
    decoder(codec.form, pushed.words, n_elements)(0, n_elements, out)
    assert out.tobytes() == pushed.sent.tobytes()


def test_each_form_is_that_of_a_codec() -> None:
    assert {codec.form for codec in CODECS} == set(FORMS)
    assert len(FORMS) == 7


@pytest.mark.parametrize("form", FORMS)
def test_invalid_words_of_any_form_are_refused(form: Form) -> None:
    with pytest.raises(RemoteProtocolError, match="words of a push"):
        decoder(form, np.full(7, 0xFFFFFFFF, np.uint32), 64)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@given(n_elements=st.integers(0, 1 << 20))
def test_one_bound_holds_for_all_forms(codec: Codec, n_elements: int) -> None:
    assert codec.n_words_max(n_elements) <= n_words_max(n_elements) <= n_elements + 20
