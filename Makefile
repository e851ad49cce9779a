# `make demo` and `make test` need Python 3.11 and pip; the rest is set up in .venv on first use and reused after that.
#
#     make demo                                             a synthetic checkpoint on 2 CPU ranks, every strategy
#     make demo MODEL=/path COMPONENT=transformer NPROC=8   your own checkpoint, on GPUs where there are any
#     make test [ARGS='-k plan -x']                         the tests, two files at a time (ARGS='-n 0': one)
#     make bench [OUT=DIR]                                  all benchmarks in small form: reports and charts in .bench
#     make examples                                         the training examples, a few steps on 2 CPU ranks
#     make docs                                             the pages of docs/, in docs/_build; a warning is an error
#     make dist                                             sdist and wheel in dist/, checked in an environment of their own
#     make lint | make fix                                  ruff and mypy: check, or repair what can be repaired
#     make clean                                            remove caches, the demo's checkpoint and .bench (keeps .venv)

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
CODE := metashard tests tools benchmarks examples docs

MODEL ?=
COMPONENT ?= transformer
NPROC ?= 2
ARGS ?=
OUT ?= .bench

.DEFAULT_GOAL := help
.PHONY: help demo test bench examples docs dist lint fix clean env

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
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# One small checkpoint for all of them, kept for the next time.
BENCH_MODEL := $(OUT)/checkpoint/sd3-small-4
bench: export OMP_NUM_THREADS := 1
bench: $(STAMP)
	mkdir -p $(OUT)
	$(BIN)/python benchmarks/loading_speed.py --quick --workdir $(OUT)/checkpoint \
	  --json $(OUT)/loading_speed.json --markdown $(OUT)/loading_speed.md
	$(BIN)/python benchmarks/init_latency.py --quick --workdir $(OUT)/checkpoint --out $(OUT)
	$(BIN)/python benchmarks/init_latency.py --quick --workdir $(OUT)/checkpoint --out $(OUT) --lora --flows direct rank0/scatter
	$(BIN)/python benchmarks/peak_memory.py --quick --workdir $(OUT)/checkpoint --out $(OUT)
	$(BIN)/python benchmarks/saving_speed.py --quick --workdir $(OUT)/checkpoint \
	  --json $(OUT)/saving_speed.json --markdown $(OUT)/saving_speed.md
	$(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/weight_loading.py --model-path $(BENCH_MODEL) \
	  --subfolder transformer --repeats 1 --json $(OUT)/weight_loading.json
	$(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/weight_loading_comparison.py --model-path $(BENCH_MODEL) \
	  --subfolder transformer --repeats 1 --json $(OUT)/weight_loading_comparison.json
	@echo; echo "reports and charts:"; ls -d $(OUT)/*.md $(OUT)/*.json $(OUT)/*.csv $(OUT)/*.png

examples: export OMP_NUM_THREADS := 1
examples: $(STAMP)
	$(BIN)/python examples/train_lora.py --smoke
	$(BIN)/python examples/train_full.py --smoke
	$(BIN)/python examples/train_ray.py --smoke
	$(BIN)/python examples/train_dreambooth_lora.py --smoke

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "docs/_build/index.html"

# The wheel is installed where nothing else is but its dependencies, and has to do what the demo does. torch is most of
# the time that takes; CI builds and installs once.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python tools/check_dist.py dist

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

fix: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:
	rm -rf .demo .bench docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
