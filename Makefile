# `make demo` and `make test` do all the set-up on a fresh machine; only Python and make are needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST  = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# Modules are compiled when they are first imported; of the thousands that are installed most never are.
QUIET   = --quiet --disable-pip-version-check --no-compile
# Tests start hundreds of processes: without files of byte code each compiles thousands of modules again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
# The packages that build ours are pinned too: by the first variable for pip before 25.3, by the second since.
INSTALL = PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/pip install $(QUIET)
KERNELS = tests/kernels tests/scan/kernels tests/fusion/test_kernels.py tests/memory/encode/test_byte_index_pool.py \
	tests/stream/execute/test_conv_epilogue.py

.PHONY: demo test test-all kernels keras mutants pins lint types docs wheel release clean bench-gpu

demo: $(VENV)/.demo
	$(BIN)/outcore demo

# What takes one core runs beside what takes another.
test: $(VENV)/.test
	$(MAKE) --jobs 3 lint types kernels keras
	$(PYTEST) --ignore=tests/keras -m "not slow and not gpu and not kernel"

# Every part of the suite, slow cases too; run again, it goes on where it stopped. A table in dist/test-all.md. Of the
# largest sweeps a quarter, another one with every commit; OUTCORE_SWEEPS=all runs them whole, for hours.
test-all: $(VENV)/.test
	$(BIN)/python -m tests.suite

# Triton's kernels on its interpreter, which runs them on a CPU.
kernels: $(VENV)/.test
	TRITON_INTERPRET=1 $(PYTEST) -m "kernel and not slow" $(KERNELS)

# TensorFlow has a process of its own: it takes seconds to import, and does not get along with every other library.
keras: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" tests/keras

# Which one-line defects the quick tests notice: a table in dist/mutants.md. An hour on one core.
mutants: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation

# The README's claims measured again on a GPU, a reduced set in ten minutes: claim, stored figure, today's.
BENCH  ?= dist/bench-gpu
bench-gpu: $(VENV)/.test
	$(BIN)/python -m benchmarks.claims --rerun $(BENCH)

# Raise the pins: the newest versions of everything that tests use, beside the torch that is pinned; then run the tests.
pins:
	rm -rf dist/pins && $(PYTHON) -m venv dist/pins
	grep -E '^(#|torch==|torchvision==|triton==)' constraints.txt > dist/pins/chosen.txt
	dist/pins/bin/pip install $(QUIET) -c dist/pins/chosen.txt '.[test]' hatchling editables
	( cat dist/pins/chosen.txt; dist/pins/bin/pip freeze --exclude outcore | sed 's/+cpu//' \
		| grep -vE '^(torch|torchvision|triton)==|^nvidia-|^cuda-| @ ' ) > constraints.txt
	rm -rf dist/pins

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
