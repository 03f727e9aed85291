# Two commands are enough on a fresh machine: `make serve` and `make test`.
#
#   make serve ACCEL=cuda13 ARGS="--model mlx-community/Qwen3-0.6B-4bit --port 9000"
#
# ACCEL: cpu (default), cuda12 or cuda13 on Linux; a Mac always takes Metal.
# ARGS: flags for serve, bench and pytest.

ARGS ?=
SYSTEM := $(shell uname -s)

ifeq ($(SYSTEM),Darwin)
ACCEL := metal
PLATFORM := darwin
else
ACCEL ?= cpu
PLATFORM := linux-$(ACCEL)
endif

# MLX's builds overwrite each other's files, so each has an environment of its own.
VENV := $(if $(filter cpu metal,$(ACCEL)),.venv,.venv-$(ACCEL))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# An installation is known by the checksum of what it was made from.
RUNTIME_FILES := $(wildcard requirements/base.txt requirements/build.txt requirements/$(PLATFORM).txt) pyproject.toml
DEV_FILES := $(RUNTIME_FILES) requirements/dev.txt
checksum = $(firstword $(shell cat $(1) | cksum))
RUNTIME_STAMP := $(VENV)/.runtime-$(PLATFORM)-$(call checksum,$(RUNTIME_FILES))
DEV_STAMP := $(VENV)/.dev-$(PLATFORM)-$(call checksum,$(DEV_FILES))

# The newest Python that has a wheel of every pinned package is 3.14. On a Mac a Python for Intel,
# which Rosetta runs, finds no wheel of MLX, and macOS before 14 neither.
SUITABLE := import platform, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14)$(if \
	$(filter Darwin,$(SYSTEM)), or platform.machine() != "arm64"))
SUITABLE_NAME := Python 3.11 to 3.14$(if $(filter Darwin,$(SYSTEM)), for Apple Silicon (arm64; Rosetta cannot run MLX))
MACOS := $(if $(filter Darwin,$(SYSTEM)),$(shell sw_vers -productVersion))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$python -c '$(SUITABLE)' 2>/dev/null && { echo $$python; break; }; done)

# These end when make does, however that ends; `exec`, so that no shell is between them and make.
WITH_MAKE := $(BIN)/python -m mlx_parallm.peers.child_process parent

.PHONY: help serve test test-slow test-engines test-dialled test-ranks page-test conformance agents trainers scale-out corpus corpus-sample newest check-encoder check-seq2seq check-mezo check-reward check-speech check-vision cluster-check lint checks format unit dist bench doctor docs check-pins hooks venv clean
.DEFAULT_GOAL := help

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

# Without a choice of models, the demonstration models that chat and that see are served.
DEMOS := $(if $(ARGS)$(MLX_PARALLM_MODEL)$(MLX_PARALLM_CONFIG),,mlx-parallm-demo demo:see)
serve: $(RUNTIME_STAMP) ## Serve a model on 127.0.0.1:8000 (ARGS="--model … --port …")
	@$(BIN)/python -m mlx_parallm serve $(DEMOS) $(ARGS)

# Files are shared out whole, since the tests of one share its servers. The many processes that
# tests start share bytecode, even where none is to be written otherwise. Long files come first.
# One more worker than the 2 cores of a small machine: tests of servers wait for those.
WORKERS ?= 3
TEST_ENV := exec env PYTHONDONTWRITEBYTECODE=
PYTEST := $(WITH_MAKE) pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: checks ## Lint, layers, language and the tests, but those of the next two targets
	@$(TEST_ENV) $(PYTEST) -m "not engines and not slow" $(ARGS)

test-slow: $(DEV_STAMP) ## Types and the tests marked slow: kernels, kills and restarts, long random histories
	@$(TEST_ENV) $(PYTEST) -m "slow and not engines" --ignore tests/scaleout $(ARGS)

# Suites that hold for any number of engines and of HTTP processes.
ENGINE_SUITES := abort api_answers batches cache_scope client_adapters embeddings encoder_decoders encoder_routes \
	in_flight keys late_interaction live_adapters live_nets live_weights logprobs mezo mezo_prompts mezo_requests mezo_reward min_tokens mixed_models mlm \
	model_loading models_by_name images ollama open_inference prompt_embeds responses_live rewarded_rollouts rl_logprobs rollout scores serve \
	sglang speculation speech structured token_generate tools
