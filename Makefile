# README's two commands are `make train` and `make test`; each sets up .venv on first use.
.DEFAULT_GOAL := help
.PHONY: help setup train test lint docs bench numerics faults mutants census golden constraints

# ARGS goes to the program, as in `make test ARGS='-k permute'`. EXTRA=cuda13 (or cuda12) installs JAX for
# GPUs. ci/matrix.py sets the others, for venvs of other versions of JAX and Triton; UNPINNED
# is a pattern of names whose pins do not count there, and ALONE is installed without what it needs.
ARGS :=
EXTRA :=
VENV := .venv
JAX :=
TRITON :=
UNPINNED :=
GROUP := dev
WITH :=
ALONE :=

BIN := $(VENV)/bin
UV := $(BIN)/python -m uv pip
PROJECTS := packages/core packages/ep packages/flax_moe packages/train
EDITABLE := -e packages/core$(EXTRA:%=[%]) -e packages/ep -e packages/flax_moe -e packages/train
# What the packages' extensions are built from.
NATIVE := $(wildcard $(PROJECTS:%=%/setup.py) $(patsubst %,packages/*/src/expertmesh/*/_native/%,build.py *.cc *.h))
PINS := $(VENV)/constraints.txt
JAX_NAMES := jax\|jaxlib\|jax-cuda1[23]-plugin\|jax-cuda1[23]-pjrt
DONE := $(VENV)/.done$(EXTRA:%=-%)

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*##/make \1:/p' Makefile

$(DONE): ci/constraints.txt pyproject.toml $(PROJECTS:%=%/pyproject.toml) $(NATIVE)
	test -x $(BIN)/python || { python=$$(ci/find-python) && "$$python" -m venv $(VENV); }
	@# Another JAX takes whatever NCCL is newest: 0.12 calls what 2.28 lacks.
	sed -e '$(if $(JAX),s/^\($(JAX_NAMES)\)==[^ ]*/\1==$(JAX)/;/^nvidia-nccl-cu1[23]==/d)' -e '$(if $(TRITON),s/^triton==[^ ]*/triton==$(TRITON)/)' \
	  -e '$(if $(UNPINNED),/^\($(UNPINNED)\)==/d)' ci/constraints.txt > $(PINS)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(PINS) uv
	@# Compiled once, not by each of the tests' processes where PYTHONDONTWRITEBYTECODE is set.
	@# Packages are built on the oldest jaxlib's headers, whatever JAX is.
	$(UV) install -q --compile-bytecode --python $(BIN)/python -c $(PINS) -b ci/constraints.txt \
	  $(EDITABLE) --group $(GROUP) $(WITH)
	$(if $(ALONE),$(UV) install -q --no-deps --python $(BIN)/python $(ALONE))
	touch $@

setup: $(DONE)  ## create .venv

train: $(DONE)  ## the main job: train a small byte-level MoE language model
	$(BIN)/python -m expertmesh.train $(ARGS)

test: $(DONE)  ## run every CPU test
	@# A file's tests share what is traced and compiled, so one worker has them all.
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(DONE)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DONE)  ## build docs/_build/html and check its links; DOCS_ONLINE=1 links other libraries' types
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

bench: $(DONE)  ## run every benchmark; JSON into runs/bench/
	$(BIN)/python -m benchmarks $(ARGS)

numerics: $(DONE)  ## train under each recipe, hours on few cores; results into docs/
	JAX_PLATFORMS=cpu $(BIN)/python docs/training_curves.py $(ARGS)

faults: $(DONE)  ## plant each fault of tests/faults/table.toml and demand a red test
	$(BIN)/python tests/faults/run.py $(ARGS)

mutants: $(DONE)  ## test the mutants of the pure modules; print those that survive without a reason
	$(BIN)/python tests/mutants/run.py $(ARGS)

census: $(DONE)  ## write the table of what each op moves between devices; ARGS=--check only compares
	$(BIN)/python tests/census.py $(ARGS)

golden: $(DONE)  ## ARGS=record: keep the bits of all results in runs/golden; ARGS=compare: what differs now
	$(BIN)/python tests/golden.py $(ARGS)

constraints: $(DONE)  ## write ci/constraints.txt again, from ci/pins.in; ARGS=--upgrade: and what is newest
	cp ci/constraints.txt ci/constraints.tmp
	$(UV) compile -q --universal --python-version 3.12 --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	  --group dev --extra cuda12 --extra cuda13 pyproject.toml -c ci/pins.in -o ci/constraints.tmp $(ARGS)
	grep -v '^-e ' ci/constraints.tmp > ci/constraints.txt
	rm ci/constraints.tmp
