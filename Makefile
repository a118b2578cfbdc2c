# make demo    sets up and runs the main job: train, checkpoint, kill, resume bit for bit
# make test    sets up and passes the tests
# make check   format, lint, types, documentation
# make docs    the documentation as a site, in build/site
# make bench   a quick table against peers, in minutes; make bench-full: everything, with pictures, in hours
# make torture the long safety trials
# make mutants every safety taken out in turn: which test notices
# make fuzz    looks for files that break the readers, for FUZZ_SECONDS
# make sanitize the engine under ThreadSanitizer, AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer: alone, and
#                under Python tests that touch it
# make ecosystem the libraries that people train with, at pinned versions, in .venv-ecosystem; prints what works
PYTHON ?= python3
VENV := .venv
ECO := .venv-ecosystem
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
CONSTRAINTS := -c constraints.txt
ENGINE := $(wildcard csrc/*.h csrc/*/*.cc csrc/*/*.h) csrc/CMakeLists.txt

.PHONY: setup demo test check docs build/types format bench bench-full torture mutants sanitize fuzz ecosystem clean
setup: $(READY)

# The test build of the engine, which can be told to fail. `pip install .` builds without.
$(READY): pyproject.toml constraints.txt scripts/system-packages.sh $(ENGINE)
	sh scripts/system-packages.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) scikit-build-core pybind11 cmake ninja torch==2.13.0
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) --no-build-isolation --config-settings=cmake.define.LAZYCKPT_FAULTS=ON \
	    --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/train_gpt.py

# On all cores, then what measures how long something takes.
test: setup
	$(BIN)/python -m pytest -m 'not slow and not alone' -n auto --dist loadfile
	$(BIN)/python -m pytest -m 'not slow and alone'

check: setup build/types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*/*.cc csrc/*/*.h tests/*/*.cc tests/*/*.h
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p lazyckpt
	$(DOCS) build --strict --quiet

# The documentation as a site, in build/site.
docs: setup build/types
	$(DOCS) build --strict

# The package as it is installed.
build/types:
	rm -rf $@ && mkdir -p $@
	cp -r lazyckpt $@/lazyckpt && cp -r integrations $@/lazyckpt/integrations

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i csrc/*.h csrc/*/*.cc csrc/*/*.h tests/*/*.cc tests/*/*.h

# BENCH: further arguments, as in `make bench-full BENCH=--resume`, which goes on where the last one ended.
# Without the peers, which take a minute to install; an arm whose package is missing is reported as missing.
bench: setup
	$(BIN)/python -m benchmarks $(BENCH)

bench-full: setup
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) --no-build-isolation --config-settings=cmake.define.LAZYCKPT_FAULTS=ON \
	    --editable '.[dev,peers]'
	$(BIN)/python -m benchmarks --full $(BENCH)

torture: setup
	rm -f build/trials.jsonl
	LAZYCKPT_TORTURE=1 $(BIN)/python -m pytest -m 'slow or not slow'
	$(BIN)/python tests/trials.py

mutants: setup
	$(BIN)/python -m pytest -m 'slow or not slow' -n auto tests/mutants

sanitize: setup
	$(BIN)/python -m pytest tests/engine/test_sanitizers.py

# Looks for files that reach new code; what it finds is in build/fuzz/crash-…, and belongs into tests/attacks.
FUZZ_SECONDS := 300
fuzz: setup
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) atheris==3.0.0
	PYTHONPATH=tests $(BIN)/python -m attacks.explore build/fuzz -max_total_time=$(FUZZ_SECONDS)

# ECOSYSTEM: further arguments, as in `make ecosystem ECOSYSTEM='-k timm'` or `ECOSYSTEM=--write-docs`.
ecosystem: $(ECO)/.ready
	$(ECO)/bin/python -m pytest -n auto tests/ecosystem $(ECOSYSTEM)

$(ECO)/.ready: pyproject.toml constraints.txt tests/ecosystem/requirements.txt tests/ecosystem/requirements-no-deps.txt $(ENGINE)
	sh scripts/system-packages.sh
	test -x $(ECO)/bin/python || $(PYTHON) -m venv $(ECO)
	$(ECO)/bin/python -m pip install --quiet $(CONSTRAINTS) scikit-build-core pybind11 cmake ninja torch==2.13.0
	$(ECO)/bin/python -m pip install --quiet $(CONSTRAINTS) -r tests/ecosystem/requirements.txt
	$(ECO)/bin/python -m pip install --quiet --no-deps -r tests/ecosystem/requirements-no-deps.txt
	$(ECO)/bin/python -m pip install --quiet $(CONSTRAINTS) --no-build-isolation \
	    --config-settings=cmake.define.LAZYCKPT_FAULTS=ON --editable .
	touch $@

clean:
	rm -rf $(VENV) $(ECO) build dist
