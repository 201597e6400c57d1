"""Blocks that leave while a push is still being filled (PO-1)."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distbelief.core import vectors
from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.pushes import FullBlocks, PushDraft
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.parameter_server.tensor_copies import PushBuffer
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Address, Notes, Received
from tests.distbelief.parameter_server.pair import numbered, sent


FIRST = (1 << 32) + 1  # sequence of the first push of incarnation 1
PER_BLOCK = 64  # elements
SIZES = st.lists(st.integers(1, 600), min_size=1, max_size=6)


def client_of(view: PartialView) -> ParameterClient:
    config = ClientConfig(pushes=True, credit_blocks=64)
    client = ParameterClient(config, view, memory=PrivateMemory(host=""))
    client.start(1, 0.0)
    for k in view.shards:
        open_session(client, k)
    return client


def open_session(client: ParameterClient, k: int, *, term: int = 1) -> list[pf.PushBlock]:
    opened = pf.SessionOpened(
        term=term,
        clock=0,
        samples=0,
        watermark=FIRST - 1,
        applied=0,
        parameters_region="",
        push_buffers_region="",
    )
    event = Received(sender=Address(f"shard-{k}"), incarnation=term, message=opened)
    return sent(client.handle(event, 0.0), pf.PushBlock)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "BLOCK_BYTES", 8 * PER_BLOCK)


@pytest.mark.parametrize("is_whole", [True, False])
@settings(max_examples=60)
@given(sizes=SIZES, n_shards=st.integers(1, 3), seed=st.integers(0, 1 << 16))
def test_a_block_is_told_once_and_when_all_of_it_is_there(
    sizes: Sequence[int], n_shards: int, seed: int, *, is_whole: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "BLOCK_BYTES", 8 * PER_BLOCK)
        specs = [TensorSpec(name=f"t{i}", shape=(2, n)) for i, n in enumerate(sizes)]
        layout = Layout.of(specs, n_shards=n_shards, dtype="float64")
        columns = [(spec.name, Region(((0, 2), (0, -(-spec.shape[1] // 2))))) for spec in specs]
        view = PartialView(layout, None if is_whole else columns)
        assert_told_once(view, seed)


def assert_told_once(view: PartialView, seed: int) -> None:
    client, told = client_of(view), list[tuple[int, int, Vector]]()

    def tell(note: object, share: float) -> None:
        assert isinstance(note, FullBlocks)
        assert 0.0 < share <= 1.0 + 1e-9
        for place, blocks in enumerate(note.blocks):
            for block in blocks:
                there = slice(block * PER_BLOCK, (block + 1) * PER_BLOCK)
                told.append((place, block, note.targets[place].values[there].copy()))

    draft = client.draft(notes=Notes(tell))
    for target in draft._targets:
        target.values[:] = np.nan  # of the push before
    stream = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(view.tensors), generator=stream).tolist()
    for index in order:
        n = view.tensors[index].n_elements
        draft.put(index, torch.randn(n, generator=stream, dtype=torch.float64))
    draft.finish()
    for place, block, values in told:
        there = slice(block * PER_BLOCK, (block + 1) * PER_BLOCK)
        assert np.array_equal(draft._targets[place].values[there], values)
    keys = [(place, block) for place, block, _ in told]
    assert sorted(keys) == [
        (place, block)
        for place, target in enumerate(draft._targets)
        for block in range(target.n_blocks)
        if len(target.values)
    ]


def test_a_block_that_leaves_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two tensors share a block, it must wait for both."""
    whole = PartialView.blocks_of

    def blocks_of(self: PartialView, k: int) -> dict[int, range]:
        found = whole(self, k)
        return {index: range(one.start, max(one.stop - 1, 1)) for index, one in found.items()}

    monkeypatch.setattr(PartialView, "blocks_of", blocks_of)
    specs = [TensorSpec(name=f"t{i}", shape=(2, 73)) for i in range(4)]
    view = PartialView(Layout.of(specs, n_shards=1, dtype="float64"))
    with pytest.raises(AssertionError):
        assert_told_once(view, seed=0)


# --- what leaves ---

LAYOUT = Layout.of(
    [TensorSpec(name=name, shape=(2 * PER_BLOCK,)) for name in "abc"], n_shards=1, dtype="float64"
)


