"""Programs as models of a job: [model] factory and [data.train] factory of a job file.

    [model]                                             [data.train]
    factory = "sandblaster.strads.jobs:lasso"           factory = "sandblaster.strads.jobs:samples"
    arguments = { x = "x.npz", y = "y.npy", ... }       arguments = { x = "x.npz", y = "y.npy" }

    [algorithm]
    name = "sandblaster"
    method = "strads"
    loss = "mse"

Parameters of such a module are the tables of its program, on the shards row by row. As a module
it predicts: what evaluates, loads and saves models needs nothing else. Your own is a module with
an attribute `program` whose tables have the names and shapes of its parameters, in float64.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar, cast, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from scipy import sparse
from torch import nn
from typing_extensions import override

from distbelief.config.algorithms import has_program
from distbelief.core.errors import JobError, SettingError
from distbelief.task.task import ModelSpec, TaskSpec, build_model
from sandblaster.strads.columns import check_memory
from sandblaster.strads.documents import Matrix as TopicCounts, fold_in, given_half
from sandblaster.strads.estimator import Estimator
from sandblaster.strads.factorization import MatrixFactorization
from sandblaster.strads.files import (
    check_columns,
    is_text,
    read_columns,
    read_entries,
    read_matrix,
    read_targets,
)
from sandblaster.strads.kernels import Floats
from sandblaster.strads.linear import Lasso, SparseLogisticRegression, sparse_path
from sandblaster.strads.method import AnyProgram
from sandblaster.strads.topics import LatentDirichletAllocation, checked_counts


Kind = TypeVar("Kind", bound=Estimator)
Factory = TypeVar("Factory", bound=Callable[..., nn.Module])  # type: ignore[explicit-any] # of a job file

_PATH: Final = ("alphas", "n_alphas", "smallest", "patience")
_NOT_OF_FIT: Final = {*_PATH, "start", "n_features", "held_out_x", "held_out_y"}
_FACTORIES: Final = tuple(f"{__name__}:{name}" for name in ("samples", "entries", "documents"))
_OF_FIT: Final = {
    "workers": "use [cluster] replicas",
    "warm_start": "give start, the model.safetensors of another run",
}


def program_of(spec: ModelSpec) -> AnyProgram:
    """Return the program of a model, or raise JobError."""
    return program_in(build_model(spec), spec)


def program_in(module: nn.Module, spec: ModelSpec) -> AnyProgram:
    """Return the program of the module that was built by this, or raise JobError."""
    if spec.initial != "module":
        raise JobError(
            f"[model] initial is {spec.initial!r}: a program begins at its own values; remove it"
        )
    if not has_program(module):
        raise JobError(
            f'[model] {spec.factory} is no program: with method = "strads" use '
            '"sandblaster.strads.jobs:lasso", or a module with an attribute program'
        )
    program = cast("AnyProgram", module.program)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    if shapes != {name: values.shape for name, values in program.tables.items()}:
        raise JobError(f"[model] {spec.factory}: parameters {shapes} are not its program's tables")
    return program


def check_data(task: TaskSpec) -> None:
    """Raise JobError if [data.train] names other data than the program computes from."""
    given, data = task.model.arguments, task.train
    if data.limit is not None:
        raise JobError(
            f"[data.train] limit is {data.limit}, but a program computes from the files of "
            "[model.arguments], all of them: remove it"
        )
    if data.factory not in _FACTORIES:
        return
    if task.test is not None and {"x"} <= given.keys() & task.test.arguments.keys():
        names = (str(one.get(name, "")) for one in (given, task.test.arguments) for name in "xy")
        check_columns(*names)
    for name in sorted({*data.arguments} | {"y", "n_features"} & {*given}):
        value, own = data.arguments.get(name, ""), str(given.get(name, ""))
        if Path(str(value)).resolve() != Path(own).resolve():
            raise JobError(
                f"[data.train] {name} is {value!r}, but the program computes from {own!r}: give "
                f"[model.arguments] {name} the same file"
            )


def check_blocks(program: AnyProgram) -> None:
    """Load each block once; raise JobError for what cannot be computed with."""
    for block in range(program.n_blocks):
        try:
            program.load(block)
        except SettingError as error:
            raise JobError(f"[model] {error}") from None


class _Tables(nn.Module):
    """A module whose parameters are the tables of a program, at its start."""

    def __init__(self, program: AnyProgram) -> None:
        super().__init__()
        self.program = program
        for name, values in program.tables.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(values.copy())))

    def _sum_of(self, name: str) -> torch.Tensor:
        """Return 0, by a parameter that predictions do not need."""
        return 0.0 * self.get_parameter(name).sum()


def _forwards(*callees: Callable[..., object]) -> Callable[[Factory], Factory]:  # type: ignore[explicit-any] # of any types
    """Give a function the signature with what its `arguments` are of: so defaults are known."""

    def named(factory: Factory) -> Factory:  # type: ignore[explicit-any] # as above
        own = inspect.signature(factory).parameters
        theirs = [one for each in callees for one in inspect.signature(each).parameters.values()]
        more = {
            one.name: one.replace(kind=one.KEYWORD_ONLY)
            for one in theirs
            if one.default is not one.empty and one.name not in own
        }
        parts = list(own.values())  # the last is `arguments`
        vars(factory)["__signature__"] = inspect.Signature([*parts[:-1], *more.values(), parts[-1]])
        return factory

    return named


# --- linear models ---


_USED: Final = {"coefficients", "intercept"}


@final
class Linear(_Tables):
    """X w + b; of other tables only the program has need."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n_samples,) of (n_samples, n_features)."""
        found = x @ self.get_parameter("coefficients") + self.get_parameter("intercept")
        return found + sum(self._sum_of(name) for name in self.program.tables if name not in _USED)


