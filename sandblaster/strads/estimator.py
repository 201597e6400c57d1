"""What estimators share: parameters by scikit-learn's conventions, sparse input checked."""

import inspect
from collections.abc import Mapping
from typing import ClassVar, TypeVar, cast

import numpy as np
from scipy import sparse
from typing_extensions import override

from distbelief.core.errors import SettingError
from distbelief.core.formatting import nearest
from sandblaster.strads.columns import check_copy, checked_table


Self = TypeVar("Self", bound="Estimator")


class Estimator:
    """The parameters of `__init__`, which stores each under its own name."""

    _takes: ClassVar[Mapping[str, bool]] = {}  # of scikit-learn's input tags

    def get_params(self, deep: bool = True) -> dict[str, object]:  # noqa: FBT001, FBT002, ARG002 -- scikit-learn's signature
        """Return the parameters of `__init__`, by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self: Self, **values: object) -> Self:
        """Set parameters of `__init__`.

        Raises:
            SettingError: there is no such parameter.
        """
        names = list(inspect.signature(type(self)).parameters)
        for name, value in values.items():
            if name not in names:
                hint = nearest(name, names)
                raise SettingError(f"{type(self).__name__} has no parameter {name!r}: {hint}")
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> object:
        """Return what scikit-learn asks estimators for; only it does, so it is installed."""
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags  # noqa: PLC0415 -- it is loaded

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            input_tags=InputTags(sparse=True, **self._takes),
        )

    @override
    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        changed = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if value is not defaults[name].default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


_WHOLE = ("n_", "max_iter", "evaluate_every", "patience", "random_state", "staleness", "workers")


def check_numbers(user: str, **values: object) -> None:
    """Refuse parameters that are no positive, finite numbers, or whole ones; a seed may be 0."""
    for name, value in values.items():
        is_whole = name.startswith(_WHOLE)
        kinds = (int, np.integer) if is_whole else (int, float, np.integer, np.floating)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        least = 0 if name in {"random_state", "staleness"} else 1
        use = f"a whole number, {least} or more" if is_whole else "a number above 0"
        number = cast("float", value) if is_number else float("nan")
        is_legal = number >= least if is_whole else 0 < number < float("inf")
        if name == "tol":
            use, is_legal = "a number; below 0 nothing ends early", not np.isnan(number)
        if not is_legal:
            raise SettingError(f"{user}: {name} is {value!r}; use {use}")


def blocks_of(user: str, given: int | None, **sizes: int) -> int:
    """Return the number of blocks for data of these sizes, by name; None: 8, or all there are."""
    if given is None:
        return min(8, *sizes.values())
    check_numbers(user, n_blocks=given)
    for name, n in sizes.items():
        if n < given:
            raise SettingError(f"{user}: n_blocks is {given}, X has {n} {name}; use n_blocks={n}")
    return given


def check_workers(user: str, workers: int, n_blocks: int) -> None:
    """Refuse workers that would have nothing to do."""
    if workers > n_blocks:
        raise SettingError(
            f"{user}: workers is {workers}, and there are {n_blocks} blocks: use no more workers, "
            "or more n_blocks"
        )


def checked_entries(x: object, *, user: str) -> "sparse.csr_array[np.float64]":
    """Return a matrix by rows, its columns sorted, each entry once; zeros that are stored stay.

    Raises:
        SettingError: not two-dimensional, no rows or columns, not of numbers, NaN or infinite.
    """
    given = checked_table(x, user=user)
    if isinstance(given, np.ndarray) and given.dtype != np.float64:
        check_copy(given, user=user)
    # First of all float64: sums of entries that are small integers would overflow.
    matrix = sparse.csr_array(given.astype(np.float64, copy=False))
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    if not matrix.data.flags.c_contiguous:
        parts = np.ascontiguousarray(matrix.data), matrix.indices, matrix.indptr
        matrix = sparse.csr_array(parts, shape=matrix.shape)
    if not np.isfinite(matrix.data).all():
        raise SettingError(f"{user}: X contains NaN or infinity; leave these entries out")
    return matrix
