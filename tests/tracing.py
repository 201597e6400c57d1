"""Coverage looks at our own code, and only where it may see something new.

While Python 3.11 is traced it takes twice as long, whoever's code it runs. So the
tracer sleeps, and is woken for:

* the modules of ours that are imported, not those of others that they import;
* tests and fixtures themselves, not what pytest does between them;
* the first examples of a law, not how examples are drawn, nor the many that follow;
* one in four exports of a model: in all others torch does nearly the same for seconds;
* none of this where a test is marked `untraced`, nor in processes that it starts.

It is put to sleep in the very frame that woke it: it counts calls and returns, and
would take one frame for another if it had seen only one of the two.
"""

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Final, ParamSpec, TypeVar

import pytest


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

N_EXAMPLES: Final = 10
"""Of a law, whose coverage is measured. Later ones seldom take a new branch."""

N_EXPORTS: Final = 4
"""Of so many exports of a model, the first is measured."""

OURS: Final = ("distbelief", "sandblaster")

TRACER: Final = sys.gettrace()


def measure_imports() -> None:
    """From now on measure nothing but the import of our own modules."""
    if TRACER is None:
        return
    execute = SourceFileLoader.exec_module

    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        before = sys.gettrace()
        is_ours = module.__name__.partition(".")[0] in OURS
        sys.settrace(TRACER if is_ours else None)
        try:
            execute(loader, module)
            if module.__name__ == "torch.export":
                vars(module)["export"] = seldom_measured(vars(module)["export"])
        finally:
            sys.settrace(before)

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign, assignment]
    sys.settrace(None)


def measured(call: Callable[P, R]) -> Callable[P, R]:
    """Return a function that does the same, and is seen doing it."""

    @functools.wraps(call)
    def body(*args: P.args, **kwargs: P.kwargs) -> R:
        sys.settrace(TRACER)
        try:
            return call(*args, **kwargs)
        finally:
            sys.settrace(None)

    return body


def seldom_measured(call: Callable[P, R]) -> Callable[P, R]:
    """Return a function that does the same, and is seen doing it in one of `N_EXPORTS` calls."""
    calls = itertools.count()

    @functools.wraps(call)
    def body(*args: P.args, **kwargs: P.kwargs) -> R:
        before = sys.gettrace()
        if next(calls) % N_EXPORTS:
            sys.settrace(None)
        try:
            return call(*args, **kwargs)
        finally:
            sys.settrace(before)

    return body


def is_untraced(node: pytest.Item | pytest.Collector) -> bool:
    return TRACER is None or node.get_closest_marker("untraced") is not None


def measure_test(item: pytest.Function) -> None:
    """Let this test be measured; of a law, its first examples."""
    law = getattr(item.obj, "hypothesis", None)
    if law is None:
        item.obj = measured(item.obj)
        return
    test, example = item.obj, law.inner_test

    @functools.wraps(test)
    def body(*args: object, **kwargs: object) -> None:
        n_tried = 0

        @functools.wraps(example)
        def tried(*args: object, **kwargs: object) -> object:
            nonlocal n_tried
            n_tried += 1
            seen = n_tried <= N_EXAMPLES
            return (measured(example) if seen else example)(*args, **kwargs)

        law.inner_test = tried
        try:
            test(*args, **kwargs)
        finally:
            law.inner_test = example

    item.obj = body


def measured_fixture(fixture: Callable[..., T]) -> Callable[..., T | Iterator[T]]:
    """Return this fixture, seen before and after what it is for."""
    if hasattr(fixture, "__wrapped__"):  # for an earlier test
        return fixture
    if not inspect.isgeneratorfunction(fixture):
        return measured(fixture)

    @functools.wraps(fixture)
    def body(*args: object, **kwargs: object) -> Iterator[T]:
        run = fixture(*args, **kwargs)
        advance = measured(functools.partial(next, run, None))
        yield advance()
        advance()

    return body


def unseen_children() -> dict[str, str]:
    """Let nobody measure processes that are started from now on; return what would."""
    names = [name for name in os.environ if name.startswith("COVERAGE_PROCESS")]
    return {name: os.environ.pop(name) for name in names}
