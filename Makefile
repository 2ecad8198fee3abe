# `make demo` and `make test` need nothing but Debian's Python 3.11, git and make: they build .venv themselves.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MEGATRON := $(VENV)/.ready-megatron
SGLANG := .venv-sglang/.ready
FOLDERS := data_prep experiments flows reports sdpo_core tasks
SOURCES := $(FOLDERS) sglang_plugin tests $(wildcard benchmarks)

# Nothing calls home, nothing looks for a model hub, and no library takes more threads than a worker asks for.
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export RAY_USAGE_STATS_ENABLED := 0
export RAY_SCHEDULER_EVENTS := 0
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:
.PHONY: demo test test-megatron test-sglang sglang-env check mutants secrets bench bench-megatron bench-peer bench-teacher lock clean

demo: $(READY)  ## train experiment e001 and write results/e001/results.md
	@$(BIN)/sdpo run e001

test: $(READY)  ## all tests but those of the extra and of SGLang; needs no network and no GPU
	@$(BIN)/python -m pytest -m 'not megatron and not sglang' tests

test-megatron: $(MEGATRON)  ## the tests of the extra: several processes a model, on a CPU; up to ten minutes
	@$(BIN)/python -m pytest -m megatron tests

test-sglang: $(READY) sglang-env  ## the tests that start an SGLang server, on a CPU; up to ten minutes
	@$(BIN)/python -m pytest -m sglang tests

sglang-env: $(SGLANG)  ## the environment of the SGLang server, apart from this one (docs/decisions/0010-sglang-apart.md)

check: $(READY)  ## lint, format, types, import directions
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy $(SOURCES)
	@$(BIN)/lint-imports

mutants: $(MEGATRON)  ## put known bugs into copies of the code: each must make a test fail
	@$(BIN)/python -m tests.mutants.run

secrets: $(READY)  ## no key or password in a tracked file
	@git ls-files -z | xargs -0 $(BIN)/detect-secrets-hook --no-verify --baseline .secrets.baseline

bench: $(READY)  ## time and memory of the losses, beside dense ones (docs/lab-log.md); an hour
	@$(BIN)/python -m benchmarks.loss

bench-peer: $(READY)  ## a step of GRPO and SDPO beside TRL's: CPU time and memory (docs/parity.md)
	@$(BIN)/python -m benchmarks.peer_trl

bench-teacher: $(READY) sglang-env  ## a served teacher's scores beside the trainer's own: payload and time (docs/lab-log.md)
	@$(BIN)/python -m benchmarks.served_teacher

bench-megatron: $(MEGATRON)  ## a step on Megatron-core's layouts beside one process: time and memory (docs/lab-log.md)
	@$(BIN)/python -m benchmarks.megatron

lock:  ## resolve pyproject.toml afresh and write requirements.lock
	@.ci/lock "$(PYTHON)"

clean:  ## remove what checks and builds leave behind; the store (.sdpo), results and .venv stay
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted installation starts again.
$(READY): requirements.lock pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
		echo 'Makefile: got "$(PYTHON)" ('"$$("$(PYTHON)" --version 2>&1)"'), expected Python 3.11.' \
			'Install it, or name it: make PYTHON=/path/to/python3.11' >&2; exit 2; }
	@echo 'Installing the locked packages into $(VENV) (about 2.4 GB, a few minutes)'
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/pip install -qq --requirement requirements.lock
	@$(BIN)/pip install -qq --no-deps --editable .
	@touch $@

# The lock constrains it: an extra that would move a locked pin is refused, not installed.
$(MEGATRON): $(READY)
	@$(BIN)/pip install -qq --constraint requirements.lock --editable '.[megatron]'
	@touch $@

$(SGLANG): requirements-sglang.lock .ci/sglang-env $(wildcard sglang_plugin/*.toml sglang_plugin/*/*.py sglang_plugin/*/*/*.py sglang_plugin/*/*/*/*.py)
	@.ci/sglang-env "$(PYTHON)"
