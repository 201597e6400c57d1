"""Files of data in jobs: every format gives the same model, and what is wrong is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy import sparse

from distbelief.core.errors import JobError, SettingError
from sandblaster import Lasso, LatentDirichletAllocation, MatrixFactorization, sparse_path
from sandblaster.strads import columns, jobs
from sandblaster.strads.columns import Csc, Mapped, columns_of
from sandblaster.strads.descent import COEFFICIENTS, INTERCEPT, PATH, PREDICTOR, Descent
from sandblaster.strads.factorization import Factors
from sandblaster.strads.files import read_columns, read_entries, read_matrix, read_targets
from sandblaster.strads.program import Mark, Steps, checksum, run
from tests.sandblaster.strads.problems import Floats, sparse_problem
from tests.sandblaster.strads.test_jobs import LINEAR, checked


X, Y = sparse_problem(n_samples=60, n_features=40, n_used=5)
X.data[:], Y = np.round(X.data, 3), np.round(Y, 3)  # as a text has them
X.data[X.data == 0.0] = 1.0
HELD: Final = slice(40, 60)
PLAIN: Final = Lasso(0.05, n_blocks=4).fit(X, Y).coef_


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X.toarray())
    np.save("f4.npy", X.toarray().astype(np.float32))
    np.save("fortran.npy", np.asfortranarray(X.toarray()))
    np.save("y.npy", Y)
    sparse.save_npz("x.npz", X)
    sparse.save_npz("rows.npz", sparse.csr_array(X), compressed=False)
    sparse.save_npz("columns.npz", X, compressed=False)
    return tmp_path


def solved(x: str, y: str = "y.npy", **arguments: Any) -> Floats:  # noqa: ANN401 -- of a job file
    model = jobs.lasso(x, y, alpha=0.05, n_blocks=4, **arguments)
    return np.asarray(run(model.program)[1][COEFFICIENTS])


# --- formats ---


@pytest.mark.parametrize(
    "x", ["x.npy", "fortran.npy", "f4.npy", "x.npz", "rows.npz", "columns.npz"]
)
def test_every_file_of_arrays_gives_the_same_model(x: str) -> None:
    np.testing.assert_allclose(solved(x), PLAIN, atol=1e-4)
    is_mapped = x in {"x.npy", "fortran.npy", "f4.npy", "columns.npz"}
    assert isinstance(read_columns(x), Mapped) == is_mapped


def test_a_file_read_in_part_gives_the_bits_of_one_read_whole() -> None:
    assert solved("columns.npz").tobytes() == solved("x.npz").tobytes()
    assert solved("x.npy").tobytes() == solved("fortran.npy").tobytes()


def text(path: str, x: Csc, y: Floats, first: int = 1) -> None:
    rows = sparse.csr_array(x)
    lines = []
    for row, target in enumerate(y.tolist()):
        part = slice(int(rows.indptr[row]), int(rows.indptr[row + 1]))
        pairs = zip(rows.indices[part].tolist(), rows.data[part].tolist(), strict=True)
        lines.append(" ".join([f"{target!r}", *(f"{i + first}:{v!r}" for i, v in pairs)]))
    Path(path).write_text("\n".join(lines) + "\n")


def test_a_text_of_svmlight_has_samples_and_targets() -> None:
    pytest.importorskip("sklearn")
    text("x.svm", X, Y)
    np.testing.assert_array_equal(read_targets("x.svm", ""), Y)
    np.testing.assert_allclose(solved("x.svm", "", n_features=40), PLAIN, atol=1e-6)
    inputs, target = jobs.samples("x.svm", n_features=45)[3]
    assert (inputs.numpy()[:40] == X.toarray()[3]).all()
    assert len(inputs) == 45
    assert target.item() == Y[3]


def test_a_text_that_counts_from_0_is_refused_and_not_shifted() -> None:
    pytest.importorskip("sklearn")
    text("x.svm", X, Y, first=0)
    with pytest.raises(JobError, match=r"x.svm cannot be read: Invalid index 0"):
        read_matrix("x.svm")


def test_a_table_has_targets_in_a_column() -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow, an extra, is missing")
    parquet = pytest.importorskip("pyarrow.parquet")
    named = {f"c{k}": column for k, column in enumerate(X.toarray().T)}
    parquet.write_table(pyarrow.table({"price": Y, **named}), "x.parquet")
    np.testing.assert_allclose(solved("x.parquet", "price"), PLAIN, atol=1e-4)
    assert (jobs.samples("x.parquet", "price")[3][0].numpy() == X.toarray()[3]).all()
    with pytest.raises(JobError, match=r"x.parquet has no column 'prise': it has price, c0"):
        read_targets("x.parquet", "prise")
    first, *others = named.items()
    parquet.write_table(pyarrow.table(dict([*others, first, ("price", Y)])), "turned.parquet")
    with pytest.raises(JobError, match=r"turned.parquet has the column 'c1' where x.parquet has"):
        jobs.lasso("x.parquet", "price", held_out_x="turned.parquet")
    parquet.write_table(pyarrow.table({"name": ["a", "b"]}), "words.parquet")
    with pytest.raises(JobError, match=r"column 'name' is of string: save numbers, or drop it"):
        read_matrix("words.parquet")


def test_a_table_of_ratings_has_rows_columns_and_values() -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow, an extra, is missing")
    parquet = pytest.importorskip("pyarrow.parquet")
    ratings = sparse.coo_array(X)
    rows, places = ratings.coords
    parquet.write_table(pyarrow.table({"u": rows, "i": places, "r": ratings.data}), "r.parquet")
    held = pyarrow.table({"u": [59], "i": [39], "r": [1.0]})
    parquet.write_table(held, "held.parquet")
    found, held_out = (sparse.csr_array(one) for one in read_entries("r.parquet", "held.parquet"))
    assert (found.toarray() == X.toarray()).all()
    assert held_out.shape == X.shape
    jobs.factors("r.parquet", held_out="held.parquet", n_components=2)
    for wrong in (0.5, 1e12):
        parquet.write_table(pyarrow.table({"u": [wrong], "i": [1], "r": [1.0]}), "r.parquet")
        with pytest.raises(JobError, match="'u' has numbers that are no index: save 0, 1, 2"):
            read_entries("r.parquet")
    parquet.write_table(pyarrow.table({"u": [0]}), "r.parquet")
    with pytest.raises(JobError, match="has 1 columns: save three"):
        read_entries("r.parquet")


@pytest.mark.parametrize(
    ("path", "module", "says"),
    [
        ("x.svm", "sklearn.datasets", "install distbelief.sklearn"),
        ("x.parquet", "pyarrow", "parquet"),
    ],
)
def test_a_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, path: str, module: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(JobError, match=f"{path} is read by .*{says}"):
        read_matrix(path)


# --- parts ---


def stored(path: str, x: Csc, change: Callable[[Csc], None]) -> None:
    x = x.copy()
    change(x)
    sparse.save_npz(path, x, compressed=False)


def spoil(x: Csc) -> None:
    x.data[-1] = np.nan  # in the last column


def test_a_block_reads_its_own_part_only_and_a_job_checks_all_before_it_begins(
    folder: Path,
) -> None:
    stored("columns.npz", X, spoil)
    program = jobs.lasso("columns.npz", "y.npy", n_blocks=4).program
    program.load(0)
    with pytest.raises(JobError, match="column 39 of X contains NaN or infinity"):
        program.load(3)
    job = LINEAR.replace("x.npy", "columns.npz")
    with pytest.raises(JobError, match=r"NaN or infini"):
        checked(folder, job)


def test_entries_that_a_file_has_twice_count_as_their_sum() -> None:
    twice = sparse.csc_array(
        (np.repeat(X.data / 2, 2), np.repeat(X.indices, 2), 2 * X.indptr), shape=X.shape
    )
    twice.has_canonical_format = True  # or it would be saved once
    sparse.save_npz("columns.npz", twice, compressed=False)
    assert isinstance(read_columns("columns.npz"), Mapped)
    np.testing.assert_allclose(solved("columns.npz"), PLAIN, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_dense_file_with_no_numbers_is_refused(folder: Path, value: float) -> None:
    x = X.toarray()
    x[:, 7] = value
    np.save("x.npy", x)
    with pytest.raises(JobError, match="NaN or infini"):
        checked(folder, LINEAR)
    program = jobs.lasso("x.npy", "y.npy").program
    with pytest.raises(JobError, match=r"^\[model\] column 7 of X contains NaN or infinity"):
        jobs.check_blocks(program)


def test_data_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "free_bytes", lambda: 4000)
    with pytest.raises(
        JobError, match=r"blocks of X, 60 x 40, take 0.0 GB here, .* use more hosts"
    ):
        jobs.lasso("x.npy", "y.npy", n_blocks=4)
    jobs.lasso("x.npy", "y.npy", n_blocks=40)  # a block of it fits
    with pytest.raises(JobError, match="Lasso: blocks of X"):
        Lasso().fit(X.toarray(order="C"), Y)
    monkeypatch.setattr(columns, "free_bytes", lambda: None)  # not known
    Lasso().fit(X.toarray(order="C"), Y)


# --- paths, and starts ---


def path_of(**arguments: Any) -> Descent:  # noqa: ANN401 -- of a job file
    np.save("train.npy", X.toarray()[:40])
    np.save("train_y.npy", Y[:40])
    np.save("held.npy", X.toarray()[HELD])
    np.save("held_y.npy", Y[HELD])
    held = {"held_out_x": "held.npy", "held_out_y": "held_y.npy"}
    model = jobs.lasso("train.npy", "train_y.npy", n_blocks=4, **held, **arguments)
    assert isinstance(model.program, Descent)
    return model.program


def test_a_path_in_a_job_ends_at_its_best_solution() -> None:
    program = path_of(n_alphas=30, patience=3)
    path, tables = run(program)
    expected = sparse_path(
        X.toarray()[:40], Y[:40], n_alphas=30, n_blocks=4, patience=3,
        held_out=(X.toarray()[HELD], Y[HELD]),
    )  # fmt: skip
    assert [one.alpha for one in path] == [one.alpha for one in expected]
    best = min(path, key=lambda one: one.held_out)
    assert best is path[-4]
    w = np.zeros(40)
    w[best.ids] = best.values
    np.testing.assert_allclose(tables[COEFFICIENTS], w, atol=1e-14)
    assert (tables[COEFFICIENTS] != 0.0).tolist() == (w != 0.0).tolist()
    assert tables[INTERCEPT][0] == pytest.approx(best.intercept)
    x = np.concatenate([X.toarray()[:40], X.toarray()[HELD]])
    np.testing.assert_allclose(tables[PREDICTOR], x @ w, atol=1e-12)
    rows = [(one.alpha, one.objective, one.gap, one.held_out) for one in path]
    np.testing.assert_array_equal(tables[PATH][: len(path)], rows)
    assert not tables[PATH][len(path) :].any()


def test_a_path_that_was_over_is_so_when_it_resumes() -> None:
    """Its end would have been added to the tables again."""
    program, states = path_of(n_alphas=5), list[object]()
    schedule = program.schedule

    def noted(state: object = None) -> Steps[Any, Any, Any]:
        steps, reports = schedule(state), None
        while True:
            try:
                step = steps.send(reports)  # type: ignore[arg-type] # None at first
            except StopIteration as end:
                return end.value
            if isinstance(step, Mark):
                states.append(step.state)
            reports = yield step

    program.schedule = noted  # type: ignore[method-assign] # to see its marks
    tables = dict(run(program)[1])
    program.tables = tables
    program.schedule = lambda _=None: schedule(states[-1])  # type: ignore[method-assign, assignment] # it resumes
    again = run(program)[1]
    assert {name: rows.tobytes() for name, rows in again.items()} == {
        name: rows.tobytes() for name, rows in tables.items()
    }


def test_a_job_of_a_path_predicts_by_its_best_solution() -> None:
    program = path_of(alphas=[0.5, 0.05])
    model = jobs.Linear(program)
    inputs, _ = jobs.samples("held.npy", "held_y.npy").__getitems__([0, 1])
    assert model(inputs).tolist() == [Y[:40].mean()] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"n_alphas": 5}, r"n_alphas is of a path, .*: give held_out_x and held_out_y"),
        ({"held_out_y": "y.npy"}, "held_out_y is of a path"),
        ({"held_out_x": "x.npy", "held_out_y": "y.npy", "alpha": 0.1}, "alpha is not of a path"),
        ({"held_out_x": "x.npy"}, "x.npy has no targets: give y, a .npy file"),
        ({"n_blocks": 0}, "n_blocks is 0; use a whole number, 1 or more"),
        ({"n_features": 40}, "n_features is 40, but the file says it: leave it out"),
        ({"start": "none.safetensors"}, "start: none.safetensors cannot be read"),
        ({"start": "other.safetensors"}, "start has 3 coefficients, and X 40 columns"),
        ({"start": "nan.safetensors"}, "start has no intercept, or numbers that are not finite"),
    ],
)
def test_what_a_job_has_no_use_for_is_refused(arguments: dict[str, Any], says: str) -> None:
    save_file({"coefficients": np.ones(3)}, "other.safetensors")
    save_file({"coefficients": np.ones(40), "intercept": np.full(1, np.nan)}, "nan.safetensors")
    with pytest.raises(JobError, match=says):
        jobs.lasso("x.npy", "y.npy", **arguments)


def test_data_with_other_targets_than_the_program_are_refused(folder: Path) -> None:
    """They were evaluated with the targets of the text."""
    pytest.importorskip("sklearn")
    text("x.svm", X, Y)
    job = LINEAR.replace("x.npy", "x.svm")
    own = 'arguments = { x = "x.svm", y = "y.npy" }'
    checked(folder, job)
    with pytest.raises(JobError, match=r"y is '', but the program computes from 'y.npy'"):
        checked(folder, job.replace(own, 'arguments = { x = "x.svm" }'))


def test_a_job_that_starts_at_the_solution_of_another_one_has_nothing_to_update() -> None:
    tables = run(jobs.lasso("x.npz", "y.npy", alpha=0.05, tol=1e-8).program)[1]
    save_file({name: rows.copy() for name, rows in tables.items()}, "model.safetensors")
    start: dict[str, Any] = {"start": "model.safetensors", "alpha": 0.05, "tol": 1e-7}
    for x in ("x.npz", "columns.npz"):
        again = run(jobs.lasso(x, "y.npy", **start).program)[1]
        assert again[COEFFICIENTS].tobytes() == tables[COEFFICIENTS].tobytes()
    y = (Y > 0).astype(float)
    np.save("labels.npy", y)
    run(jobs.sparse_logistic("x.npz", "labels.npy", **start).program)


def test_factors_start_at_those_of_another_run() -> None:
    options: dict[str, Any] = {"n_components": 2, "max_iter": 4, "tol": -1.0, "biases": True}
    whole = MatrixFactorization(2, max_iter=8, tol=-1.0, biases=True).fit(X)
    half = MatrixFactorization(2, max_iter=4, tol=-1.0, biases=True, warm_start=True).fit(X)
    tables = run(jobs.factors("x.npz", **options).program)[1]
    save_file({name: rows.copy() for name, rows in tables.items()}, "model.safetensors")
    program = cast("Factors", jobs.factors("x.npz", start="model.safetensors", **options).program)
    history, _ = run(program)
    half.fit(X)
    # Every fourth pass begins anew anyway: the same bits.
    assert half.objectives_ == whole.objectives_[4:] == [objective for objective, _ in history]
    with pytest.raises(JobError, match=r"to start at are not of 4 ranks, .* of \(50, 40\) rows"):
        half.fit(X[:50])
    with pytest.raises(JobError, match="to start at are not of 3 ranks"):
        jobs.factors("x.npz", start="model.safetensors", n_components=3)


def test_factors_without_biases_are_no_start_for_some_with_biases() -> None:
    """As many ranks, and what stands for 1 was some other number, to the end."""
    tables = run(jobs.factors("x.npz", n_components=4, max_iter=2).program)[1]
    save_file({name: rows.copy() for name, rows in tables.items()}, "model.safetensors")
    with pytest.raises(JobError, match="to start at are not of 4 ranks, biases among them"):
        jobs.factors("x.npz", start="model.safetensors", n_components=2, biases=True)


def test_a_host_with_other_held_out_data_is_refused() -> None:
    here, there = path_of(), path_of()
    np.save("held_y.npy", Y[HELD] + 1.0)
    held = {"held_out_x": "held.npy", "held_out_y": "held_y.npy"}
    other = jobs.lasso("train.npy", "train_y.npy", n_blocks=4, **held).program
    here.push = other.push  # type: ignore[method-assign] # of a worker elsewhere
    with pytest.raises(
        JobError, match="held-out data are others here: give all hosts the same files"
    ):
        run(here)
    run(there)


def test_held_out_ratings_end_a_job_of_factors() -> None:
    rng = np.random.default_rng(0)
    places = rng.permutation(60 * 40)[:50]
    held = sparse.coo_array((rng.normal(size=50), (places // 40, places % 40)), shape=(60, 40))
    sparse.save_npz("held.npz", held)
    model = jobs.factors("x.npz", held_out="held.npz", n_components=5, patience=2, tol=-1.0)
    assert len(run(cast("Factors", model.program))[0]) < 50


@pytest.mark.parametrize("kind", [Lasso, MatrixFactorization, LatentDirichletAllocation])
def test_workers_without_a_block_are_refused(kind: Any) -> None:  # noqa: ANN401 -- an estimator
    """Those of topics were threads that did nothing."""
    with pytest.raises(JobError, match="workers is 3, and there are 2 blocks: use no more workers"):
        kind(n_blocks=2, workers=3).fit(abs(X).rint(), Y)


def test_other_sparse_files_are_read_and_broken_ones_refused(tmp_path: Path) -> None:
    """A matrix of triples, saved without compression, was refused: it has no 'indices'."""
    dense = np.arange(6.0).reshape(3, 2)
    file = str(tmp_path / "x.npz")
    sparse.save_npz(file, sparse.coo_array(dense), compressed=False)
    found = read_columns(file)
    assert not isinstance(found, np.ndarray | Mapped)
    np.testing.assert_array_equal(found.toarray(), dense)
    broken = sparse.csc_array(dense)
    broken.indices[0] = 7
    sparse.save_npz(file, broken, compressed=False)
    with pytest.raises(SettingError, match="entries outside its 3 rows"):
        columns_of(read_columns(file), range(2))
    sparse.save_npz(file, broken)
    with pytest.raises(JobError, match=r"x\.npz cannot be read"):
        read_columns(file)
    text = tmp_path / "x.svm"
    text.write_text("1 1:0.5 99999999999:1\n")
    with pytest.raises(JobError, match=r"x\.svm cannot be read"):
        read_columns(str(text))


@pytest.mark.parametrize("scale", [1e-200, 1e160])
def test_targets_whose_squares_are_lost_are_refused(scale: float) -> None:
    """Those that vanish were solved with all coefficients 0, and a gap of 0."""
    with pytest.raises(SettingError, match=r"the squares of y are too (small|large)"):
        Lasso(alpha=0.01 * scale).fit(X, Y * scale)
    assert not Lasso(alpha=0.01).fit(X, np.zeros(X.shape[0])).coef_.any()


@pytest.mark.parametrize("file", ["x.npy", "fortran.npy", "columns.npz", "x.npz"])
def test_one_other_number_of_a_file_has_another_checksum(file: str) -> None:
    """A job resumed with it, and its predictor was that of the old numbers."""

    def found() -> int:
        return checksum(*jobs.lasso(file, "y.npy").program.data)

    before, changed = found(), X.copy()
    assert before == found()
    changed.data[17] += 1
    np.save("x.npy", changed.toarray())
    np.save("fortran.npy", np.asfortranarray(changed.toarray()))
    sparse.save_npz("columns.npz", changed, compressed=False)
    sparse.save_npz("x.npz", changed)
    assert found() != before
