from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save_file

from distbelief.core import files
from distbelief.core.errors import LocalProtocolError, StorageError
from distbelief.core.vectors import Vector
from distbelief.job.run.checkpoints import N_KEPT, CheckpointStore
from distbelief.protocol.role import FIRST_LABEL, NEWEST, Snapshot
from tests.distbelief.limits import largest_file


def snapshot(label: str, *, n: int = 1000) -> Snapshot:
    values = np.arange(n, dtype=np.float32) + float(int(label, 36) % 1000)
    return Snapshot(
        label=label,
        arrays={"values": values, "state.sum": values.astype(np.float64)},
        facts={"clock": label, "clients": '{"replica-0": 3}'},
    )


def store_at(path: Path, *labels: str) -> tuple[CheckpointStore, list[str]]:
    """Return a store in which shard-0 has these, and what it reports."""
    told: list[str] = []
    store = CheckpointStore(path / "snapshots", report=told.append)
    for label in labels:
        store.save("shard-0", snapshot(label))
    return store, told


def assert_same(one: Snapshot | None, other: Snapshot) -> None:
    assert one is not None
    assert one.label == other.label
    assert one.facts == other.facts
    assert one.arrays.keys() == other.arrays.keys()
    for name, values in other.arrays.items():
        assert one.arrays[name].dtype == values.dtype
        np.testing.assert_array_equal(one.arrays[name], values)


# ------------------------------------------------------------------ snapshots


def test_the_newest_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store, told = store_at(tmp_path, "00001", "00002")
    assert_same(store.newest("shard-0"), snapshot("00002"))
    assert store.newest("shard-1") is None
    assert told == []
    path = tmp_path / "snapshots" / "shard-0" / "00002.safetensors"  # other programs read it, too
    np.testing.assert_array_equal(load_file(path)["values"], snapshot("00002").arrays["values"])


def test_a_checkpoint_that_nobody_asked_for_takes_the_place_of_the_newest(tmp_path: Path) -> None:
    """So the next label of the supervisor, who knows nothing of it, is above it."""
    store, told = store_at(tmp_path)
    store.save("shard-0", replace(snapshot("00009"), label=NEWEST))
    assert store.labels("shard-0") == [FIRST_LABEL]
    for label in ("00001", "00002"):
        store.save("shard-0", snapshot(label))
    store.save("shard-0", replace(snapshot("00009"), label=NEWEST))
    assert_same(store.newest("shard-0"), replace(snapshot("00009"), label="00002"))
    assert store.labels("shard-0") == [FIRST_LABEL, "00001", "00002"]
    assert told == []


def test_a_shard_that_was_replaced_meanwhile_overwrites_nothing(tmp_path: Path) -> None:
    """Cut off from its supervisor and not from the store, it saves once more before it ends."""
    store, _ = store_at(tmp_path)
    newer = replace(snapshot("00003"), facts={"incarnation": "2"})
    store.save("shard-0", newer)
    late = replace(snapshot("00009"), label=NEWEST, facts={"incarnation": "1"})
    with pytest.raises(StorageError, match="a later incarnation of shard-0 has saved 00003"):
        store.save("shard-0", late)
    assert_same(store.newest("shard-0"), newer)
    store.save("shard-0", replace(late, facts={"incarnation": "2"}))
    assert_same(store.newest("shard-0"), replace(late, label="00003", facts={"incarnation": "2"}))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16, np.int64])
def test_every_element_type_sent_can_be_kept(tmp_path: Path, dtype: type[np.generic]) -> None:
    store, _ = store_at(tmp_path)
    values: Vector = np.arange(5).astype(dtype)
    kept = Snapshot(label="1", arrays={"a": values, "none": values[:0]}, facts={})
    store.save("shard-0", kept)
    assert_same(store.newest("shard-0"), kept)


def test_copies_of_a_shard_keep_their_checkpoints_in_one_place(tmp_path: Path) -> None:
    store, _ = store_at(tmp_path)
    for label, copy in (("00001", "shard-1"), ("00002", "shard-1b")):
        store.save(copy, snapshot(label))
    for copy in ("shard-1", "shard-1b"):
        assert_same(store.newest(copy), snapshot("00002"))
    assert store.newest("shard-0b") is None


def test_the_last_three_are_kept_and_other_roles_left_alone(tmp_path: Path) -> None:
    store, _ = store_at(tmp_path)
    store.save("shard-1", snapshot("00001"))
    for label in ("00001", "00002", "00003", "99999", "100000"):  # in the order of numbers
        store.save("shard-0", snapshot(label))
    assert store.labels("shard-0") == ["00003", "99999", "100000"]
    assert store.labels("shard-1") == ["00001"]


@given(where=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_single_changed_bit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, where: int, bit: int
) -> None:
    store, told = store_at(tmp_path_factory.mktemp("store"))
    store.save("shard-0", snapshot("00001", n=64))
    store.save("shard-0", snapshot("00002", n=64))
    path = Path(store.path("shard-0", "00002"))
    content = bytearray(path.read_bytes())
    content[where % len(content)] ^= 1 << bit
    path.write_bytes(content)
    newest = store.newest("shard-0")
    if newest is not None and newest.label == "00002":  # padding of the header
        assert_same(newest, snapshot("00002", n=64))
    else:
        assert_same(newest, snapshot("00001", n=64))
        assert len(told) == 1


