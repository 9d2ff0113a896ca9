# make demo: a Sudoku and a story, redrafted on your terminal; installs what `pip install .` does. The others install .[dev] too.
# make test: lint and equalities.  make soak: endurance, other processes, browsers, Ray.  make soak-long: the large counts, before a release.
# make bench: speeds.  make lint: style and types.
PYTHON ?= python3
VENV := .venv
RUNS := $(VENV)/runs
READY := $(VENV)/ready
INSTALL := $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt
# A group of tests (a file, all tests of the browser, all of Ray) goes to one worker, the longest groups first: tests/conftest.py.
PYTEST := $(VENV)/bin/python -m pytest --dist loadscope --no-loadscope-reorder

.PHONY: demo test soak soak-long lint docs bench clean

demo: $(RUNS)
	@$(VENV)/bin/redraft demo

test: lint
	$(PYTEST) -n 2 -m "not soak and not soak_long"

# These tests wait for processes, browsers and servers: more workers than cores.
soak: $(READY)
	$(PYTEST) -n 4 -m "soak and not soak_long"

soak-long: $(READY)
	$(PYTEST) -n 2 -m soak_long

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	@$(VENV)/bin/python tests/print_lengths.py

docs: $(READY)
	$(VENV)/bin/python docs/make_cli.py
	$(VENV)/bin/python docs/make_hardware.py

bench: $(READY)
	$(VENV)/bin/python benchmarks/bench_step.py
	$(VENV)/bin/python benchmarks/bench_start.py
	$(VENV)/bin/python benchmarks/bench_neighbour.py

clean:
	rm -rf $(VENV) build

$(RUNS): pyproject.toml constraints.txt
	@echo "installing redraft into $(VENV): about a minute, once" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "redraft needs Python 3.11 or newer, this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --no-compile --editable . >&2 # modules are compiled when they are first imported: most never are
	@touch $(RUNS)

$(READY): $(RUNS)
	@echo "installing what the tests need into $(VENV)" >&2
	@$(INSTALL) --editable ".[dev]" >&2
	@touch $(READY)