test-engines: $(DEV_STAMP) ## Tests of adapters, weights, rollouts and more against two engines and two HTTP processes
	@$(TEST_ENV) MLX_PARALLM_DATA_PARALLEL_SIZE=2 MLX_PARALLM_API_SERVER_COUNT=2 $(PYTEST) -m "not one_engine" \
		tests/e2e/test_data_parallel.py tests/e2e/test_llm_data_parallel.py \
		tests/e2e/test_api_servers.py tests/e2e/test_batch.py tests/e2e/test_art_serving.py tests/e2e/test_models_by_name_killed.py tests/e2e/test_dialled_engines.py $(ENGINE_SUITES:%=tests/e2e/test_%.py) $(ARGS)

# Suites that hold for engines of other machines.
DIALLED_SUITES := abort api_answers client_adapters embeddings live_adapters live_weights logprobs mixed_models model_loading \
	rl_logprobs rollout serve sglang structured token_generate tools
test-dialled: $(DEV_STAMP) ## Tests of adapters, weights, rollouts and more against two engines that are dialled
	@$(TEST_ENV) MLX_PARALLM_TEST_DIALLED=2 $(PYTEST) -m "not one_engine" \
		tests/e2e/test_dialled_engines.py $(DIALLED_SUITES:%=tests/e2e/test_%.py) $(ARGS)

# Suites that hold for a model over ranks.
RANK_SUITES := abort api_answers live_adapters live_weights logprobs prompt_embeds rl_logprobs rollout \
	sglang speculation structured token_generate tools
test-ranks: $(DEV_STAMP) ## Tests of clients, adapters, weights and rollouts against a model over two ranks
	@$(TEST_ENV) MLX_PARALLM_TEST_RANKS=2 $(PYTEST) \
		$(RANK_SUITES:%=tests/e2e/test_%.py) $(ARGS)

unit: $(DEV_STAMP) ## The fast tests only
	@exec $(WITH_MAKE) pytest tests/unit $(ARGS)

page-test: $(RUNTIME_STAMP) ## The page at / in Chromium (needs Node and Chromium)
	@cd tests/page && npm ci --no-audit --no-fund && \
		exec env PYTHON="$(abspath $(BIN)/python)" \
		$(abspath $(BIN)/python) -m mlx_parallm.peers.child_process parent -- npm test

# Clients that nothing else here needs; instructor wants an older OpenAI client than the others,
# langchain's package for Hugging Face an older client of the hub, and KServe's an older protobuf.
CLIENTS := .venv-clients
INSTRUCTOR := .venv-instructor
LANGCHAIN := .venv-langchain
INFERENCE := .venv-inference
CLIENTS_STAMP := $(CLIENTS)/.installed-$(call checksum,requirements/conformance.txt)
INSTRUCTOR_STAMP := $(INSTRUCTOR)/.installed-$(call checksum,requirements/conformance-instructor.txt)
LANGCHAIN_STAMP := $(LANGCHAIN)/.installed-$(call checksum,requirements/conformance-langchain.txt)
INFERENCE_STAMP := $(INFERENCE)/.installed-$(call checksum,requirements/conformance-inference.txt)

conformance: $(DEV_STAMP) $(CLIENTS_STAMP) $(INSTRUCTOR_STAMP) $(LANGCHAIN_STAMP) $(INFERENCE_STAMP) ## Unmodified clients against a live server; rewrites docs/compatibility.md (needs Node)
	@cd tests/conformance/node && npm ci --no-audit --no-fund
	@exec $(WITH_MAKE) tests.conformance.run_all $(ARGS)

agents: $(DEV_STAMP) ## Claude Code, Codex and opencode with a model of a live server (needs Node; 900 MB)
	@cd tests/agents && npm install --no-package-lock --no-audit --no-fund
	@$(TEST_ENV) $(PYTEST) -m slow tests/agents $(ARGS)

# Reinforcement-learning trainers; ART needs Python 3.12 and another client of OpenAI than the others.
TRAINERS := .venv-trainers
ART := .venv-art
TRAINERS_STAMP := $(TRAINERS)/.installed-$(call checksum,requirements/trainers.txt)
ART_STAMP := $(ART)/.installed-$(call checksum,requirements/trainers-art.txt)
ART_SUITABLE := import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))
ART_PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.14; do \
	$$python -c '$(ART_SUITABLE)' 2>/dev/null && { echo $$python; break; }; done)

trainers: $(DEV_STAMP) $(TRAINERS_STAMP) $(ART_STAMP) ## Trainers' own clients against a live server; rewrites their part of docs/compatibility.md
	@exec $(WITH_MAKE) tests.trainers.run_all $(ARGS)

# SGLang's router; nginx and HAProxy are packages of the system.
BALANCERS := .venv-scale-out
BALANCERS_STAMP := $(BALANCERS)/.installed-$(call checksum,requirements/scale-out.txt)

