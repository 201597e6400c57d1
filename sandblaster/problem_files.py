"""Files through which other processes get model and data, beside a run directory.

    runs/digits              the run
    runs/digits.problem      initial.safetensors, train.safetensors

Nothing is pickled. A restarted replica reads the files again, so a run locks them; a new
run takes the next free name (runs/digits.2, runs/digits.2.problem). A resumed run keeps the
files it has, and a refused job leaves none behind.
"""

import inspect
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Final, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.optimize import Bounds
from torch import Tensor, nn

from distbelief.core import files
from distbelief.core.errors import JobError, StorageError
from distbelief.job.run.directory import RunDirectory
from distbelief.task.imports import call_factory
from distbelief.task.initializers import lost
from distbelief.task.tensor_pairs import Pair, TensorPairs, as_pair
from distbelief.worker.local_executor import FlatModel


# --- functions and classes ---

Factory = object
"""Makes a module or a data set, or is a loss: an import path, or the function itself."""


def factory_table(factory: object, *, what: str) -> dict[str, object]:
    """Return `factory` and `arguments` of an import path, callable or partial called `what`."""
    if isinstance(factory, str):
        return {"factory": factory}
    if not isinstance(factory, partial):
        return {"factory": import_path(factory, what=what)}
    wrapped = cast("partial[object]", factory)
    if wrapped.args:
        raise JobError(
            f"minimize: {what} is a partial with positional arguments "
            f"{wrapped.args!r}: give them by keyword"
        )
    path = import_path(wrapped.func, what=what)
    return {"factory": path, "arguments": dict(wrapped.keywords)}


def import_path(thing: object, *, what: str) -> str:
    """Return "package.module:name" of a function or class."""
    module, name = None, ""
    if inspect.isroutine(thing) or inspect.isclass(thing):
        module, name = thing.__module__, thing.__qualname__
    if module == "__main__":
        raise JobError(
            f"minimize: {what} {name} is defined in the main program, which other "
            "processes cannot import: move it to a module"
        )
    found: object = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if module is None or found is not thing:
        shown = " ".join(repr(thing).split())[:80]
        raise JobError(
            f"minimize: {what} is {shown}, which other processes cannot import: give a function "
            "of a module, functools.partial of one, or 'package.module:function'"
        )
    return f"{module}:{name}"


# --- modules ---

Recipe = dict[str, object]
_NOT_ASKED_FOR = {"device", "dtype"}
_VARIABLE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_PLAIN = (bool, int, float, str)


def build(recipe: Recipe, dtype: str) -> nn.Module:
    """Return the module of a recipe: the factory that job files name."""
    return _build(recipe).to(getattr(torch, dtype))


def recipe_of(module: nn.Module) -> dict[str, object]:
    """Return the arguments of `build` that make a module like this one.

    Most modules keep each argument under its own name, as all of torch's layers do. They are
    collected, the module is built again, and both are compared: tensors, text, and whatever else
    a forward may use (attributes, hooks).
    """
    fixed = next((name for name, one in module.named_modules() if not one.training), None)
    if fixed is not None:
        raise JobError(
            f"minimize: {fixed or 'the model'} is in evaluation mode, and minimize computes in "
            "training mode (dropout, BatchNorm): call train() on the model, and leave out layers "
            "that are not meant to train"
        )
    if any(tensor.is_meta for tensor in module.state_dict().values()):
        raise _refusal(module, "it is on the meta device, without values")
    floats = {t.dtype for t in module.state_dict().values() if t.is_floating_point()}
    if len(floats) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in floats))
        raise _refusal(module, f"it has tensors of several types ({names})")
    dtype = str(next(iter(floats), torch.get_default_dtype())).removeprefix("torch.")
    recipe = _recipe(module)
    try:
        with torch.random.fork_rng(devices=[]):
            again = build(recipe, dtype)
    except JobError as error:
        raise _refusal(module, str(error)) from None
    difference = _difference(module, again)
    if difference is not None:
        raise _refusal(module, f"built again it differs: {difference}")
    return {"recipe": recipe, "dtype": dtype}


