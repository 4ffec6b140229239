# Each target sets up what it needs: a .venv with the package and its tools, under constraints.txt.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell command -v python3.11 || command -v python3)

.DEFAULT_GOAL := help
.PHONY: help venv demo docs quick test soak style lint format

# Test files and the many processes that tests start are compiled to bytecode once.
unexport PYTHONDONTWRITEBYTECODE

# Workers steal tests from each other, so that none is left alone with the last ones.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q
SHARED := -n 2 --dist worksteal --ignore tests/dist
PROCESSES := tests/dist -n 2 --dist loadfile

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Create .venv and install the package with its tools

demo: $(STAMP) ## Data parallelism against Tofu's plan of a small GPT: four processes, both checked
	$(BIN)/python -m apportion.cli.demo

docs: $(STAMP) ## The documentation as pages that need no network: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Types are checked while tests run, which saves a core's time at their beginning.
MYPY_BESIDE = $(BIN)/mypy & types=$$!; status=0

quick: style ## Lint, types, and the tests of every room that take little time: while you work
	$(MYPY_BESIDE); $(PYTEST) $(SHARED) -m "not slow" --durations 5 --durations-min 1 || status=$$?; \
	wait $$types && exit $$status

test: style ## Lint, types, all tests, and a report of the project's size: before you hand over
	$(MYPY_BESIDE); $(PYTEST) $(SHARED) || status=$$?; wait $$types && exit $$status
	$(PYTEST) $(PROCESSES)
	$(BIN)/python tools/size.py

soak: $(STAMP) ## All tests with all of their cases, for as long as that takes: hours
	$(PYTEST) $(SHARED) --soak
	$(PYTEST) $(PROCESSES) --soak

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style ## Ruff and mypy
	$(BIN)/mypy

format: $(STAMP) ## Let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "python3.11 is needed and was not found." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	@touch $@
