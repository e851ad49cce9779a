# `make demo` and `make test` need Python 3.11 and pip; the rest is set up in .venv on first use and reused after that.
#
#     make demo                                             a synthetic checkpoint on 2 CPU ranks, every strategy
#     make demo MODEL=/path COMPONENT=transformer NPROC=8   your own checkpoint, on GPUs where there are any
#     make test [ARGS='-k plan -x']                         the tests
#     make examples                                         the training examples, a few steps on 2 CPU ranks
#     make lint | make fix                                  ruff and mypy: check, or repair what can be repaired
#     make clean                                            remove caches and the demo's checkpoint (keeps .venv)

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
CODE := metashard tests tools benchmarks examples

MODEL ?=
COMPONENT ?= transformer
NPROC ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test examples lint fix clean env

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

# The interpreter is checked first: an old one fails here with one line rather than inside pip.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "metashard needs Python 3.11 or later; pass one with make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into .venv; this takes a few minutes the first time"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

env: $(STAMP)

demo: export OMP_NUM_THREADS := 1
demo: $(STAMP)
	$(BIN)/python tools/demo.py --nproc $(NPROC) --component '$(COMPONENT)' $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: export OMP_NUM_THREADS := 1
test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

examples: export OMP_NUM_THREADS := 1
examples: $(STAMP)
	$(BIN)/python examples/train_lora.py --smoke
	$(BIN)/python examples/train_full.py --smoke
	$(BIN)/python examples/train_ray.py --smoke
	$(BIN)/python examples/train_dreambooth_lora.py --smoke

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

fix: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:
	rm -rf .demo .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