@_forwards(sparse_path, Lasso)
def lasso(x: str, y: str = "", *, n_blocks: int = 8, **arguments: object) -> Linear:
    """Return the linear model that `sandblaster.Lasso` fits to X and y, of these files.

    Args:
        x: X, (n_samples, n_features): a file (`files`); of text it has y, too.
        y: (n_samples,), .npy; or the column of a table x that has it.
        n_blocks: As of `Lasso`; no more replicas can take part.
        arguments: Other arguments of `Lasso`. `start`: the model.safetensors of another run, whose
            coefficients are the first ones. `n_features`, of text. With `held_out_x` and
            `held_out_y`, files as x and y: a path, of arguments as of `sparse_path`; the model is
            its best one, and "path" has alpha, objective, gap and held-out loss of each.
    """
    return _linear(Lasso, n_blocks, x, y, read_targets(x, y), arguments)


@_forwards(sparse_path, SparseLogisticRegression)
def sparse_logistic(x: str, y: str = "", *, n_blocks: int = 8, **arguments: object) -> Linear:
    """Return the same for `sandblaster.SparseLogisticRegression`; y is of two classes."""
    labels = read_targets(x, y)
    # Whatever evaluates takes them as they are.
    if not np.isin(labels, (0, 1)).all():
        raise JobError(f"[model] {y or x} has other labels than 0 and 1: save y == class as .npy")
    return _linear(SparseLogisticRegression, n_blocks, x, y, labels, arguments)


def _linear(  # type: ignore[explicit-any] # of a job file
    kind: type[Lasso] | type[SparseLogisticRegression],
    n_blocks: int,
    x: str,
    y: str,
    targets: Floats,
    given: Mapping[str, Any],
) -> Linear:
    own = {name: value for name, value in given.items() if name not in _NOT_OF_FIT}
    estimator = _made(kind, n_blocks, own)
    path = {name: given[name] for name in _PATH if name in given}
    held_x, held_y = (str(given.get(f"held_out_{name}", "")) for name in ("x", "y"))
    matrix = read_columns(x, y, n_features=given.get("n_features"))
    try:
        if held_x:
            for name in {"alpha", "start"} & given.keys():
                raise JobError(
                    f"[model.arguments] {name} is not of a path: remove held_out_x or it"
                )
            # A column has the same name in another table; a file of targets is of one x.
            held_y = held_y or ("" if y.endswith(".npy") else y)
            check_columns(x, y, held_x, held_y)
            width = matrix.shape[1] if is_text(held_x) else None
            pair = read_matrix(held_x, held_y, n_features=width), read_targets(held_x, held_y)
            program = estimator.path_program(matrix, targets, held_out=pair, **path)
            check_memory(matrix, 1.0 / program.n_blocks, user=kind.__name__)
            return Linear(program)
        for name in [*path, *(["held_out_y"] if held_y else [])]:
            raise JobError(
                f"[model.arguments] {name} is of a path, whose best model held-out data decide: "
                "give held_out_x and held_out_y"
            )
        if "start" in given:
            n = matrix.shape[1]
            tables = _start(str(given["start"]))
            found, level = (tables.get(one, np.zeros(0)) for one in ("coefficients", "intercept"))
            if found.shape != (n,):
                raise JobError(
                    f"[model.arguments] start has {found.size} coefficients, and X {n} columns: "
                    "give the model of a run on such data"
                )
            if level.shape != (1,) or not np.isfinite([*found, *level]).all():
                raise JobError(
                    "[model.arguments] start has no intercept, or numbers that are not finite: "
                    "give the model of a run that has ended well"
                )
            fitted = {"coef_": found, "intercept_": level}
            vars(estimator).update(fitted, n_features_in_=n, warm_start=True)
        program = estimator.program(matrix, targets)
        check_memory(matrix, 1.0 / program.n_blocks, user=kind.__name__)
        return Linear(program)
    except SettingError as error:
        raise JobError(f"[model] {error}") from None


