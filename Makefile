# `make demo` and `make test` are the whole set-up: each makes .venv when it is not there.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check fix

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m hf_vit.demo --output demo_output

test: .venv/installed
	$(BIN)/python -m pytest --numprocesses 2

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

fix: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
