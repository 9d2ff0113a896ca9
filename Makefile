# make demo: a Sudoku and a story, redrafted on your terminal.  make test: lint and tests.  make soak: minutes of load and long training.
# make bench: speeds.  make lint: style and types.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready

.PHONY: demo test soak lint docs bench clean

demo: $(READY)
	@$(VENV)/bin/redraft demo

test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not soak"

soak: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m soak

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(READY)
	$(VENV)/bin/python docs/make_cli.py
	$(VENV)/bin/python docs/make_hardware.py

bench: $(READY)
	$(VENV)/bin/python benchmarks/bench_step.py
	$(VENV)/bin/python benchmarks/bench_start.py
	$(VENV)/bin/python benchmarks/bench_neighbour.py

clean:
	rm -rf $(VENV) build

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV)" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "redraft needs Python 3.11 or newer, this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]" >&2
	@touch $(READY)
