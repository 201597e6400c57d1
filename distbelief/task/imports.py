"""Resolves functions named in the job file by import path, "package.module:function".

This is the only way user code enters a process: no pickled object, no source text. Without a
module, ":name" is an object of the program of which this process is, or is a fork of (`OBJECTS`).
"""

import ast
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from traceback import extract_tb
from typing import Final, Protocol, cast

from distbelief.core.errors import JobError
from distbelief.core.formatting import nearest


GUARD = "if __name__ == '__main__':"
_PACKAGE = Path(__file__).parents[1]
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


_under_import: list[str] = []  # modules of the user, while they are imported


OBJECTS: Final[dict[str, object]] = {}  # that a program has given to its job, by name


class Importable(Protocol):
    """A function or class of the user."""

    def __call__(self, **arguments: object) -> object: ...


def shown_name(path: str) -> str:
    """Return how results name what a path names: an object of the program by its own name."""
    return path.removeprefix(":")


def resolve(path: str, *, table: str = "job") -> Importable:
    """Return the function that "package.module:name" names, or raise JobError.

    `table` is for messages.
    """
    found = named(path, table=table)
    if not callable(found):
        raise JobError(
            f"[{table}] {path} is of type {type(found).__name__}, which cannot be "
            "called: name a function"
        )
    return cast("Importable", found)


def named(path: str, *, table: str) -> object:
    """Return whatever "package.module:name" names; as `resolve`."""
    module_name, colon, name = path.partition(":")
    if not module_name and name in OBJECTS:
        return OBJECTS[name]
    if not module_name and name.partition("[")[0].isidentifier():
        raise JobError(
            f"[{table}] {path!r} is an object of the program that called distbelief.fit: call fit "
            "there again, with resume, or load model.safetensors into the module"
        )
    if not (colon and name and all(module_name.split("."))):
        raise JobError(f"[{table}] {path!r} is no import path: write 'package.module:function'")
    if module_name == "__main__":
        raise JobError(
            f"[{table}] {path}: other processes cannot import the main program: write the name of "
            f"its file, 'file:{name}', and put what starts the job under {GUARD}"
        )
    found: object = _module(module_name, table=table)
    for part in name.split("."):
        owner = found
        if not hasattr(owner, part):
            known = [n for n in dir(owner) if not n.startswith("_")]
            raise JobError(f"[{table}] {module_name} has no {name!r}. {nearest(part, known)}")
        found = getattr(owner, part)
    return found


def call_factory(path: str, arguments: Mapping[str, object], *, table: str) -> object:
    factory = resolve(path, table=table)
    _check_arguments(factory, arguments, path=path, table=f"{table}.arguments")
    try:
        return factory(**arguments)
    except JobError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise JobError(
            f"[{table}] {path} failed: {type(error).__name__}: {error}{place(error)}"
        ) from error


def installed_imports(names: Iterable[str], directories: Sequence[str]) -> tuple[str, ...]:
    """Return the installed modules that these import at their top; sources are only parsed."""
    places = [*directories, *sys.path]
    found: list[str] = []
    waiting = dict.fromkeys(names)
    seen: set[str] = set()
    while waiting:
        name, _ = waiting.popitem()
        top = name.partition(".")[0]
        if not name or name in seen or top == _PACKAGE.name or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        spec = _find(name, places)
        if spec is None or spec.origin is None:
            continue
        if spec.origin.startswith(INSTALLED):
            found.append(name)
        else:
            waiting |= dict.fromkeys(_imports_of(Path(spec.origin)))
    return tuple(reversed(found))


def _find(name: str, places: Sequence[str]) -> ModuleSpec | None:
    spec: ModuleSpec | None = None
    below: Sequence[str] | None = places
    for end in range(1, name.count(".") + 2):
        if below is None:
            return None
        try:
            spec = PathFinder.find_spec(".".join(name.split(".")[:end]), list(below))
        except KeyError:  # a folder without __init__.py, whose parent must be imported first
            return None
        if spec is None:
            return None
        below = spec.submodule_search_locations
    return spec


