"""Every decoder on a few bytes: `python -m experiments.fuzz` tries them ten million."""

import io
import pickle  # noqa: TID251 -- what nobody may read
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from typing_extensions import override

from experiments.fuzz.command import DECODERS
from experiments.fuzz.engines import Trial
from experiments.fuzz.mutating import Mutator, numbers
from experiments.fuzz.tally import Run, Tally, fingerprint
from experiments.fuzz.targets import Decoder
from experiments.fuzz.watching import Watch


pytestmark = pytest.mark.untraced

N = 400


WATCH = Watch()  # one for all tests: no audit hook ever ends


class Bomb:
    """What runs when it is unpickled."""

    @override
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('a pickle was read')",))


@pytest.fixture(scope="module")
def bombs() -> list[bytes]:
    saved = io.BytesIO()
    torch.save(Bomb(), saved)
    plain = [pickle.dumps(Bomb(), protocol) for protocol in (0, 2, 5)]
    return [*plain, saved.getvalue()]


@pytest.fixture(params=sorted(DECODERS))
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    with DECODERS[request.param]() as opened:
        yield opened


def test_it_refuses_what_it_does_not_take_and_nothing_else(decoder: Decoder) -> None:
    trial = Trial(decoder=decoder, watch=Watch(hears=False))
    for data in decoder.seeds:
        assert trial.try_(data), data
    mutator = Mutator(decoder.seeds, draw=numbers(1))
    for _ in range(N):
        trial.try_(mutator.next())
    assert trial.findings == []


def test_a_pickle_is_never_read(decoder: Decoder, bombs: list[bytes]) -> None:
    decoder.takes(decoder.seeds[0])  # what is imported then is no matter
    seed = decoder.seeds[0]
    WATCH.seen.clear()
    with WATCH.on():
        for bomb in bombs:
            for data in (bomb, seed + bomb, bomb + seed, seed[:9] + bomb + seed[9:]):
                decoder.takes(data)
    assert WATCH.seen == []


def test_nothing_is_compiled_for_what_comes_later(decoder: Decoder) -> None:
    """Each job that was read had the annotations of its tables evaluated anew.

    The watch took that for code of the job's: what is evaluated must be so at first
    and once, or nobody can tell whose it is.
    """
    for data in decoder.seeds:
        decoder.takes(data)
    WATCH.seen.clear()
    with WATCH.on():
        for data in decoder.seeds:
            decoder.takes(data)
    assert WATCH.seen == []


def test_runs_add_up_while_the_decoder_stays_as_it_was(tmp_path: Path) -> None:
    with DECODERS["place"]() as opened, DECODERS["secret"]() as other:
        code = fingerprint(opened)
        assert code == fingerprint(opened) != fingerprint(other)
    tally = Tally(tmp_path / "kept" / "tally.jsonl")
    run = Run(
        name="place",
        what="endpoints",
        fingerprint=code,
        engine="own",
        seed=0,
        n=1000,
        n_taken=20,
        seconds=0.5,
        findings=[],
    )
    tally.add(run)
    tally.add(msgspec.structs.replace(run, fingerprint="of an older one"))
    tally.add(msgspec.structs.replace(run, seed=1))
    assert [run.seed for run in tally.runs("place", code)] == [0, 1]
    assert tally.runs("secret", code) == Tally(None).runs("place", code) == []


def test_the_bomb_would_go_off(bombs: list[bytes]) -> None:
    """Else the test above would say nothing."""
    WATCH.seen.clear()
    with WATCH.on(), pytest.raises(SystemExit, match="a pickle was read"):
        pickle.loads(bombs[0])
    assert any("pickle.find_class" in event for event in WATCH.seen)
