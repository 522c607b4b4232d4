# Every target sets up what it needs: an environment, an editable install, the embedded target.
#
#   make demo        sweep the embedded pair, draw the figures, write the report
#   make test        lint and the fast tests           make test-slow  embedded pair, notebooks, browser
#   make lab         JupyterLab on notebooks/          make report     report of RUN again
#   make format      puts right what lint finds        make clean      throws caches away
#   make tiny-pair   trains data/tiny_pair again (minutes; the repository has it)
#
# PYTHON makes the environment (when VENV is new), VENV is where it lives, TORCH is installed before
# the package: a looser range than this one may fetch a CUDA build of many gigabytes. TORCH may hold
# options as well, as in TORCH="torch==2.13.0 --index-url URL".

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
RUN ?= results/demo
# What tests compare drafts with. Its own dependencies are for its other parts, so it comes without.
UPSTREAM = dflash==0.1.0

BIN = $(VENV)/bin
READY = $(VENV)/.installed
PAIR = smollm2

# Through the environment and not into the text of a recipe, where ">=" would redirect to a file.
export TORCH_WANTED := $(TORCH)

# The stamp names the clone that is installed. Where that is another one, where the environment's
# Python is gone, or where TORCH is given, the install runs again; a torch that is there already
# stays unless another is given.
INSTALLED := $(shell $(BIN)/python -c "" 2>/dev/null && cat $(READY) 2>/dev/null)
ifneq ($(INSTALLED),$(CURDIR))
$(READY): again
endif
ifeq ($(origin TORCH),file)
KEEP_TORCH = $(BIN)/python -m pip show --quiet torch 2>/dev/null ||
else
KEEP_TORCH =
$(READY): again
endif

.PHONY: again setup pair demo test test-slow test-thorough lint format lab report tiny-pair clean

setup: $(READY)

# A half-made environment has no working pip: only then, and only if it is one, is it thrown away.
$(READY): pyproject.toml
	@rm -f $(READY)
	@if test -f $(VENV)/pyvenv.cfg && ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "$(VENV) is damaged: making it again"; rm -rf $(VENV); fi
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(KEEP_TORCH) { set -f; $(BIN)/python -m pip install $$TORCH_WANTED; }
	$(BIN)/python -m pip install -e ".[dev]"
	$(BIN)/python -m pip install --no-deps $(UPSTREAM)
	@echo "$(CURDIR)" > $(READY)

pair: $(READY)
	$(BIN)/dflash-lab pair $(PAIR)

demo: pair
	$(BIN)/dflash-lab demo

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m nbstripout --verify --keep-id notebooks/*.ipynb

format: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/python -m nbstripout --keep-id notebooks/*.ipynb

test: lint pair
	$(BIN)/python -m pytest -m "not slow and not thorough" -n auto --dist loadfile

test-slow: pair
	$(BIN)/python -m pytest -m "slow and not thorough" -n auto --dist loadfile

test-thorough: pair
	$(BIN)/python -m pytest -m thorough

lab: pair
	$(BIN)/python -m jupyterlab notebooks

report: $(READY)
	$(BIN)/dflash-lab report $(RUN)

tiny-pair: $(READY)
	$(BIN)/python -m dflash_lab.train.tiny --out data/tiny_pair

clean:
	rm -rf build dist .pytest_cache .ruff_cache
	find dflash_lab notebooks -name __pycache__ -prune -exec rm -rf {} +
	find notebooks -name .ipynb_checkpoints -prune -exec rm -rf {} +
