# Everything from a bare checkout: `make test` needs Python 3.11 to 3.13, a C compiler and pip's index.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo $$python; break; }; done)
BIN := .venv/bin
# The environment is made again when what it is made from changes, whatever the files' dates say.
INPUTS := pyproject.toml edgelm/__init__.py packaging/llama_wheel.py packaging/environment.sh
READY := .venv/ready-$(shell cat $(INPUTS) | cksum | tr ' ' '-')
# Threads of OpenMP that wait do not spin: tests run beside each other, and beside other work.
export OMP_WAIT_POLICY ?= passive
# What only computes runs on all cores, a file on each; what measures patience (signals, sockets, screens) runs alone, and
# first: what libraries print when its process ends would follow the summary.
PATIENT := tests/commands tests/server tests/tui
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null | awk '{ print ($$1 > 4) ? 4 : $$1 }')
export OMP_NUM_THREADS ?= 1
ARGS ?=
MODEL ?=

.PHONY: help chat test soak lint format smoke bench wheel clean

help: ## Show what there is
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

chat: $(READY) ## Chat with the built-in model in this terminal
	@$(BIN)/edgelm $(ARGS)

test: $(READY) ## Run the tests; ARGS="-k scheduler" for some of them
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest --cov --cov-report= $(PATIENT)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --cov --cov-append --cov-report=term:skip-covered \
		$(addprefix --ignore=,$(PATIENT))
else
	$(BIN)/python -m pytest $(ARGS)
endif

soak: $(READY) ## Run the same tests with the big counts; the output goes to docs/results/
	packaging/soak.sh $(ARGS)

lint: $(READY) ## Check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p edgelm
	$(BIN)/mypy --strict packaging/llama_wheel.py packaging/smoke.py
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

clean: ## Remove what was built here; the wheel of llama.cpp stays in its cache
	rm -rf .venv build dist *.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find edgelm kernels models tui tests packaging -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY):
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 to 3.13 with ensurepip; name one: make PYTHON=..." >&2; exit 1; }
	@packaging/environment.sh "$(PYTHON)"
	@touch $@