class Early:
    """A client of one shard, whose notes are passed on at once."""

    def __init__(self) -> None:
        self.client = client_of(PartialView(LAYOUT))
        self.blocks: list[pf.PushBlock] = []
        self.pushes: list[pf.Push] = []

    def draft(self) -> PushDraft:
        return self.client.draft(notes=Notes(self._tell))

    def _tell(self, note: object, _: float) -> None:
        self.take(self.client.filled(note, 0.0))

    def take(self, actions: Sequence[object]) -> None:
        self.blocks += sent(actions, pf.PushBlock)  # type: ignore[arg-type]
        self.pushes += sent(actions, pf.Push)  # type: ignore[arg-type]

    def fill(self, draft: PushDraft, order: str, value: float) -> None:
        for name in order:
            draft.put("abc".index(name), torch.full((2 * PER_BLOCK,), value, dtype=torch.float64))

    def close(self, draft: PushDraft) -> None:
        self.take(self.client.staged(draft.finish(), n_gradients=1, samples=1, now=0.0))


def test_all_but_the_last_block_leave_before_a_push_is_closed() -> None:
    early = Early()
    draft = early.draft()
    early.fill(draft, "cb", 1.0)
    assert [one.block_index for one in early.blocks] == [4, 5, 2, 3]
    early.fill(draft, "a", 1.0)
    assert [one.block_index for one in early.blocks] == [4, 5, 2, 3, 0]
    assert early.pushes == []
    early.close(draft)
    assert [one.block_index for one in early.blocks] == [4, 5, 2, 3, 0, 1]
    assert [one.number for one in early.blocks] == [*range(6)]
    assert len(early.pushes) == 1


def test_an_abandoned_attempt_is_void() -> None:
    early, buffer = Early(), PushBuffer(6 * PER_BLOCK, LAYOUT.dtype)
    bad = early.draft()
    early.fill(bad, "cb", torch.nan)
    early.client.abandon()
    late = list(early.blocks)
    good = early.draft()
    early.fill(good, "bc", 2.0)
    assert [one.attempt for one in early.blocks] == [msgspec.UNSET] * 4 + [1] * 4
    for one in [*late[:3], *early.blocks[4:6], *late, *early.blocks[4:]]:
        buffer.take(one, sender="replica-0")
    assert buffer.received == 4
    early.fill(good, "a", 3.0)
    early.close(good)
    for one in [*late, *early.blocks[8:], *late]:
        buffer.take(one, sender="replica-0")
    values = np.repeat([3.0, 2.0, 2.0], 2 * PER_BLOCK)
    assert np.array_equal(buffer._memory, values)
    assert early.pushes[0].attempt == 1
    assert buffer.lend(FIRST, msgspec.UNSET, 1)
    assert not buffer.lend(FIRST, msgspec.UNSET)


def test_a_note_of_an_abandoned_draft_sends_nothing() -> None:
    early, notes = Early(), list[object]()
    draft = early.client.draft(notes=Notes(lambda note, _: notes.append(note)))
    early.fill(draft, "c", 1.0)
    early.client.abandon()
    early.draft()
    assert early.client.filled(notes[0], 0.0) == []


def test_a_new_primary_gets_what_has_left_from_the_beginning() -> None:
    """And under the same numbers: the order of an attempt stays."""
    early = Early()
    draft = early.draft()
    early.fill(draft, "bc", 1.0)
    again = open_session(early.client, 0, term=2)
    assert [(one.number, one.block_index) for one in again] == [(0, 2), (1, 3), (2, 4), (3, 5)]
    early.fill(draft, "a", 1.0)
    early.close(draft)
    assert early.pushes[-1].term == 2
    assert {(one.number, one.block_index) for one in early.blocks} == {
        *enumerate([2, 3, 4, 5, 0, 1])
    }


def test_an_acknowledgement_of_another_attempt_means_nothing() -> None:
    early = Early()
    early.fill(early.draft(), "cb", torch.nan)
    early.client.abandon()
    early.fill(early.draft(), "cb", 1.0)
    link = early.client._links[0]
    for attempt, received in ((msgspec.UNSET, 0), (1, 3)):
        ack = pf.PushBlockAck(sequence=FIRST, term=1, received=3, attempt=attempt)
        early.client.handle(Received(sender=Address("shard-0"), incarnation=1, message=ack), 0.0)
        assert link.pushing.early is not None
        assert link.pushing.early.blocks.received == received


def test_a_shard_refuses_one_block_under_two_numbers() -> None:
    buffer = PushBuffer(6 * PER_BLOCK, LAYOUT.dtype)
    values = numbered(LAYOUT)[0].numpy()[:PER_BLOCK]
    block = pf.PushBlock(sequence=FIRST, term=1, block_index=4, values=values, number=0)
    assert buffer.take(block, sender="replica-0")
    twice = pf.PushBlock(sequence=FIRST, term=1, block_index=4, values=values, number=1)
    with pytest.raises(RemoteProtocolError, match="two numbers"):
        buffer.take(twice, sender="replica-0")
