# Everything from a bare clone: `make demo` and `make test` make the environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TINY := tests/tiny_kimi

.PHONY: demo test lint format clean

demo: $(VENV)/installed
	rm -rf build/demo
	@echo "\n== a small trained checkpoint in Kimi K2.6's format =="
	$(BIN)/kconvert inspect $(TINY)/model
	@echo "\n== compiled for two GPUs, and every code and scale compared with the source =="
	$(BIN)/kconvert convert $(TINY)/model build/demo/two --tp 2
	$(BIN)/kconvert inspect build/demo/two
	$(BIN)/kconvert validate build/demo/two --source $(TINY)/model
	@echo "\n== compiled for one, and run with its drafter: draft trees, compared with plain decoding =="
	$(BIN)/kconvert convert $(TINY)/model build/demo/one
	$(BIN)/kconvert smoke-generate build/demo/one --drafter $(TINY)/drafter --budget 16 \
	  --prompt "And it came to pass in the days of" --max-new-tokens 96 --check-exact

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
	$(BIN)/pip install -q -c constraints.txt -e '.[hub,test,cuda]'
	touch $@

clean:
	rm -rf build $(VENV)
