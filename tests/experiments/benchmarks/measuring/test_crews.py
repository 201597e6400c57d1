import io
import json
from pathlib import Path

import msgspec
import pytest

from experiments.benchmarks.measuring import paced
from experiments.benchmarks.measuring.crews import Crew
from experiments.benchmarks.measuring.hands import Hand
from experiments.benchmarks.measuring.workload import Workload
from experiments.benchmarks.network.hosts import HERE


def test_it_takes_as_many_steps_as_each_line_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[None] = []
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n3\n"))
    paced.obey(lambda: steps.append(None), n_warm=1)
    ready, *told = capsys.readouterr().out.splitlines()
    assert ready == paced.READY
    assert [len(json.loads(line)) for line in told] == [2, 3]
    assert len(steps) == 1 + 2 + 3


@pytest.mark.processes
@pytest.mark.soak
def test_a_crew_takes_turns_and_a_step_takes_as_long_as_its_slowest(tmp_path: Path) -> None:
    file = tmp_path / "workload.json"
    workload = Workload(net="speech", batch_size=4, small=True)
    file.write_bytes(msgspec.json.encode(workload))
    hand = Hand(module="bare.whole_net", arguments=[str(file), "1"], host=HERE[0])
    with Crew("pair", [hand, hand], tmp_path) as crew:
        steps = crew.turn(seconds=0.1)
        assert len(steps) >= 2
        assert min(steps) > 0
        crew.turn(seconds=0.1)
    assert crew.step.low <= crew.step.median <= crew.step.high
    assert len(crew.cpu_seconds) == 2
    assert crew.n_bytes > 1 << 20
    assert set(crew.row()) == {"step, ms", "CPU ms", "memory", "others"}


@pytest.mark.processes
@pytest.mark.slow
def test_a_crew_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    hand = Hand(module="no_such_module", arguments=[], host=HERE[0])
    with (
        pytest.raises(RuntimeError, match=r"(?s)nobody says ''.*no_such_module"),
        Crew("nobody", [hand], tmp_path),
    ):
        pass
