# make demo: a story, redrafted on your terminal.  make test: everything.  make lint: style only.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready

.PHONY: demo test lint docs bench clean

demo: $(READY)
	$(VENV)/bin/redraft "Once upon a time"

test: lint
	$(VENV)/bin/python -m pytest -n 2 -m "not timed"
	$(VENV)/bin/python -m pytest -m timed

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

docs: $(READY)
	$(VENV)/bin/python docs/make_cli.py

bench: $(READY)
	$(VENV)/bin/python benchmarks/bench_step.py

clean:
	rm -rf $(VENV) build

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "redraft needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)
