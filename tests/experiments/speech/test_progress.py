import pytest

from experiments.speech.progress import show_progress


def test_without_a_terminal_the_last_frames_are_a_plain_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with show_progress("synthesising", n_frames=10) as advance:
        advance(4)
        advance(6)
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("synthesising: 100%, ")
    assert line.endswith(" frames/s, 0 s left")
