import inspect
from pydoc_data.topics import topics

from experiments.speech import text


DOCSTRING = """Return a *list* of the items that :func:`read` has found.

    An example follows, and it shall not be read aloud::

        >>> This is code and Not A Sentence to be read aloud.

    Too short. Every item of the list is a string, and no item of it is empty.
    The 3rd item holds a digit, so nobody is asked to read it aloud."""


def test_a_docstring_yields_its_plain_sentences() -> None:
    assert list(text.split(inspect.cleandoc(DOCSTRING))) == [
        "Return a list of the items that read has found.",
        "Every item of the list is a string, and no item of it is empty.",
    ]


def read_topics() -> list[str]:
    """Sentences enough for a law, without the seconds that all of them take."""
    return sorted({line for topic in topics.values() for line in text.split(topic)})


def test_no_sentence_is_in_both_parts_and_none_is_lost() -> None:
    sentences = read_topics()
    train = text.select(sentences, part="train")
    test = text.select(sentences, part="test")
    assert len(sentences) > 800
    assert not set(train) & set(test)
    assert sorted(train + test) == sentences
    assert 0.05 < len(test) / len(sentences) < 0.15


def test_a_sentence_stays_in_its_part_when_others_come_and_go() -> None:
    sentences = read_topics()
    fewer = sentences[::2]
    test = set(text.select(sentences, part="test"))
    assert text.select(fewer, part="test") == [s for s in fewer if s in test]


def test_the_hash_sees_every_sentence() -> None:
    some = ["One sentence that is read.", "Another sentence that is read."]
    assert text.hash_sentences(some) != text.hash_sentences(some[:1])