scale-out: $(DEV_STAMP) $(BALANCERS_STAMP) ## nginx, HAProxy and SGLang's router before two servers; those that are not installed are skipped
	@$(TEST_ENV) $(PYTEST) -m slow tests/scaleout $(ARGS)

# Libraries that save folders, with torch.
CORPUS := .venv-corpus
CORPUS_STAMP := $(CORPUS)/.installed-$(call checksum,requirements/corpus.txt)

corpus: $(DEV_STAMP) $(CORPUS_STAMP) ## Templates, parsers' tests and folders of others; rewrites their part of docs/compatibility.md
	@exec $(WITH_MAKE) tests.corpus.run_all $(ARGS)

corpus-sample: $(DEV_STAMP) ## The part of it that needs no torch, in a minute
	@exec $(WITH_MAKE) tests.corpus.run_all --sample $(ARGS)

# Beyond the bounds of pyproject.toml, so pip says what conflicts.
NEWEST := .venv-newest
newest: $(DEV_STAMP) ## The newest mlx, mlx-lm and transformers: architectures, parity, adapters; what broke goes to docs/compatibility.md
	@rm -rf $(NEWEST) && $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/$(PLATFORM).txt -r requirements/dev.txt
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade mlx $(if $(filter linux-cpu,$(PLATFORM)),mlx-cpu) mlx-lm transformers
	@exec $(WITH_MAKE) tests.corpus.newest $(ARGS)

# sentence-transformers needs torch, which nothing else here does.
PEER := .venv-sentence-transformers
PEER_STAMP := $(PEER)/.installed-$(call checksum,requirements/check-encoder.txt)

check-encoder: $(DEV_STAMP) $(PEER_STAMP) ## An embedder against sentence-transformers (MODEL=folder)
	@PYTHONPATH=. $(BIN)/python -m mlx_parallm.process_setup.openblas scripts.check_encoder "$(MODEL)" --peer $(PEER)/bin/python

check-seq2seq: $(DEV_STAMP) $(PEER_STAMP) ## An encoder-decoder against transformers (MODEL=folder ARGS="--tgt-lang …")
	@PYTHONPATH=. $(BIN)/python -m mlx_parallm.process_setup.openblas scripts.check_seq2seq "$(MODEL)" --peer $(PEER)/bin/python $(ARGS)

check-mezo: $(DEV_STAMP) ## Learning curves of an encoder (MODEL=folder DATA=file ARGS="--steps …"; PAPER=1: the authors' protocol)
	@PYTHONPATH=. $(BIN)/python -m benchmarks.$(if $(PAPER),mezo_paper,check_mezo) --model "$(MODEL)" --data "$(DATA)" $(ARGS)

check-reward: $(DEV_STAMP) ## A reward model from an encoder and labelled texts (MODEL=folder DATA=file ARGS="--steps …")
	@PYTHONPATH=. $(BIN)/python -m mlx_parallm.process_setup.openblas benchmarks.check_reward --model "$(MODEL)" --data "$(DATA)" $(ARGS)

check-speech: $(DEV_STAMP) ## The word error rate of a speech model (MODEL=folder DATA=folder ARGS="--language …")
	@PYTHONPATH=. $(BIN)/python -m benchmarks.check_speech --model "$(MODEL)" --data "$(DATA)" $(ARGS)

check-vision: $(DEV_STAMP) ## Images against transformers (MODEL=folder ARGS="--reference-python PYTHON")
	@PYTHONPATH=. $(BIN)/python -m benchmarks.check_vision --model "$(MODEL)" $(ARGS)

cluster-check: $(DEV_STAMP) ## Ranks on your machines: exact answers, faults, latency (HOSTS=hosts.json MODEL=folder)
	@test -n "$(HOSTS)" || { echo "Name a hostfile of mlx.launch: make cluster-check HOSTS=hosts.json" >&2; exit 2; }
	@PYTHONPATH=. $(BIN)/python -m benchmarks.check_cluster --hosts "$(HOSTS)" $(if $(MODEL),--model "$(MODEL)") $(ARGS)

lint: checks ## ruff, pyright, import layers, language, Dockerfile
	$(BIN)/pyright --pythonpath $(BIN)/python

checks: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_language.py
	$(BIN)/hadolint Dockerfile