def _start(path: str) -> Mapping[str, Floats]:
    """Return the tables of another run."""
    try:
        return cast("Mapping[str, Floats]", load_file(path))
    except (OSError, SafetensorError) as error:
        raise JobError(f"[model.arguments] start: {path} cannot be read: {error}") from None


@final
class Samples:
    """Rows of X, dense, and targets, for [data.train] and [data.test]."""

    def __init__(self, x: str, y: str, n_features: int | None) -> None:
        self._files = x, y, n_features
        self._y = read_targets(x, y).astype(np.float64)

    @cached_property
    def _x(self) -> "Floats | sparse.csr_array[np.float64]":
        # A worker asks for no sample.
        path, y, n_features = self._files
        x = read_matrix(path, y, n_features=n_features)
        if x.shape[0] != len(self._y):
            raise JobError(f"[data] x has {x.shape[0]} samples and y {len(self._y)}: give as many")
        return x if isinstance(x, np.ndarray) else sparse.csr_array(x)

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        some = self._x[list(indices)]
        dense = some if isinstance(some, np.ndarray) else some.toarray()
        return torch.from_numpy(dense.astype(np.float64)), torch.from_numpy(self._y[list(indices)])


def samples(x: str, y: str = "", *, n_features: int | None = None) -> Samples:
    """Return the rows of X with their targets; the files are as of `lasso`."""
    return Samples(x, y, n_features)


# --- factors ---


@final
class FactorModel(_Tables):
    """The rating of pairs of row and column."""

    def __init__(self, program: AnyProgram, *, shape: tuple[int, int], mean: float) -> None:
        super().__init__(program)
        self._shape, self._mean = shape, mean

    @override
    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return (n_pairs,) of (n_pairs, 2)."""
        u = self.get_parameter("rows").view(-1, self._shape[0])
        v = self.get_parameter("columns").view(-1, self._shape[1], 2)[..., 0]
        return (u[:, pairs[:, 0]] * v[:, pairs[:, 1]]).sum(dim=0) + self._mean


@_forwards(MatrixFactorization)
def factors(
    ratings: str, *, held_out: str = "", start: str = "", n_blocks: int = 8, **arguments: object
) -> FactorModel:
    """Return the factors that `sandblaster.MatrixFactorization` finds.

    Args:
        ratings: Matrix of (n_rows, n_columns): a file (`files`); a table has columns of row, column
            and rating.
        held_out: The same of entries that are only evaluated, for `patience`.
        start: The model.safetensors of another run, whose factors are the first ones.
        n_blocks: As of the estimator; no more replicas can take part.
        arguments: Its other arguments.
    """
    estimator = _made(MatrixFactorization, n_blocks, arguments)
    matrix, *others = read_entries(ratings, *([held_out] if held_out else []))
    try:
        program = estimator.program(matrix, held_out=others[0] if others else None)
        if start:
            program.start_at(_start(start))
    except SettingError as error:
        raise JobError(f"[model] {error}") from None
    return FactorModel(program, shape=program.targets.shape, mean=program.mean)


@final
class Entries:
    """Stored entries of a matrix: pairs of row and column, and their values."""

    def __init__(self, matrix: "sparse.coo_array[np.float64, tuple[int, int]]") -> None:
        self._pairs = torch.from_numpy(np.stack(matrix.coords, axis=1).astype(np.int64))
        self._values = torch.from_numpy(matrix.data.astype(np.float64))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pairs[index], self._values[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pairs[list(indices)], self._values[list(indices)]


def entries(ratings: str) -> Entries:
    """Return the stored entries of a matrix; the file is as of `factors`."""
    return Entries(sparse.coo_array(read_entries(ratings)[0]))


# --- topics ---


@final
class TopicModel(_Tables):
    """The words of documents, given some of them."""

    @override
    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the probability of each word, of (n_documents, n_words)."""
        sums, row_of = self.get_parameter("sums"), self.get_parameter("row_of")
        if counts.shape[1] != len(row_of):
            raise JobError(
                f"documents have {counts.shape[1]} columns, not {len(row_of)}: use the same "
                "vocabulary"
            )
        priors = self.get_parameter("priors")[:, 0]
        words = self.get_parameter("words").view(len(row_of), -1) + priors[-1]
        weights = (words / (sums + priors[-1] * len(row_of)))[row_of.long()]
        given = checked_counts(counts.detach().cpu().numpy(), user="documents")
        arrays = (values.detach().cpu().numpy() for values in (weights, priors[:-1]))
        shares = torch.from_numpy(fold_in(given, *arrays)).to(weights)
        return torch.log(shares @ weights.T) + self._sum_of("topics") + self._sum_of("row_of")


