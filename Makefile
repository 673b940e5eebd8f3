# Two targets do all on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off

.PHONY: demo test check lint engines-test machine mutants soak bench engines dev clean

demo: $(VENV)/.engines
	$(BIN)/kvloop demo $(DEMO)

# Minutes: everything, the router on real engines included.
test: lint $(VENV)/.engines
	$(BIN)/pytest

# A minute or two: all that needs no engine, but for the long run of the state machine.
check: lint
	$(BIN)/pytest tests/unit tests/router tests/fuzz

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests bench tools
	$(BIN)/ruff check src tests bench tools
	$(BIN)/mypy

engines-test: $(VENV)/.engines
	$(BIN)/pytest tests/engines tests/claims

# The state machine: 100,000 turns as in `make test`, with a seed of your own: make machine SEED=7
SEED ?= 1
machine: $(VENV)/.dev
	$(BIN)/python -m tests.machine --seed $(SEED) --turns 100000

# Hours: five million turns.
soak: $(VENV)/.dev
	$(BIN)/python -m tests.machine --seed $(SEED) --turns 5000000

# Each guard taken out in turn; the state machine must notice.
mutants: $(VENV)/.dev
	$(BIN)/python -m tests.machine.mutants --seed $(SEED)

bench: $(VENV)/.engines
	mkdir -p bench/results
	$(BIN)/python bench/relay.py --json bench/results/relay.json
	$(BIN)/python bench/ttft.py --json bench/results/ttft.json
	$(BIN)/python bench/ledger.py --json bench/results/ledger.json
	$(BIN)/python bench/slow_clients.py --json bench/results/slow_clients.json

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