def _recipe(module: nn.Module) -> Recipe:
    kind = type(module)
    if kind is nn.Sequential:
        return {"layers": [[name, _recipe(layer)] for name, layer in module.named_children()]}
    path = import_path(kind, what="a layer of the model:")
    arguments: dict[str, object] = {}
    _, *parameters = inspect.signature(kind.__init__).parameters.items()  # without self
    for name, parameter in parameters:
        if name in _NOT_ASKED_FOR or parameter.kind in _VARIABLE:
            continue
        default: object = parameter.default
        if hasattr(module, name):
            value = _value(getattr(module, name), default, of=module, name=name)
            if value is not None:
                arguments[name] = value
        elif default is inspect.Parameter.empty:
            raise _refusal(module, f"{kind.__name__} does not keep its {name!r}")
    return {"class": path, "arguments": arguments}


def _value(value: object, default: object, *, of: nn.Module, name: str) -> object | None:
    """Return an argument as plain data; None: leave it out, its default is meant."""
    if isinstance(default, bool) and not isinstance(value, bool):
        value = value is not None  # "bias" is given as a bool, kept as a tensor
    if value is None and default is None:
        return None
    plain = list(value) if isinstance(value, tuple) else value
    if not all(
        isinstance(item, _PLAIN) for item in (plain if isinstance(plain, list) else [plain])
    ):
        raise _refusal(of, f"argument {name!r} of {type(of).__name__} is {value!r}")
    return None if value == default else plain


def _build(recipe: Mapping[str, object]) -> nn.Module:
    if "layers" in recipe:
        layers = cast("list[tuple[str, Recipe]]", recipe["layers"])
        return nn.Sequential(OrderedDict((name, _build(one)) for name, one in layers))
    path, arguments = cast("str", recipe["class"]), recipe["arguments"]
    made = call_factory(path, cast("Recipe", arguments), table="model")
    if not isinstance(made, nn.Module):
        raise JobError(f"{path} made {made!r}, not an nn.Module")
    return made


# Kept and compared elsewhere: parameters, and what a module is made of.
_COMPARED: Final = {"training", "_parameters", "_modules", "_buffers"}
_NOTHING: Final = object()
_Seen = set[tuple[int, int]]  # pairs that are compared already, for what refers to itself


def _difference(module: nn.Module, again: nn.Module, seen: _Seen | None = None) -> str | None:
    seen = set() if seen is None else seen
    if repr(module) != repr(again):
        return f"{again!r}"

    def tensors(one: nn.Module) -> object:
        named = one.state_dict(keep_vars=True)
        first = {id(t): name for name, t in reversed(named.items())}  # of those that share a tensor
        return {n: (t.shape, t.dtype, t.requires_grad, first[id(t)]) for n, t in named.items()}

    if tensors(module) != tensors(again):
        return (
            "its tensors have other names, shapes or types, other ones are shared, or other "
            "parameters are trained"
        )
    seen |= {(id(a), id(b)) for a, b in zip(module.modules(), again.modules(), strict=True)}
    for (name, one), other in zip(module.named_modules(), again.modules(), strict=True):
        where = name or "the module itself"
        found = _attributes(one), _attributes(other)
        for key in sorted(found[0].keys() | found[1].keys()):
            if not _is_same(found[0].get(key, _NOTHING), found[1].get(key, _NOTHING), seen):
                return f"attribute {key!r} of {where}"
    return None


def _attributes(module: nn.Module) -> dict[str, object]:
    """Return all that a module keeps: a forward may use any of it."""
    kept = {name: value for name, value in vars(module).items() if name not in _COMPARED}
    # Hooks are kept by numbers that rise for the whole process.
    hooks = {name: list(kept[name].values()) for name in kept if name.endswith("hooks")}
    fixed = {name: module.get_buffer(name) for name in module._non_persistent_buffers_set}  # noqa: SLF001 -- no other way
    return kept | hooks | fixed