def _imports_of(source: Path) -> Iterable[str]:
    try:
        statements = ast.parse(source.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # the role that imports it reports that
        return
    for statement in statements:
        match statement:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
                yield module
            case _:
                pass


def _module(name: str, *, table: str) -> object:
    arguments = sys.argv
    _under_import.append(name)
    sys.argv = arguments[:1]  # those of this process are not the user's
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # user code may raise anything
        missing = str(getattr(error, "name", None) or name)
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{missing}."):
            of = "" if missing == name else f" (of {name!r})"
            raise JobError(
                f"[{table}] there is no module {missing!r}{of}; searched: "
                f"{_searched()}. Start from the directory that holds it, or install it"
            ) from None
        where = "" if isinstance(error, SyntaxError) else place(error)  # its text has file and line
        kind = "" if isinstance(error, JobError) else f"{type(error).__name__}: "
        script = ""
        lines = [frame.line or "" for frame in extract_tb(error.__traceback__)]
        if isinstance(error, SystemExit) or any("argv" in line for line in lines):
            script = f": is it a script? Put what it runs under {GUARD}"
        raise JobError(
            f"[{table}] importing {name} failed: {kind}{error}{where}{script}"
        ) from error
    finally:
        sys.argv = arguments
        _under_import.pop()


def places() -> list[str]:
    """Return the directories from which this program imports, for the processes of its job."""
    paths = [Path(path).absolute() for path in sys.path]
    return [str(path) for path in dict.fromkeys(paths) if path.is_dir()]


def check_is_no_import(user: str) -> None:
    """Raise JobError if a module of a job calls this while it is imported."""
    if _under_import:
        raise JobError(
            f"{user} is called while {_under_import[-1]} is imported, by each process of the job: "
            f"put what starts the job under {GUARD}"
        )


def _searched() -> str:
    # The interpreter's own directories would only lengthen the message.
    own = {sys.prefix, sys.base_prefix}
    places = [
        str(Path(entry).absolute())
        for entry in sys.path
        if not any(entry.startswith(prefix) for prefix in own) and not entry.endswith(".zip")
    ]
    return ", ".join(dict.fromkeys([*places, "installed packages"]))


def parameters_of(factory: Importable) -> Sequence[str]:
    """Return the names of a function's parameters; none of some builtins."""
    try:
        return [*inspect.signature(factory).parameters]
    except (TypeError, ValueError):
        return []


def own_arguments(path: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a call without those that the function has by default anyway."""
    try:
        known = inspect.signature(resolve(path)).parameters
    except (JobError, TypeError, ValueError):  # its defaults are not known
        return dict(arguments)

    def is_default(name: str, value: object) -> bool:
        default = known[name].default if name in known else inspect.Parameter.empty
        default = list(default) if isinstance(default, tuple) else default  # a job file has none
        # 1, 1.0 and True are equal, but a function may tell them apart; of other types, such as
        # arrays, nothing is equal here.
        return type(value) is type(default) and repr(value) == repr(default) and value == default

    return {name: value for name, value in arguments.items() if not is_default(name, value)}


def _check_arguments(
    factory: Importable, arguments: Mapping[str, object], *, path: str, table: str
) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = signature.parameters
        hints = (nearest(name, known, only_close=True) for name in arguments if name not in known)
        hint = next(hints, "Give it")
        raise JobError(
            f"[{table}] {path} takes {', '.join(known) or 'none'}: {error}. {hint}".rstrip(". ")
        ) from None


def place(error: BaseException) -> str:
    """Return " (file, line N)" of an error, in the user's code if possible."""
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    if not frames:
        return ""
    # A line of the user's code helps more than the line of the library that it called.
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    frame = (own or frames)[-1]
    return f" ({Path(frame.filename).name}, line {frame.lineno})"
