import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments.speech import labels
from experiments.speech.errors import SpeechError


NAMES = tuple(f"p{number:02d}" for number in range(80))


def draw_contexts(seed: int, *, n_frames: int = 3_000) -> labels.Contexts:
    """Contexts in which low phone numbers are common and high ones are rare."""
    rng = np.random.default_rng(seed)
    phones = np.minimum(rng.geometric(0.06, (n_frames, 3)) - 1, 79)
    positions = rng.integers(0, 3, (n_frames, 1))
    return np.concatenate([phones, positions], axis=1).astype(np.int16)


@pytest.mark.parametrize(("name", "n_states"), [("mono", 210), ("cd210", 210), ("cd8192", 8_192)])
def test_a_name_says_how_many_states_there_are(name: str, n_states: int) -> None:
    assert labels.count_states(name) == n_states
    inventory = labels.derive(name, contexts=draw_contexts(0), names=NAMES)
    assert inventory.n_states == n_states


@pytest.mark.parametrize("name", ["tri", "cd", "cd209", "cd-1", "mono2"])
def test_a_wrong_name_is_shown_with_the_right_ones(name: str) -> None:
    with pytest.raises(SpeechError, match=f"'{name}' is no labelling.*'cd8192'"):
        labels.count_states(name)


def test_common_phones_keep_their_own_states_and_rare_ones_share() -> None:
    contexts = draw_contexts(1, n_frames=50_000)
    inventory = labels.derive("mono", contexts=contexts, names=NAMES)
    states = inventory.label(contexts, names=NAMES)
    frames = np.bincount(contexts[:, 1], minlength=len(NAMES))
    common = {NAMES[phone] for phone in np.argsort(-frames, kind="stable")[:69]}
    assert set(inventory.phones) == common
    for phone, name in enumerate(NAMES):
        own = states[contexts[:, 1] == phone] // 3
        expected = inventory.phones.index(name) if name in common else labels.REST
        assert set(own.tolist()) <= {expected}
    np.testing.assert_array_equal(states % 3, contexts[:, 3])


@settings(max_examples=10)
@given(seed=st.integers(0, 1_000), n_states=st.integers(210, 2_000))
def test_tied_states_refine_mono_states(seed: int, n_states: int) -> None:
    contexts = draw_contexts(seed)
    mono = labels.derive("mono", contexts=contexts, names=NAMES)
    tied = labels.derive(f"cd{n_states}", contexts=contexts, names=NAMES)
    coarse = mono.label(contexts, names=NAMES)
    fine = tied.label(contexts, names=NAMES)
    assert fine.min() >= 0
    assert fine.max() < n_states
    pairs = set(zip(fine.tolist(), coarse.tolist(), strict=True))
    assert len(pairs) == len(set(fine.tolist()))  # one mono state per tied state


def test_an_unseen_context_backs_off_to_left_phone_and_then_to_phone() -> None:
    seen = np.array([[1, 2, 3, 0]] * 5 + [[1, 2, 4, 0]] * 4 + [[9, 9, 9, 2]], np.int16)
    inventory = labels.derive("cd212", contexts=seen, names=NAMES[:10])
    # Two states to give: (1, 2, any) with 9 frames and (1, 2, 3) with 5.
    unseen = np.array([[1, 2, 7, 0], [8, 2, 3, 0], [8, 2, 3, 1]], np.int16)
    states = inventory.label(np.concatenate([seen, unseen]), names=NAMES[:10])
    phone = inventory.phones.index("p02")
    assert states[:5].tolist() == [211] * 5
    assert states[5:9].tolist() == [210] * 4
    assert states[10:].tolist() == [210, phone * 3, phone * 3 + 1]


def test_only_names_count_not_the_numbers_a_corpus_gave_them() -> None:
    contexts = draw_contexts(3)
    order = np.random.default_rng(3).permutation(len(NAMES))
    renamed = tuple(NAMES[number] for number in order)
    renumbered = contexts.copy()
    renumbered[:, :3] = np.argsort(order)[contexts[:, :3]]
    first = labels.derive("cd500", contexts=contexts, names=NAMES)
    second = labels.derive("cd500", contexts=renumbered, names=renamed)
    assert first.phones == second.phones
    np.testing.assert_array_equal(first.states, second.states)
    np.testing.assert_array_equal(
        first.label(renumbered, names=renamed), first.label(contexts, names=NAMES)
    )


def test_a_phone_that_training_never_heard_is_counted_among_the_rest() -> None:
    inventory = labels.derive("mono", contexts=draw_contexts(0), names=NAMES)
    strange = np.array([[0, 0, 0, 1]], np.int16)
    assert inventory.label(strange, names=["click"]) == [labels.REST * 3 + 1]