def _is_same(one: object, other: object, seen: _Seen) -> bool:
    """Return whether two things are known to be equal; what cannot be looked into is not."""
    if one is other or (id(one), id(other)) in seen:
        return True
    if type(one) is not type(other):
        return False
    seen.add((id(one), id(other)))
    parts, others = _inside(one), _inside(other)
    if parts is None or others is None:
        return _is_equal(one, other, seen)
    pairs = zip(parts, others, strict=False)
    return len(parts) == len(others) and all(_is_same(*pair, seen) for pair in pairs)


def _inside(thing: object) -> list[object] | None:
    """Return what makes a thing equal to another one; None: that says its `==`."""
    match thing:
        case list() | tuple():
            return [*thing]
        case dict():
            return [*thing.keys(), *thing.values()]
        case FunctionType():
            cells = [cell.cell_contents for cell in thing.__closure__ or ()]
            return [thing.__code__, thing.__defaults__, thing.__kwdefaults__, *cells]
        case MethodType():
            return [thing.__func__, thing.__self__]
        case partial():
            return [thing.func, thing.args, thing.keywords]
        case _:
            is_bare = type(thing).__eq__ is object.__eq__ and hasattr(thing, "__dict__")
            return [vars(thing)] if is_bare and not isinstance(thing, nn.Module) else None


def _is_equal(one: object, other: object, seen: _Seen) -> bool:
    match one, other:
        case Tensor(), Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case np.ndarray(), np.ndarray():
            return one.dtype == other.dtype and np.array_equal(one, other)
        case nn.Module(), nn.Module():
            return _difference(one, other, seen) is None
        case _:
            return bool(one == other)


def _refusal(module: nn.Module, why: str) -> JobError:
    return JobError(
        f"minimize: this {type(module).__name__} cannot be built again in another "
        f"process: {why}. Give the function that made it instead, as functools.partial "
        "with its arguments or as 'package.module:function'"
    )


# --- starts and bounds ---


def values_of(module: nn.Module, x0: NDArray[np.float64] | None) -> dict[str, Tensor]:
    """Return all tensors of a module by name, with the parameters of x0 if there is one."""
    named = FlatModel(module).named_tensors()
    tensors = {name: tensor.detach().clone() for name, tensor in named.items()}
    if x0 is not None:
        _check_size(module, len(x0), "x0 has {} numbers")
        for name, part in _by_parameter(module, x0):
            tensors[name].copy_(part)
            if what := lost(part, tensors[name]):
                kind = tensors[name].dtype
                raise JobError(f"minimize: x0 has numbers that {kind} has not: {name!r} has {what}")
    return tensors


def bounds_of(module: nn.Module, bounds: object) -> dict[str, Tensor]:
    """Return bounds as scipy has them by "lower.NAME" and "upper.NAME", rounded inwards.

    JobError if they are no bounds of this module.
    """
    n = sum(one.numel() for one in module.parameters())
    try:
        if isinstance(bounds, Bounds):
            lower, upper = (np.broadcast_to(one, n).astype(float) for one in (bounds.lb, bounds.ub))
        else:
            pairs = [*cast("Iterable[Sequence[float | None]]", bounds)]
            _check_size(module, len(pairs), "bounds has {} pairs")
            lower = np.array([-np.inf if one is None else one for one, _ in pairs], float)
            upper = np.array([np.inf if one is None else one for _, one in pairs], float)
    except (TypeError, ValueError) as error:
        raise JobError(
            f"minimize: bounds are not {n} pairs (least, largest), or scipy's Bounds: {error}"
        ) from None
    wrong = np.flatnonzero(~((lower <= upper) & (lower < np.inf) & (upper > -np.inf)))
    if wrong.size:
        first = wrong[0]
        raise JobError(
            f"minimize: bounds of parameter {first} are {lower[first]}, {upper[first]}: use least "
            "<= largest"
        )
    found: dict[str, Tensor] = {}
    for side, values, inside in (("lower", lower, np.inf), ("upper", upper, -np.inf)):
        for name, exact in _by_parameter(module, values):
            own = module.get_parameter(name)
            if own.requires_grad:
                bound = found[f"{side}.{name}"] = _rounded(exact, own.dtype, towards=inside)
                if what := lost(exact, bound):
                    raise JobError(f"minimize: bounds of {name!r} have {what}, beyond {own.dtype}")
            elif ((own.detach().double() - exact) * inside < 0.0).any():
                raise JobError(f"minimize: {name} is frozen out of its bounds: leave them out")
    for name, exact in _by_parameter(module, lower):
        # Where the type has no number within, the nearest one: equal bounds fix an element.
        if (least := found.get(f"lower.{name}")) is not None:
            largest = found[f"upper.{name}"]
            is_fixed = least > largest
            least[is_fixed] = largest[is_fixed] = exact.to(least.dtype)[is_fixed]
    return found