format: $(DEV_STAMP) ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel is built from the sdist, so that neither lacks a file.
dist: $(RUNTIME_STAMP) ## A wheel and an sdist in dist/
	@rm -rf dist && $(BIN)/python -m hatchling build -t sdist
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-index --no-deps --no-build-isolation -w dist dist/*.tar.gz
	@ls -l dist

bench: $(DEV_STAMP) ## Load a running server (ARGS="--base-url http://127.0.0.1:8000 …")
	@$(BIN)/python -m mlx_parallm bench serve $(ARGS)

doctor: $(RUNTIME_STAMP) ## Backend, BLAS, versions and advice
	@$(BIN)/python -m mlx_parallm doctor $(ARGS)

docs: $(DEV_STAMP) ## Rewrite docs/configuration.md from the settings, docs/api-reference.md from the API, docs/python.md, the Homebrew formula
	PYTHONPATH=. $(BIN)/python scripts/write_configuration_docs.py
	PYTHONPATH=. $(BIN)/python scripts/write_api_reference.py
	PYTHONPATH=. $(BIN)/python scripts/write_python_docs.py
	PYTHONPATH=. $(BIN)/python scripts/write_homebrew_formula.py

check-pins: $(DEV_STAMP) ## Every pinned version exists for the Mac and for Linux
	$(BIN)/python scripts/check_pins.py

hooks: $(DEV_STAMP) ## Install the git hooks
	$(BIN)/pre-commit install --hook-type pre-commit --hook-type pre-push

venv: $(DEV_STAMP) ## Create the environment with everything in it

clean: ## Remove the environments and caches
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@test -f requirements/$(PLATFORM).txt || { echo "ACCEL=$(ACCEL) is unknown; use cpu, cuda12 or cuda13." >&2; exit 2; }
	@case "$(MACOS)" in [1-9].*|1[0-3]|1[0-3].*) echo "macOS 14 or newer is needed, and this is macOS $(MACOS): MLX has no wheel for it." >&2; exit 2;; esac
	@test -n "$(PYTHON)" || { echo "$(SUITABLE_NAME) is needed and was not found; name one: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(PYTHON) -c '$(SUITABLE)' || { echo "$(SUITABLE_NAME) is needed; $(PYTHON) is another one." >&2; exit 2; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "The venv module does not work; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

$(RUNTIME_STAMP): $(VENV)/bin/python
	@echo "Installing the pinned packages for $(PLATFORM)"
	@$(PIP) -r requirements/$(PLATFORM).txt -r requirements/build.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.runtime-* && touch $@

$(CLIENTS_STAMP): requirements/conformance.txt
	@echo "Installing the clients"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@rm -f $(CLIENTS)/.installed-* && touch $@

$(INSTRUCTOR_STAMP): requirements/conformance-instructor.txt
	@$(PYTHON) -m venv $(INSTRUCTOR)
	@$(INSTRUCTOR)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@rm -f $(INSTRUCTOR)/.installed-* && touch $@

$(LANGCHAIN_STAMP): requirements/conformance-langchain.txt
	@$(PYTHON) -m venv $(LANGCHAIN)
	@$(LANGCHAIN)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@rm -f $(LANGCHAIN)/.installed-* && touch $@

$(INFERENCE_STAMP): requirements/conformance-inference.txt
	@$(PYTHON) -m venv $(INFERENCE)
	@$(INFERENCE)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@rm -f $(INFERENCE)/.installed-* && touch $@

$(TRAINERS_STAMP): requirements/trainers.txt
	@echo "Installing the trainers"
	@$(PYTHON) -m venv $(TRAINERS)
	@$(TRAINERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@rm -f $(TRAINERS)/.installed-* && touch $@

$(ART_STAMP): requirements/trainers-art.txt
	@test -n "$(ART_PYTHON)" || { echo "ART needs Python 3.12 to 3.14; name one: make trainers ART_PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(ART_PYTHON) -m venv $(ART)
	@$(ART)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@rm -f $(ART)/.installed-* && touch $@

$(BALANCERS_STAMP): requirements/scale-out.txt
	@echo "Installing SGLang's router"
	@$(PYTHON) -m venv $(BALANCERS)
	@$(BALANCERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@rm -f $(BALANCERS)/.installed-* && touch $@

$(CORPUS_STAMP): requirements/corpus.txt
	@echo "Installing the libraries that save folders"
	@$(PYTHON) -m venv $(CORPUS)
	@$(CORPUS)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@rm -f $(CORPUS)/.installed-* && touch $@

$(PEER_STAMP): requirements/check-encoder.txt
	@echo "Installing sentence-transformers"
	@$(PYTHON) -m venv $(PEER)
	@$(PEER)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@rm -f $(PEER)/.installed-* && touch $@

$(DEV_STAMP): $(RUNTIME_STAMP)
	@echo "Installing the pinned development packages"
	@$(PIP) -r requirements/$(PLATFORM).txt -r requirements/dev.txt
	@rm -f $(VENV)/.dev-* && touch $@
