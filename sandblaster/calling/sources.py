"""How other processes get what the user holds in this one, without pickle.

    text "package.module:function"        called there
    a function or class of some module    its import path
    functools.partial(function, a=1)      its import path, and the keyword arguments
    a pair of tensors or arrays           a file (`tensor_files`)

What is defined in the program itself, in a notebook or inside a function cannot be
imported by another process: it is refused, with what to do instead.
"""

import inspect
import sys
from functools import partial
from typing import cast

from distbelief.errors import JobError


Factory = object
"""What makes a module or a data set, or is a loss: an import path, or the function."""


def factory_table(factory: object, *, what: str) -> dict[str, object]:
    """Return keys `factory` and `arguments` of a table of a job file.

    Args:
        factory: An import path, a function or class, or a partial of one.
        what: To call it in messages: "model", ...

    Raises:
        JobError: another process could not have it.
    """
    if isinstance(factory, str):
        return {"factory": factory}
    if isinstance(factory, partial):
        wrapped = cast("partial[object]", factory)
        if wrapped.args:
            raise JobError(
                f"minimize: {what} is a partial with positional arguments "
                f"{wrapped.args!r}: give them by name"
            )
        path = import_path(wrapped.func, what=what)
        return {"factory": path, "arguments": dict(wrapped.keywords)}
    return {"factory": import_path(factory, what=what)}


def import_path(thing: object, *, what: str) -> str:
    """Return "package.module:name" of a function or class.

    Raises:
        JobError: it has none that leads back to it.
    """
    module_name, name = _names(thing)
    if module_name == "__main__":
        raise JobError(
            f"minimize: {what} {name} is defined in the program itself, which other "
            "processes cannot import: move it to a module of its own"
        )
    found: object = sys.modules.get(module_name or "")
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if module_name is None or found is not thing:
        raise JobError(
            f"minimize: {what} is {_shown(thing)}, which other processes cannot "
            "import: give a function of some module, functools.partial of one, or "
            "'package.module:function'"
        )
    return f"{module_name}:{name}"


def _names(thing: object) -> tuple[str | None, str | None]:
    if not (inspect.isroutine(thing) or inspect.isclass(thing)):
        return None, None
    return thing.__module__, thing.__qualname__


def _shown(thing: object) -> str:
    text = " ".join(repr(thing).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
