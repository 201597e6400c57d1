"""The process that `corpus` starts: it builds the corpora its command line names.

It is a process of its own because sessions are forked, and a fork of a process in which
torch has started threads may hang; and because BLAS must run on one thread, for the
last bit of a sum depends on how many there are.
"""

import argparse
import errno
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.speech.builder import build_volume
from experiments.speech.errors import CorpusError, SpeechError
from experiments.speech.lock import hold_lock
from experiments.speech.recipe import Recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line names; an error is one line on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("recipes", nargs="+")
    options = parser.parse_args(arguments)
    # Both ways to be ended unwind the stack, so that nothing half built is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for spelling in options.recipes:
            recipe = Recipe.read(spelling)
            build(recipe, cache=options.cache, n_workers=options.workers)
    except SpeechError as error:
        print(error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def build(recipe: Recipe, *, cache: Path, n_workers: int) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with hold_lock(cache / f"{recipe.name}.lock"):
            if not (cache / recipe.name).exists():
                build_volume(recipe, cache=cache, n_workers=n_workers)
    except OSError as error:
        raise explain(error, recipe=recipe, cache=cache) from error


def explain(error: OSError, *, recipe: Recipe, cache: Path) -> CorpusError:
    reason = error.strerror or str(error)
    name = error.filename or str(cache)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        mend = (
            f"building {recipe.name} needs {recipe.n_bytes / 1e6:,.0f} MB: make space, "
            "or name another folder with the argument cache or with XDG_CACHE_HOME"
        )
    else:
        mend = "name another folder with the argument cache or with XDG_CACHE_HOME"
    return CorpusError(f"cannot write {name}: {reason}; {mend}")


if __name__ == "__main__":
    sys.exit(main())