def _rounded(exact: Tensor, dtype: torch.dtype, *, towards: float) -> Tensor:
    rounded = exact.to(dtype)
    is_out = (rounded.double() - exact) * towards < 0.0
    rounded[is_out] = torch.nextafter(rounded, torch.full_like(rounded, towards))[is_out]
    return rounded


def _by_parameter(module: nn.Module, flat: NDArray[np.float64]) -> Iterator[tuple[str, Tensor]]:
    parts = torch.from_numpy(np.ascontiguousarray(flat))
    for name, one in module.named_parameters():
        part, parts = parts[: one.numel()], parts[one.numel() :]
        yield name, part.view(one.shape)


def _check_size(module: nn.Module, n: int, words: str) -> None:
    wanted = sum(one.numel() for one in module.parameters())
    if n != wanted:
        raise JobError(f"minimize: {words.format(n)}; the model has {wanted} parameters")


# --- data ---


def pairs(path: str) -> TensorPairs:
    """Return the data set in this file, memory-mapped: the factory that job files name."""
    # Mapped, not read: the processes of one host share one copy.
    tensors = load_file(path)
    return TensorPairs(tensors["inputs"], tensors["targets"])


def tensors_in(path: Path) -> dict[str, Tensor] | None:
    """Return what is in a file, or None if it does not exist or is damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return None


def write_pairs(path: Path, pair: Pair) -> None:
    inputs, targets = pair
    if inputs.data_ptr() == targets.data_ptr():
        targets = targets.clone()  # safetensors refuses tensors that share memory
    save_file({"inputs": inputs, "targets": targets}, path)


_INITIAL: Final = "initial.safetensors"
_TRAIN: Final = "train.safetensors"
_BOUNDS: Final = "bounds.safetensors"
_FILES: Final = (_INITIAL, _TRAIN, _BOUNDS)
_LOCK: Final = "lock"


def problem_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.problem").absolute()


@contextmanager
def own_problem(wanted: Path, *, resumes: bool) -> Iterator[Path]:
    """Lock the files of a run, in a `with` block; yield its directory.

    If the block raises before the run has begun, the files written in it are removed. A run
    that does not resume gets a new directory: this one, or the next free one of that name.
    """
    if resumes:
        with RunDirectory.take(_made(problem_of(wanted))), _nothing_if_refused(wanted):
            yield wanted
        return
    for number in range(1, files.SIBLINGS_MAX):
        suffix = "" if number == 1 else f".{number}"
        directory = wanted.with_name(f"{wanted.name}{suffix}")
        if _is_taken(directory):
            continue
        problem = _made(problem_of(directory))
        try:
            lock = RunDirectory.take(problem)
        except StorageError:
            continue  # another call is about to begin there
        with lock:
            # A call that was refused removes its lock file: ours may be of a removed file.
            if lock.writer_pid() == os.getpid() and not _is_taken(directory):
                with _nothing_if_refused(directory):
                    yield directory
                return
    raise StorageError(f"{wanted} and {files.SIBLINGS_MAX} siblings exist: remove some")


def _is_taken(directory: Path) -> bool:
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))


def _made(problem: Path) -> Path:
    try:
        problem.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.explained(error, problem, doing="make") from error
    return problem


@contextmanager
def _nothing_if_refused(directory: Path) -> Iterator[None]:
    # A run has begun once its job file is written; until then the job is only tried.
    problem = problem_of(directory)
    new = [file for name in _FILES if not (file := problem / name).exists()]
    before = _job_written(directory)
    try:
        yield
    except BaseException:
        if _job_written(directory) == before:
            with suppress(OSError):  # the first error is the one to report
                for file in new:
                    file.unlink(missing_ok=True)
                if [file.name for file in problem.iterdir()] == [_LOCK]:
                    (problem / _LOCK).unlink()
                    problem.rmdir()
        raise


def _job_written(directory: Path) -> tuple[int, int] | None:
    # These change whenever the job file is replaced.
    try:
        found = RunDirectory(directory, lock=None).job_file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@final
class Problem:
    """Model and data of one run, as tables of its job and as the files that they name."""

    def __init__(
        self,
        model: nn.Module | Factory,
        data: object,
        *,
        x0: NDArray[np.float64] | None = None,  # of all parameters; None: as the model has them
        bounds: object = None,  # as of scipy
    ) -> None:
        module = model if isinstance(model, nn.Module) else None
        if module is None and (x0 is not None or bounds is not None):
            table = factory_table(model, what="model")
            arguments = cast("Recipe", table.get("arguments", {}))
            made = call_factory(str(table["factory"]), arguments, table="model")
            module = made if isinstance(made, nn.Module) else None  # others are refused later
        self._bounds = {} if module is None or bounds is None else bounds_of(module, bounds)
        self.values: dict[str, Tensor] | None = None  # of all tensors by name, at the start
        if module is not None and (x0 is not None or module is model):
            self.values = values_of(module, x0)
            for name, one in self.values.items():
                for side, moved in (("lower", torch.maximum), ("upper", torch.minimum)):
                    if (bound := self._bounds.get(f"{side}.{name}")) is not None:
                        one.copy_(moved(one, bound))
        self._pair = as_pair(data, user="minimize")
        self._model: dict[str, object]
        if isinstance(model, nn.Module):
            self._model = {
                "factory": "sandblaster.problem_files:build",
                "arguments": recipe_of(model),
            }
        else:
            self._model = factory_table(model, what="model")
        self._data = {} if self._pair else factory_table(data, what="data")

    @property
    def has_files(self) -> bool:
        return bool(self.values or self._bounds or self._pair)

    def tables(self, directory: Path) -> dict[str, object]:
        """Return tables [model] and [data] of a job with this run directory."""
        model, train = self._model, self._data
        if self.values is not None:
            model = model | {"initial": str(problem_of(directory) / _INITIAL)}
        if self._pair is not None:
            train = {
                "factory": "sandblaster.problem_files:pairs",
                "arguments": {"path": str(problem_of(directory) / _TRAIN)},
            }
        return {"model": model, "data": {"train": train}}

    def algorithm(self, directory: Path) -> dict[str, object]:
        """Return keys of [algorithm]."""
        return {"bounds": str(problem_of(directory) / _BOUNDS)} if self._bounds else {}

    def write(self, directory: Path, *, resumes: bool) -> None:
        """Write the files of the run in this directory; those of a resumed run stay.

        Its bounds may be others: then the method starts again, as with another loss.
        """
        problem = problem_of(directory)
        initial, train = problem / _INITIAL, problem / _TRAIN
        if (values := self.values) is not None and not (resumes and tensors_in(initial)):
            files.write_by(initial, lambda temporary: save_file(values, temporary))
        if bounds := self._bounds:
            files.write_by(problem / _BOUNDS, lambda temporary: save_file(bounds, temporary))
        if (pair := self._pair) is None:
            return
        kept = tensors_in(train) if resumes else None
        if not kept:
            files.write_by(train, lambda temporary: write_pairs(temporary, pair))
            return
        was = TensorPairs(kept["inputs"], kept["targets"]).fingerprint
        now = TensorPairs(*pair).fingerprint
        if was != now:
            raise JobError(
                f"minimize: resume is {directory}, a run on other data: they were {was}, "
                f"now they are {now}. Give the same data, or use a new directory"
            )
