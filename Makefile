# Two commands matter: `make demo` and `make test`. Both install into .venv first; nothing outside it is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# One more than the two cores of CI: tests wait for browsers, ranks and clocks.
WORKERS ?= 3

# Without an NVIDIA GPU the constraints keep gigabytes of CUDA libraries away; with one, pip takes the CUDA build.
HAS_GPU := $(shell { nvidia-smi -L || test -e /dev/nvidia0; } >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(HAS_GPU),,-c constraints-cpu.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format docs pytest wheel-check fuzz clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install nerfturbo with what the tests need (repeating it costs nothing)

# --no-compile: byte code is written on first import instead, for what is imported at all; that saves half a minute.
$(STAMP): EXTRAS := test,dev,docs
$(DEMO_STAMP): EXTRAS := video,viewer,mesh
$(STAMP) $(DEMO_STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("nerfturbo needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name a newer one: make PYTHON=python3.12 ..." % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing nerfturbo and torch ($(if $(HAS_GPU),CUDA,CPU) build) into $(VENV) ..."
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check $(CONSTRAINTS) -e ".[$(EXTRAS)]"
	@touch $@

# Where nothing is installed yet, only what the demo and the commands it prints need.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))  ## train the built-in scene, evaluate it on unseen views, write renders, a report and a web page into runs/demo
	$(BIN)/nerfturbo train --time-limit 40 --output runs/demo --overwrite
	$(BIN)/nerfturbo export web runs/demo runs/demo/scene.html --overwrite --tune-seconds 14

test: lint docs pytest wheel-check  ## everything CI checks (one part of the suite: make pytest ARGS="-k march")

lint: setup  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Files stay whole: what the tests of one share is made once.
pytest: setup  ## the test suite alone, in WORKERS processes; options go into ARGS
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

wheel-check: setup  ## build the wheel and use it in a clean environment outside the checkout
	scripts/wheel_check.sh $(BIN)/python

fuzz: setup  ## about 10,000 damaged files and odd flags, for hours; counts and failures go into fuzz.json
	$(BIN)/python tests/data/fuzz.py --mutations 300
	$(BIN)/python tests/fuzz/commands.py --count 5000 --jobs 2 --output fuzz.json

docs: setup  ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: setup  ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.NOTPARALLEL:
