from pathlib import Path

import numpy as np

from experiments.speech.tape import Tape


def test_rows_written_bit_by_bit_load_as_one_array(tmp_path: Path) -> None:
    rows = np.arange(30, dtype=np.float16).reshape(10, 3)
    with Tape(tmp_path / "a.npy", row_shape=(3,), dtype=np.float16) as tape:
        tape.append(rows[:4])
    with Tape(tmp_path / "b.npy", row_shape=(3,), dtype=np.float16) as tape:
        tape.copy(tmp_path / "a.npy")
        for row in rows[4:]:
            tape.append(row[None])
        assert tape.n_rows == 10
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), rows)


def test_an_empty_tape_is_an_empty_array(tmp_path: Path) -> None:
    with Tape(tmp_path / "a.npy", row_shape=(), dtype=np.int64):
        pass
    assert np.load(tmp_path / "a.npy").shape == (0,)
