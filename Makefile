# `make demo` and `make test` do all the set-up on a fresh machine; only Python and make are needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST  = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint types docs wheel release clean

demo: $(VENV)/.demo
	$(BIN)/outcore demo

test: lint types
	$(PYTEST) -m "not slow and not gpu"

test-all: $(VENV)/.test
	$(PYTEST) -m "not gpu"

lint: $(VENV)/.test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

docs: $(VENV)/.test
	$(INSTALL) --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet --site-dir dist/site

wheel: $(VENV)/.test
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

release:
	packaging/release.sh dist

# Stamps: an environment is installed again only when what it was made from changed.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(INSTALL) torch numpy
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(INSTALL) --editable '.[slides]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache
