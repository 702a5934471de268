# The commands of the house. `make` alone lists them.

PYTHON := .venv/bin/python
DIR ?=
PYTEST_ARGS ?=
SEEDS ?=
STORAGE ?=
SECONDS ?=
STEALS ?=
MUTANTS ?=

.DEFAULT_GOAL := help
.PHONY: setup services demo test slow cases sim chaos net bench lint format clean help

setup: ## make .venv and install the project with its tools (fast when nothing changed)
	@sh scripts/setup.sh

services: # the servers that tests start for themselves: only their programs
	@sh scripts/services.sh

demo: setup ## show the life of real jobs in a few seconds (DIR=path: on the files below it)
	@$(PYTHON) -m fluxmesh.cli demo $(if $(DIR),--dir "$(DIR)")

test: setup services ## the whole suite, cheapest tests first (PYTEST_ARGS="-k name" for a part)
	@sh scripts/test.sh $(PYTEST_ARGS)

slow: setup services ## the tests outside the cases that `make test` leaves out, because they take minutes
	$(PYTHON) -m pytest -m slow tests --ignore=tests/cases --ignore=tests/stealing $(PYTEST_ARGS)

cases: setup services ## the failure cases at their full waiting times, on every storage, and the table of docs/cases.md
	@mkdir -p build && rm -f build/cases.jsonl
	FLUXMESH_TEST_CASES=full FLUXMESH_TEST_CASE_LINES=$(CURDIR)/build/cases.jsonl \
		$(PYTHON) -m pytest tests/cases tests/stealing $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(PYTHON) scripts/cases_table.py build/cases.jsonl docs/cases.md)

sim: setup ## the mesh in virtual time: 1,000 seeds of faults, 100,000 steals, figures of 3 to 1,000 real cores, 10,000 by a model (SEEDS=1-50 STEALS=1000)
	$(PYTHON) -m fluxmesh.cli mesh simulate --steals $(or $(STEALS),100000)
	$(PYTHON) -m fluxmesh.cli mesh simulate --seeds $(or $(SEEDS),1-1000) --kills 60 \
		--measure 3 --measure 10 --measure 100 --measure 1000 --model 10000

chaos: setup services ## real workers under faults, judged (SEEDS=1-20 STORAGE=redis SECONDS=60 STEALS=2000; MUTANTS=1: can the judge fail?)
	$(PYTHON) -m tests.chaos $(if $(SEEDS),--seeds $(SEEDS)) $(if $(STORAGE),--storage $(STORAGE)) \
		$(if $(STEALS),--steals $(STEALS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(MUTANTS),--mutants $(filter-out 1,$(MUTANTS)))

net: setup ## the mesh on a network of its own: cuts, loss, stops (root, iproute2, nftables; 12 minutes)
	FLUXMESH_TEST_NET=1 $(PYTHON) -m pytest -s tests/net $(PYTEST_ARGS)

bench: setup services ## measure, and print the figures as ratios to the floor
	$(PYTHON) -m benchmarks.run_benchmark --storage sqlite,redis

lint: setup ## format, rules, types and floors, without changing a file
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports

format: setup ## format, and mend what can be mended without a thought
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean: ## remove caches and build output (.venv and databases stay)
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