@given(share=st.floats(0, 0.999))
def test_a_checkpoint_cut_anywhere_is_passed_over_reported_and_kept(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    store, told = store_at(tmp_path_factory.mktemp("store"), "00001", "00002")
    path = Path(store.path("shard-0", "00002"))
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert_same(store.newest("shard-0"), snapshot("00001"))
    assert len(told) == 1
    assert told[0].startswith(f"checkpoint {path} is damaged and skipped (")
    assert path.exists()


def test_a_damaged_checkpoint_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    store, _ = store_at(tmp_path, "00001", "00002")
    Path(store.path("shard-0", "00002")).write_bytes(b"cut")
    for number in range(3, 3 + N_KEPT):
        store.save("shard-0", snapshot(f"{number:05d}"))
    assert store.labels("shard-0") == ["00002", "00003", "00004", "00005"]


def test_what_the_store_has_not_written_there_is_not_trusted(tmp_path: Path) -> None:
    """A checkpoint moved to another label, and a safetensors file of somebody else."""
    store, told = store_at(tmp_path, "00001")
    save_file({"values": np.zeros(4, np.float32)}, Path(store.path("shard-0", "00002")))
    assert_same(store.newest("shard-0"), snapshot("00001"))
    assert "it has no checksum" in told[0]
    Path(store.path("shard-0", "00001")).rename(Path(store.path("shard-0", "00002")))
    with pytest.raises(StorageError, match="its checksum does not match"):
        store.newest("shard-0")
    assert len(told) == 1


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "harm", [flipped, lambda content: content[:100], lambda _: b""], ids=["flip", "cut", "empty"]
)
def test_if_all_are_damaged_all_are_named(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    """The newest was None, as if nothing was ever saved, and the run began anew."""
    store, told = store_at(tmp_path, "00001", "00002")
    paths = [Path(store.path("shard-0", label)) for label in ("00001", "00002")]
    for path in paths:
        path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(StorageError) as caught:
        store.newest("shard-0")
    assert str(caught.value).startswith("all checkpoints of shard-0 are damaged: ")
    assert all(f"{path} (" in str(caught.value) for path in paths)
    assert told == []


def test_it_is_told_which_older_one_is_used(tmp_path: Path) -> None:
    store, told = store_at(tmp_path, "00007", "00009")
    damaged = Path(store.path("shard-0", "00009"))
    damaged.write_bytes(flipped(damaged.read_bytes()))
    store.newest("shard-0")
    (line,) = told
    assert line == (
        f"checkpoint {damaged} is damaged and skipped (its checksum does not match); "
        "00007.safetensors is used instead"
    )


def test_what_cannot_be_read_is_not_called_damaged_and_not_passed_over(tmp_path: Path) -> None:
    """It was: after a backup put back by another user, the run went back in time."""
    store, told = store_at(tmp_path, "00001")
    unreadable = Path(store.path("shard-0", "00002"))
    unreadable.mkdir()  # may be read by nobody, not even by root
    with pytest.raises(StorageError, match=f"cannot read {unreadable}: Is a directory"):
        store.newest("shard-0")
    with pytest.raises(StorageError, match="it may be intact"):
        store.fault("shard-0", "00002")
    assert told == []


@pytest.mark.parametrize(
    "name", ["00001 (copy).safetensors", f"00002.safetensors.77{files.TEMPORARY}"]
)
def test_a_file_that_no_checkpoint_can_be_is_left_alone(tmp_path: Path, name: str) -> None:
    """A copy by hand, and what a dying writer left."""
    store, told = store_at(tmp_path, "00001")
    path = Path(store.path("shard-0", "00001"))
    path.with_name(name).write_bytes(path.read_bytes())
    assert store.labels("shard-0") == ["00001"]
    assert_same(store.newest("shard-0"), snapshot("00001"))
    assert told == []


def test_without_room_the_old_checkpoints_stay_and_the_path_is_named(tmp_path: Path) -> None:
    store, told = store_at(tmp_path, "00001")
    with largest_file(4096), pytest.raises(StorageError) as caught:
        store.save("shard-0", snapshot("00002"))
    path = Path(store.path("shard-0", "00002"))
    assert str(caught.value).startswith(f"cannot write {path}: the file would be too l")
    assert_same(store.newest("shard-0"), snapshot("00001"))
    assert [file.name for file in path.parent.iterdir()] == ["00001.safetensors"]
    assert told == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file")
    store, _ = store_at(tmp_path)
    with pytest.raises(StorageError, match=r"cannot make .*snapshots/shard-0: "):
        store.save("shard-0", snapshot("00001"))


@pytest.mark.parametrize("label", ["", "../x", "a/b", ".hidden", "x" * 200])
def test_a_label_cannot_lead_out_of_the_directory(tmp_path: Path, label: str) -> None:
    store, _ = store_at(tmp_path)
    with pytest.raises(LocalProtocolError, match="cannot name a checkpoint file"):
        Path(store.path("shard-0", label))
