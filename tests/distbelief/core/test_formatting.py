import pytest

from distbelief.core.formatting import nearest


KNOWN = ("tolerance", "history", "horizon")


@pytest.mark.parametrize("word", ["tolerence", "TOLERANCE", "tol"])
def test_a_word_near_to_one_that_is_known_or_its_beginning_is_reported(word: str) -> None:
    assert nearest(word, KNOWN) == "Did you mean 'tolerance'?"


@pytest.mark.parametrize("word", ["h", "", "batch"])
def test_of_a_word_that_may_mean_several_or_none_all_are_reported(word: str) -> None:
    assert nearest(word, KNOWN) == "It knows tolerance, history, horizon."


def test_what_others_call_a_thing_is_understood() -> None:
    known = ("learning_rate", "weight_decay", "left")
    assert nearest("lr", known) == "Did you mean 'learning_rate'?"
    assert nearest("lr", KNOWN) == "It knows tolerance, history, horizon."
