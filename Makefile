# Two commands set everything up: `make demo` and `make test`. Both create .venv when it is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint type bench notebooks soak mutants calibrate calibrate-all slow cluster gpu gpus smollm2 peers evals pictures docs clean

demo: $(STAMP)
	$(BIN)/replaylens demo

# Types are checked beside the tests; modules and kernels are compiled once for the tests' many processes. Explaining assertions
# takes 25 s of every process: only tests that fail run again with it.
test: $(STAMP) lint
	$(BIN)/mypy & types=$$!; unset PYTHONDONTWRITEBYTECODE; \
	$(BIN)/python -c 'import replaylens.kernels.cpu_attention'; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --assert=plain; \
	tests=$$?; test $$tests -ne 1 || $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none; \
	wait $$types || { echo 'mypy failed: see its errors above'; exit 1; }; exit $$tests

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,notebooks,cluster,docs]"
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m bench run branches-cpu generate-cpu hostwork-cpu dump-cpu feed-cpu probes-cpu thinking-cpu \
	  gradients-cpu

notebooks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/build.py

soak: $(STAMP)
	$(BIN)/python -m bench.soak --operations $(or $(OPERATIONS),100000) --seed $(or $(SEED),0)

mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.mutants --jobs 2

calibrate: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.calibrate_verbs --rows coin-plain
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.calibrate_verbs --page

calibrate-all: calibrate
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.calibrate
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.calibrate_forks

slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow

cluster: $(STAMP)
	$(BIN)/python -m pytest -q -m slow tests/extras/test_real_cluster.py tests/probes/sweeps/test_sweep.py -k "real_cluster or ray"

gpu: $(STAMP)
	$(BIN)/python -m tests.gpu.run

gpus: $(STAMP)  # compiles every kernel in every tile for GPUs that are not here; needs none
	OMP_NUM_THREADS=1 $(BIN)/python -m bench gpus

smollm2: $(STAMP)
	$(BIN)/replaylens fetch smollm2
	$(BIN)/python -m pytest -q -m slow tests/weights/test_smollm2.py tests/notebooks
	$(BIN)/python docs/examples/smollm2.py dumps/smollm2

peers: $(STAMP)  # other projects' own tests on our values; downloads their source packages once, and writes bench/peers/README.md
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.peers

# Inspect, lm-eval and lmprobe ask for older versions than the pinned ones: an environment of their own, with the same torch
evals: .venv-evals/.installed
	OMP_NUM_THREADS=1 .venv-evals/bin/python -m pytest -q tests/extras -m "slow or not slow"

.venv-evals/.installed: pyproject.toml constraints.txt
	test -x .venv-evals/bin/python || $(PYTHON) -m venv .venv-evals
	grep -E '^(torch|transformers|tokenizers|numpy|numba|llvmlite|safetensors)==' constraints.txt > .venv-evals/constraints.txt
	.venv-evals/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-evals/constraints.txt -e ".[eval]" pytest
	.venv-evals/bin/python -m pip install --quiet --disable-pip-version-check --no-deps lmprobe
	touch $@

pictures: $(STAMP)
	$(BIN)/python docs/img/draw.py
	$(BIN)/python docs/img/living_tree.py

docs: $(STAMP)  # into site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .venv-evals .pytest_cache .mypy_cache .ruff_cache
