# Two commands: `make demo` (a real training run, minutes) and `make test`. Both create .venv and install into it on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test test-slow lint benchmarks clean
.DEFAULT_GOAL := demo

demo: $(INSTALLED)
	@echo "== The embedded corpus: this Python's own standard library, tokenised (done once)"
	$(BIN)/depthbench data prepare embedded --size nano
	@echo "== The main job: Pre-LN at aspect ratio 32"
	$(BIN)/depthbench fit --arch pre_ln --ratio 32
	@echo
	@echo "Where to look next:"
	@echo "  $(BIN)/depthbench app                             your runs in a browser"
	@echo "  $(BIN)/depthbench shapes                          the ladder of shapes at this budget"
	@echo "  $(BIN)/depthbench fit --arch pre_ln --ratio 8     the same budget, deeper: does it pay?"

test: $(INSTALLED)
	@echo "== Tests that fit into a few minutes (make test-slow holds the rest)"
	$(PYTEST) -n 2 --dist loadgroup -m "not slow"

test-slow: $(INSTALLED)
	@echo "== Tests that are too long for every change"
	$(PYTEST) -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "depthbench needs Python 3.11 or newer, and '$(PYTHON)' is not: make PYTHON=/path/to/python3.11 ..."; exit 2; }
	@echo "== Installing depthbench and what it needs into $(VENV) (some minutes: PyTorch is large)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
