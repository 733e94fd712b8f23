# Everything a newcomer needs; each target prepares what it depends on. Needs Python 3.10-3.13 and PyPI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests run in one process per core, so one thread each: two threads on a busy core are many times slower.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --dist loadgroup

# What `make bench` hands to every bench: small shapes, few questions. `make bench BENCH=` measures all that fits.
BENCH ?= --quick

.DEFAULT_GOAL := help
.PHONY: help install demo bench test test-slow quality format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## make .venv and install the project with what it needs

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation \
		"deepspeed; platform_system == 'Linux'"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plots]'
	touch $(STAMP)

demo: install ## train Medusa heads for the embedded backbone, then measure the speedup (6 minutes on two cores)
	$(BIN)/medusa-train configs/tiny_m1.yaml output_dir=runs/demo overwrite_output_dir=true
	$(BIN)/medusa-eval --bench tiny --model runs/demo --limit 24

bench: install ## measure decoding, training and peers on this machine (BENCH= for everything: hours)
	$(BIN)/python benchmarks/decode.py $(BENCH)
	$(BIN)/python benchmarks/train.py $(BENCH) --parts loss step shape7b
	@if ls runs/*/heads/medusa_lm_head.safetensors >/dev/null 2>&1; then $(BIN)/python benchmarks/peers.py $(BENCH); \
	else echo "peers.py: skipped, there is no trained run here yet (make demo)"; fi

test: install ## run the tests
	$(PYTEST) -m "not slow"

test-slow: install ## run the tests that take minutes
	$(PYTEST) -m slow

quality: install ## ruff, mypy and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## format with ruff and apply its fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build output, keep .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +
