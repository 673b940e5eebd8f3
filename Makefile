# Two targets do all on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off

.PHONY: demo test check lint engines-test bench engines dev clean

demo: $(VENV)/.engines
	$(BIN)/kvloop demo $(DEMO)

# Minutes: everything, the router on real engines included.
test: lint $(VENV)/.engines
	$(BIN)/pytest

# Seconds: all that needs no engine.
check: lint
	$(BIN)/pytest tests/unit tests/router

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests bench tools
	$(BIN)/ruff check src tests bench tools
	$(BIN)/mypy

engines-test: $(VENV)/.engines
	$(BIN)/pytest tests/engines

bench: $(VENV)/.engines
	mkdir -p bench/results
	$(BIN)/python bench/relay.py --json bench/results/relay.json
	$(BIN)/python bench/ttft.py --json bench/results/ttft.json

dev: $(VENV)/.dev
engines: $(VENV)/.engines

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	@echo "kvloop: installing the project and its development tools"
	$(PIP) -e '.[dev,demo]'
	touch $@

$(VENV)/.engines: $(VENV)/.dev tools/install_engine.py
	$(BIN)/python tools/install_engine.py
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