@_forwards(LatentDirichletAllocation)
def topics(
    counts: str, *, held_out: str | None = None, n_blocks: int = 8, **arguments: object
) -> TopicModel:
    """Return the topics that `sandblaster.LatentDirichletAllocation` finds.

    Args:
        counts: Of words in documents, (n_documents, n_words): scipy.sparse's .npz, or .npy.
        held_out: Of documents that are only scored, for the rule of `patience`; a file as `counts`.
        n_blocks: As of the estimator; no more replicas can take part.
        arguments: Its other arguments.
    """
    estimator = _made(LatentDirichletAllocation, n_blocks, arguments)
    others = None if held_out is None else read_matrix(held_out)
    try:
        return TopicModel(estimator.program(read_matrix(counts), held_out=others))
    except SettingError as error:
        raise JobError(f"[model] {error}") from None


@final
class Documents:
    """Of each document the counts that are given, and the others, for `cross_entropy`.

    The others are scaled so that the mean over all documents is that over their words.
    """

    def __init__(self, counts: TopicCounts) -> None:
        n_given = given_half(counts)
        parts = counts.indices, counts.indptr
        self._given: TopicCounts = sparse.csr_array((n_given, *parts), shape=counts.shape)
        rest = counts.data - n_given
        if not rest.any():
            raise SettingError("the documents have too few words to score; give more")
        scale = counts.shape[0] / int(rest.sum())
        self._rest = sparse.csr_array((rest * scale, *parts), shape=counts.shape)

    def __len__(self) -> int:
        return int(self._given.shape[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        given, rest = self.__getitems__([index])
        return given[0], rest[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        given, rest = (some[list(indices)].toarray() for some in (self._given, self._rest))
        return torch.from_numpy(given.astype(np.float64)), torch.from_numpy(rest)


def documents(counts: str) -> Documents:
    """Return documents, dense, for `loss = "cross_entropy"`: minus `score` of the estimator.

    The file is as of `topics`.
    """
    try:
        return Documents(checked_counts(read_matrix(counts), user=counts))
    except SettingError as error:
        raise JobError(f"[data] {error}") from None


# --- arguments ---


def _made(kind: type[Kind], n_blocks: int, arguments: dict[str, object]) -> Kind:
    """Return an estimator; JobError if it has no such argument, or a job no use for it."""
    for name, use in _OF_FIT.items():
        if name in arguments:
            raise JobError(f"[model.arguments] {name} is of fit, not of a job: {use}")
    estimator = kind()
    if "staleness" in arguments and "staleness" not in estimator.get_params():
        raise JobError(
            "[model.arguments] staleness is of topics: rounds of other programs see all earlier "
            "ones, or their objective could rise; remove it"
        )
    try:
        estimator.set_params(n_blocks=n_blocks, **arguments)
    except SettingError as error:
        raise JobError(f"[model.arguments] {error}") from None
    return estimator
