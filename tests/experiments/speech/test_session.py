import numpy as np
from hypothesis import given, strategies as st

from experiments.speech.session import label_frames


@given(
    durations=st.lists(st.integers(1, 400), min_size=1, max_size=12), silence=st.integers(0, 300)
)
def test_labels_equal_a_slow_search(durations: list[int], silence: int) -> None:
    onsets = silence + np.cumsum([0, *durations[:-1]])
    n_samples = silence + sum(durations)
    centres = np.arange(0, n_samples, 37)
    segments, positions = label_frames(centres, onsets=onsets, n_samples=n_samples)
    ends = [*onsets[1:], n_samples]
    for centre, segment, position in zip(centres, segments, positions, strict=True):
        slow = max([i for i, onset in enumerate(onsets) if onset <= centre], default=0)
        third = (centre - onsets[slow]) * 3 // (ends[slow] - onsets[slow])
        assert segment == slow
        assert position == max(0, third)


def test_segments_of_no_length_are_passed_over() -> None:
    onsets = np.array([0, 100, 100, 200])
    segments, positions = label_frames(np.array([99, 100, 199, 200]), onsets=onsets, n_samples=200)
    assert segments.tolist() == [0, 2, 2, 3]
    assert positions.tolist() == [2, 0, 2, 0]
