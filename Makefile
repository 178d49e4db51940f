# fedsilo: make run trains and prints its table; make test sets up and passes the tests.
# The virtual environment lies outside the tree, keyed by pyproject.toml and, but for 3.11, by Python's
# version, and is shared by checkouts:
# it holds the dependencies only, the code comes from this folder. TORCH=cpu (or cu126, ...) takes
# PyTorch from its own index, into an environment of its own: docs/install.md.
PYTHON ?= python3
TORCH ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/$(TORCH)
KEY := $(shell $(PYTHON) -c "import hashlib; print(hashlib.sha256(open('pyproject.toml', 'rb').read()).hexdigest()[:12])")
VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")
VENV ?= $(HOME)/.cache/fedsilo/venvs/$(KEY)$(if $(filter-out 3.11,$(VERSION)),-py$(VERSION))$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
# Where tools that read files find the package as it is installed: fedsilo with the five folders in it
PACKAGE := $(HOME)/.cache/fedsilo/package$(CURDIR)
export PYTHONPATH := $(CURDIR)
export PATH := $(BIN):$(PATH)
# Processes that a test starts find the bytecode of those before, whatever the machine is set to
export PYTHONDONTWRITEBYTECODE :=
EXPERIMENT ?= uefl-digits

.PHONY: run test test-kernels test-sse test-pythons test-soak test-drawn test-kill fuzz test-deploy lint format setup benchmark test-docker test-gpu lock docs docs-serve docs-version browser dist audit licences

run: setup  ## train UEFL over nine silos of embedded real digits
	$(BIN)/python -m fedsilo.cli simulate $(EXPERIMENT)

test: setup  ## the whole test suite, a process a core; a file's tests stay together, long files first
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# Other processors add in another order. Tests of numbers hold by the kernels of SSE too, as here, and
# by this processor's newest (AVX-512, AMX), where 'make test' takes those of AVX2
NUMERICAL := tests/models tests/client_app/training tests/methods tests/fedsilo/engines/test_together.py
test-kernels: test-sse  ## the tests of numbers by two other sets of instructions; CI runs the first, 'make test-sse'
	OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=DEFAULT $(BIN)/python -m pytest --numprocesses auto --dist loadfile $(NUMERICAL)

test-sse: setup
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE $(BIN)/python -m pytest --numprocesses auto --dist loadfile $(NUMERICAL)

# Each in an environment of its own. A shim of pyenv may be there without its version, hence the try
PYTHONS := 3.12 3.13
test-pythons:  ## the whole suite by Python 3.12 and 3.13; a version that this machine lacks is skipped with a line
	@for version in $(PYTHONS); do \
	for python in python$$version $(HOME)/.pyenv/versions/$$version.*/bin/python none; do \
	$$python -c "" 2> /dev/null && break; done; \
	if [ $$python = none ]; then echo "SKIPPED: this machine has no Python $$version"; continue; fi; \
	$(MAKE) test PYTHON=$$python VENV=$(VENV)-py$$version || exit 1; done

test-soak: setup  ## what `make test` tries at one place, at all others: deaths, seeds, engines; a quarter of an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile -m soak

test-drawn: setup  ## the tests of properties by newly drawn cases; `make test` draws the same each time
	HYPOTHESIS_PROFILE=drawn OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile $$(grep -rl "import.*hypothesis\|from hypothesis" tests --include='test_*.py')

