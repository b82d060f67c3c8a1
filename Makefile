# Everything from a bare clone: `make demo` and `make test` make the environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SAMPLE := tests/data/kimi-mini

.PHONY: demo test lint format clean

demo: $(VENV)/installed
	rm -rf build/demo
	@echo "\n== a checkpoint in Kimi K2.6's format =="
	$(BIN)/kconvert inspect $(SAMPLE)
	@echo "\n== compiled for two GPUs =="
	$(BIN)/kconvert convert $(SAMPLE) build/demo --tp 2
	$(BIN)/kconvert inspect build/demo
	@echo "\n== every code and scale compared with the source =="
	$(BIN)/kconvert validate build/demo --source $(SAMPLE)

test: lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[test,cuda]'
	touch $@

clean:
	rm -rf build $(VENV)
