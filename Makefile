# Everything a person or a machine runs here. `make` alone lists the targets.
# setup writes only into .venv; the other targets use .venv when it is there and the python3 at hand when it is not.

PYTHON := $(shell command -v python3.11 || command -v python3)
PY = $(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON))
STAMP := .venv/.installed
COMPILED := .venv/.compiled

# Two processes, each with a stretch of neighbouring files: what a file imports, compiles or computes once, only one of them pays.
BOTH := -n 2 --dist worksteal

# One compute thread per process: tests run two at a time, and a peer's own setting decides in a run.
export OMP_NUM_THREADS ?= 1
export PYTHONPATH := $(CURDIR)/src
export TOKENIZERS_PARALLELISM := false
# Where it is set, as in some CI images, every process that a test starts compiles some 500 sources anew: 3 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo wheel test check format lint imports types unit long slow gpu bench structure protocol results recipes papers configuration docs clean

help:
	@echo "make setup   .venv with Shoal and its tools"
	@echo "make demo    six local peers train a byte-level language model"
	@echo "make wheel   dist/, as others install it: wheel built, checked, installed into an empty environment and run"
	@echo "make test    setup, then every check and every quick test (what CI runs)"
	@echo "make check   the same without setup, end-to-end tests and what takes over 0.2 s, for every commit"
	@echo "make slow    the tests marked slow;  make gpu: the first hour on a card"
	@echo "make bench   every benchmark; each prints one JSON line"
	@echo "make long    tests/long.txt, the tests that check leaves to test, measured anew"
	@echo "make structure  sizes, complexity, cycles of the sources; AGAINST=REF compares with a commit"
	@echo "make format  rewrite the sources in our format;  make protocol: docs/protocol.md and docs/view.md from the code"
	@echo "make results docs/results.md and its plots from benchmarks/results.jsonl"
	@echo "make papers  the papers' tables and the internet tax, computed anew (minutes), into docs/"
	@echo "make recipes docs/recipes.md from what the planner predicts for configs/recipes"
	@echo "make configuration   docs/configuration.md from the settings"
	@echo "make docs    the documentation as a site, in build/site"

setup: $(STAMP)

# Redone only when what it installs has changed. A broken or half-made .venv is made anew. A newer pip reads what packages need without
# fetching them whole, as Debian's 23.0 does; of 16,000 files one in four is ever imported, and compiled then: 75 s of CPU instead of 128.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Shoal needs Python 3.11 or newer; no python3 was found" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Shoal needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}")'
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'pip>=25'
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,docs,page]'
	@touch $@

demo: setup
	.venv/bin/shoal demo

# Built, checked, installed into an empty environment and run from another directory.
wheel: setup
	rm -rf dist
	$(PY) -m build --outdir dist
	$(PY) -m twine check --strict dist/*
	$(PY) -m check_wheel_contents dist
	$(PY) -m pytest -q -s -m slow --timeout 1800 tests/project/test_wheel.py

test: setup
	@$(MAKE) --no-print-directory -j 2 lint imports types $(COMPILED) docs
	@$(MAKE) --no-print-directory unit

# Once after setup, what tests import, beside mypy, which has one core: two test processes that begin at once each compile all of it, 36 s.
$(COMPILED): $(STAMP)
	@$(PY) -m pytest -q --collect-only -m 'not slow and not gpu' >/dev/null 2>&1 || true # what is wrong, the tests themselves say
	@touch $@

check: lint imports types docs
	$(PY) -m pytest -q $(BOTH) -m 'not slow and not gpu and not long' --ignore=tests/e2e

# On an idle machine. What takes over 0.2 s is for `make test` alone.
long: setup
	$(PY) -m pytest -q $(BOTH) -m 'not slow and not gpu' --ignore=tests/e2e --junitxml=build/tests.xml
	$(PY) tools/long_tests.py build/tests.xml

lint:
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

imports:
	@$(PY) -c 'from importlinter.cli import lint_imports_command as run; run(["--no-logo"])'

types:
	$(PY) -m mypy

unit:
	$(PY) -m pytest -q $(BOTH) -m 'not slow and not gpu'

slow: setup
	$(PY) -m pytest -q -m 'slow and not gpu' --timeout 900

# PART: identity, sanitizer, memory, mixed, run, serving, sharded, swapping, codecs; all of them if it is not set. Without a card a rehearsal on the CPU.
gpu:
	@$(PY) tools/first_hour.py $(PART)

bench: setup
	@set -e; for script in benchmarks/[a-z]*.py; do echo "# $$script"; .venv/bin/python "$$script"; done

structure:
	@$(PY) tools/structure.py $(if $(AGAINST),--against $(AGAINST))

protocol:
	$(PY) docs/protocol.py
	$(PY) docs/view.py

results:
	$(PY) docs/results.py

# PART: swarm, dtfm, atom, tax-1.3B, tax-8B, tax-70B; all of them if it is not set.
papers:
	$(PY) benchmarks/papers $(PART)

recipes:
	$(PY) docs/recipes.py

configuration:
	$(PY) docs/configuration.py

# Strict: a broken link, a missing page and a module that is not there are errors.
docs:
	@$(PY) -c 'import mkdocs, material, mkdocstrings, mermaidx' 2>/dev/null || { echo "the tools of the docs are missing: make setup" >&2; exit 1; }
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

format:
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