KILLS ?= 200
test-kill: setup  ## commands killed at drawn moments, given again: the same bytes; an hour for 200
	FEDSILO_KILLS=$(KILLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kill tests/deploy/test_kills.py

# KIND=reply-fedavg takes the kinds whose names begin so, FIRST=5000 the seeds from there
fuzz: setup  ## TRIALS=1000 of each kind of malformed input, and of neighbours where nobody or only sums are trusted; a failure is printed with its seed (docs/reliability.md)
	OMP_NUM_THREADS=1 FUZZ_TRIALS=$(or $(TRIALS),1000) FUZZ_KIND=$(KIND) FUZZ_FIRST=$(or $(FIRST),0) $(BIN)/python -m pytest -s tests/fuzz tests/attacks/test_names_that_end_runs.py tests/attacks/test_answers_that_end_surveys.py tests/attacks/test_odd_run_directories.py tests/attacks/test_neighbours.py tests/attacks/test_outside_of_the_masks.py

test-deploy: setup  ## SuperLink and six SuperNodes as processes: every method, strangers
	FEDSILO_DEPLOY=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/deploy

lint: setup  ## ruff, import-linter and mypy, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(PACKAGE) && mkdir -p $(PACKAGE)/fedsilo
	ln -s $(CURDIR)/fedsilo/* $(CURDIR)/client_app $(CURDIR)/datasets $(CURDIR)/models $(CURDIR)/server_app $(CURDIR)/strategies $(PACKAGE)/fedsilo/
	cd $(PACKAGE) && PYTHONPATH=. $(BIN)/lint-imports --no-cache --config $(CURDIR)/pyproject.toml  # the order of the rooms
	MYPYPATH=$(PACKAGE) $(BIN)/mypy
	MYPYPATH=$(PACKAGE) $(BIN)/mypy docker release  # scripts of images and releases, no package

format: setup  ## put the code into ruff's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: setup  ## FedAvg by each engine, beside a bare PyTorch loop and plain Flower; needs DATA=folder of mnist/
	$(BIN)/python benchmarks/peers.py --data-dir $(DATA)

test-docker: setup  ## images, one server and six hospitals by docker-compose; needs an engine (docker/start-engine.sh)
	FEDSILO_DOCKER=1 $(BIN)/python -m pytest -s tests/docker

test-gpu: setup  ## every method and network on a GPU: the CPU's metrics, the same bytes twice
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist load tests/gpu tests/fedsilo/deployment/doctor/test_gpu.py

export NO_MKDOCS_2_WARNING := 1
docs: setup  ## the site in build/site, strict; open its index.html (docs/building-docs.md)
	$(BIN)/python -m mkdocs build --strict

docs-serve: setup  ## the site at http://127.0.0.1:8000 while pages are written
	DOCS_EXECUTE=no $(BIN)/python -m mkdocs serve

docs-version: setup  ## the site as VERSION=1.2 on the branch gh-pages, beside older versions
	$(BIN)/mike deploy --update-aliases $(VERSION) latest

# TORCH=cpu or another build of PyTorch goes into a lock file of its own
LOCK := docker/requirements$(if $(TORCH),-$(TORCH)).lock
lock: setup  ## the images' dependencies resolved again: versions and hashes
	$(BIN)/uv --no-config pip compile pyproject.toml --upgrade --quiet --generate-hashes --no-annotate --no-emit-index-url --python-version 3.11 --python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock$(if $(TORCH), TORCH=$(TORCH))" $(if $(TORCH),--torch-backend $(TORCH)) --output-file $(LOCK)
	$(if $(TORCH),sed -i '1i --extra-index-url $(TORCH_INDEX)' $(LOCK))

# The time of the last commit stands in both archives, so that two builds of a commit are the same bytes
dist: setup  ## wheel and sdist in dist/, checked as before an upload (docs/release.md), and the bill of materials
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/uv --no-config build --quiet
	$(BIN)/uv --no-config tool run twine check --strict dist/*
	mkdir dist/sbom
	$(BIN)/uv --no-config tool run --from cyclonedx-bom==7.5.0 cyclonedx-py requirements $(LOCK) --pyproject pyproject.toml --output-reproducible --output-format JSON --output-file dist/sbom/fedsilo.cdx.json

audit: setup  ## the images' dependencies against the published vulnerabilities; asks pypi.org
	$(BIN)/uv --no-config tool run pip-audit==2.10.1 --requirement $(LOCK) --require-hashes --disable-pip --progress-spinner off

licences: setup  ## the page of the dependencies' licences; needs an environment with all extras
	$(BIN)/python release/licences.py > docs/licences.new
	mv docs/licences.new docs/licences.md

# The tests of pages look at them in a browser, and are skipped without one
BROWSERS := chromium chromium-browser google-chrome chrome
browser:  ## Chromium from Debian's or Ubuntu's packages, where this user may install it and none is there
	@for name in $(BROWSERS); do command -v $$name > /dev/null && exit; done; \
	(apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) > /dev/null 2>&1 \
	|| echo "no browser, and none can be installed: the tests of pages are skipped"

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
setup: $(VENV)/.ready

$(VENV)/.ready:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print('\n'.join(p['dependencies'] + p['optional-dependencies']['test'] + p['optional-dependencies']['docs']))" > $(VENV)/requirements.txt
	$(if $(TORCH),grep -E '^torch(vision)?[>=]' $(VENV)/requirements.txt > $(VENV)/torch.txt && $(PIP) --index-url $(TORCH_INDEX) -r $(VENV)/torch.txt)
	$(PIP) -r $(VENV)/requirements.txt
	touch $@
