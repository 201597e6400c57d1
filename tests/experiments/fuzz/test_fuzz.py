"""Every decoder on a few bytes: `python -m experiments.fuzz` tries them ten million."""

import io
import math
import pickle  # noqa: TID251 -- what nobody may read
from collections.abc import Iterator

import pytest
import torch
from typing_extensions import override

from experiments.fuzz.__main__ import Trial, Watch
from experiments.fuzz.decoders import DECODERS, Decoder


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
    trial.warm_up()
    trial.mutate(n=N, seconds=math.inf, seed=1)
    assert trial.n == N
    assert trial.findings == []


def test_a_pickle_is_never_read(decoder: Decoder, bombs: list[bytes]) -> None:
    decoder.accepts(decoder.seeds[0])  # what is imported then is no matter
    seed = decoder.seeds[0]
    WATCH.seen.clear()
    with WATCH.on():
        for bomb in bombs:
            for data in (bomb, seed + bomb, bomb + seed, seed[:9] + bomb + seed[9:]):
                decoder.accepts(data)
    assert WATCH.seen == []


def test_nothing_is_compiled_for_what_comes_later(decoder: Decoder) -> None:
    """Each job that was read had the annotations of its tables evaluated anew.

    The watch took that for code of the job's: what is evaluated must be so at first
    and once, or nobody can tell whose it is.
    """
    for data in decoder.seeds:
        decoder.accepts(data)
    WATCH.seen.clear()
    with WATCH.on():
        for data in decoder.seeds:
            decoder.accepts(data)
    assert WATCH.seen == []


def test_the_bomb_would_go_off(bombs: list[bytes]) -> None:
    """Else the test above would say nothing."""
    WATCH.seen.clear()
    with WATCH.on(), pytest.raises(SystemExit, match="a pickle was read"):
        pickle.loads(bombs[0])
    assert any("pickle.find_class" in event for event in WATCH.seen)
