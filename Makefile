# `make demo` and `make test` are the whole set-up: each makes .venv when it is not there.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all docs versions release-check workflows update check types fix bench bench-gpu bench-models fuzz

.venv/installed: pyproject.toml setup.py constraints.txt
	@echo "Installing torch, this package and what its tests need into .venv, once"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m hf_vit.demo --output demo_output

# Everything that proves a number, a file on disk, or what is left after a kill: about 15 minutes on two cores.
PROCESSES ?= 2
test: .venv/installed
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations 10 -m "not slow and not browser"

# And the rest: launchers, notebooks, pages, the installed wheel, compiled variants, a browser.
test-all: .venv/installed
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations 10

# The documentation site, into site/; a dead link is an error. To read it: python -m http.server --directory site
docs: .venv/installed
	$(BIN)/python docs/skill.py
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet --strict

# The wheel with each extra alone, the lowest and the newest versions, other Pythons: `make versions ROWS="lowest newest"`.
# New environments, one after the other; an hour for all.
ROWS ?=
versions:
	$(PYTHON) -m tests.packaging.versions $(ROWS)

.venv/release: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	touch $@

# What a release must pass; the files are in dist/. `make release-check RELEASE=v1.2.3` for a tag. GitHub runs the workflows itself.
RELEASE ?=
JOBS ?= ci docs
release-check: export TAG = $(RELEASE)
release-check: .venv/release
	$(BIN)/zizmor --offline .github
	$(BIN)/python -m tests.packaging.release --tag "$$TAG"
	$(if $(GITHUB_ACTIONS),,$(BIN)/python -m tests.packaging.workflows $(JOBS))

# The commands of GitHub's workflows, in a new clone: `make workflows JOBS="nightly/docs release"`.
workflows: .venv/installed
	$(BIN)/python -m tests.packaging.workflows $(JOBS)

# Each pin to its newest version: packages, developers' tools, GitHub's actions. Then what broke.
update: .venv/release
	$(BIN)/python -m tests.packaging.update
	$(MAKE) check test

# What is compared with others, and then what is not; each alone is `make bench-inference` and so on.
COMPARED := inference training_step loading
bench: $(COMPARED:%=bench-%) bench-convert

.venv/peers: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[benchmarks]'
	touch $@

$(COMPARED:%=bench-%): bench-%: .venv/peers
	$(BIN)/python benchmarks/$*.py --write

bench-models: .venv/installed
	$(BIN)/python benchmarks/models.py --write

bench-%: .venv/peers
	$(BIN)/python benchmarks/$*.py

# One GPU for 25 minutes, with a torch for it and what else is installed: `make bench-gpu GPU_PYTHON=python3 GPU_OPTIONS="--resume"`.
GPU_PYTHON ?= $(BIN)/python
GPU_OPTIONS ?=
bench-gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU_OPTIONS)

# Mutated inputs of a kind, or of all: `make fuzz KIND=npz N=10000 SEED=0`. Findings come into fuzz_findings/.
KIND ?= all
N ?= 1000
SEED ?= 0
fuzz: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --kind $(KIND) --count $(N) --seed $(SEED)

# Style of all files, and types of those that differ from BASE; `make types` has the types of all.
BASE ?= main
TYPED := 'hf_vit/*.py' 'conversion/*.py' 'training/*.py' 'benchmarks/*.py'
CHANGED = $(shell git diff --name-only --diff-filter=d $$(git merge-base HEAD $(BASE)) -- $(TYPED) && \
	git ls-files --others --exclude-standard -- $(TYPED))
check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CHANGED),$(BIN)/pyright $(CHANGED))

types: .venv/installed
	$(BIN)/pyright

fix: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
