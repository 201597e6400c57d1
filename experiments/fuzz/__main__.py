"""`python -m experiments.fuzz`."""

import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module


def _instrumented() -> AbstractContextManager[None]:
    """Have atheris see which code is reached, in a process that it is to lead.

    It sees what is imported meanwhile, and of all that our own decoders only.
    """
    if not {"--child", "atheris"} <= {*sys.argv}:
        return nullcontext()
    atheris = import_module("atheris")
    found: AbstractContextManager[None] = atheris.instrument_imports(include=["distbelief"])
    return found


if __name__ == "__main__":
    with _instrumented():
        from experiments.fuzz.command import main

        main()
