# Every target works as the first command in a fresh clone: it creates .venv and installs its dependencies.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: dev demo test quick pictures manifests sim sim-fleet power mutants fuzz skew soak kernel-san s3 engines engines-llama-server docs release-check check format proto clean
.DEFAULT_GOAL := dev

# Only the runtime dependencies, as after `pip install '.[server]'`.
$(VENV)/.runtime: pyproject.toml setup.py $(wildcard proto/native/*)
	@test -n "$(PYTHON)" || { echo "prefixd needs Python 3.11 or later (with its venv module)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[server]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[chart]' || \
	echo "the chart's tests will be skipped: Helm's code can't be installed here"
	@touch $@

dev: $(VENV)/.dev ## install everything that a developer needs into .venv

demo: $(VENV)/.runtime ## run a private daemon with three tiers on real bytes, and verify them
	$(BIN)/prefixctl demo

# Allows bytecode: without it, every test process compiles all modules again, which takes minutes.
test quick: export PYTHONDONTWRITEBYTECODE :=

# Thousands of tests share the processors. Those that hold real processes to real times come after them,
# one on each core. Each part ends with its first failure: nothing runs again.
test: $(VENV)/.dev ## run the whole test suite
	$(BIN)/python -m pytest -n auto --dist worksteal -x -m "not alone"
	$(BIN)/python -m pytest -n auto --dist worksteal -x -m alone

quick: $(VENV)/.dev ## run the tests that are not marked slow
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

pictures: $(VENV)/.dev ## make docs/top.svg and, with Chromium, docs/page*.png, from a daemon under load
	$(BIN)/python -m tests.support.pictures docs

manifests: $(VENV)/.dev ## make the manifests of kustomize, and the table of values, from the Helm chart
	$(BIN)/python -m tests.support.manifests

SEED ?= 0
RUNS ?= 1000
STEPS ?= 30
sim: $(VENV)/.dev ## simulate daemons and clients: seeds SEED to SEED + RUNS, of STEPS steps each
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --seed $(SEED) --runs $(RUNS) --steps $(STEPS)

sim-fleet: $(VENV)/.dev ## simulate fleets of nodes on one engine: seeds SEED to SEED + RUNS
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --fleet --seed $(SEED) --runs $(RUNS)

LOSSES ?= 200
power: $(VENV)/.dev ## simulate power losses of a recorded daemon, and start a daemon on each; needs a C compiler
	$(BIN)/python -m tests.power --losses $(LOSSES)

# The native kernel under sanitisers: alone, and below Python; and for AArch64 where qemu-user and a
# cross compiler are installed (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user).
INPUTS ?= 1000000
KERNEL := tests/kernel/check.c proto/native/crc32c.c proto/native/sha256.c proto/native/rows.c
SANITISED := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
kernel-san: $(VENV)/.dev ## check the native kernel with INPUTS of each kind, under sanitisers and on AArch64
	@mkdir -p build/kernel/prefixd/proto
	$(CC) $(SANITISED) -Wall -Wextra -Werror $(KERNEL) -o build/kernel/check && build/kernel/check $(SEED) $(INPUTS)
	$(CC) $(SANITISED) -shared -fPIC -DPy_LIMITED_API=0x030B0000 \
		-I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
		proto/native/*.c -o build/kernel/_native.abi3.so
	PREFIXD_LONG=1 PREFIXD_KERNEL=build/kernel/_native.abi3.so ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest -q -p no:cacheprovider tests/proto/test_kernel.py
	@if command -v aarch64-linux-gnu-gcc qemu-aarch64 >/dev/null; then \
		aarch64-linux-gnu-gcc -O2 -static $(KERNEL) -o build/kernel/check-aarch64 && \
		qemu-aarch64 build/kernel/check-aarch64 $(SEED) $$(($(INPUTS) / 20)); \
	else echo "not tried for AArch64: no cross compiler or no qemu-user"; fi

s3: $(VENV)/.dev ## test the contract of shared stores against a real S3, Ceph's (Debian: radosgw ceph-mon ceph-osd ceph-common)
	$(BIN)/python -m tests.contract.against_s3

MUTANTS ?= 200
mutants: $(VENV)/.dev ## make random one-line mistakes, and report which tests notice them; takes an hour or more
	$(BIN)/python -m tests.mutants --mutants $(MUTANTS)

PREVIOUS ?= $(shell git describe --tags --abbrev=0 2>/dev/null)
skew: $(VENV)/.dev ## try the release PREVIOUS (a tag, a commit, a wheel) beside this one, both ways
	@test -n "$(PREVIOUS)" || { echo "no release yet: name a commit, make skew PREVIOUS=..."; exit 1; }
	$(BIN)/python -m tests.skew $(PREVIOUS)

MINUTES ?= 30
fuzz: $(VENV)/.dev ## fuzz every input that comes from outside, for MINUTES
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

soak: $(VENV)/.dev ## run clients on one daemon for MINUTES, and report what grew
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

# Runs the engines themselves, on models that the tests create. llama.cpp needs a C++ compiler.
ENGINES := $(VENV)-engines
$(ENGINES)/.done: pyproject.toml
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check numpy 'torch==2.13.*'
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check \
		'transformers==5.23.*' 'llama-cpp-python[server]==0.3.36' peft httpx gguf hypothesis pytest pytest-timeout -e '.[server,llama-server]'
	@touch $@

engines: $(ENGINES)/.done ## test with llama-cpp-python and transformers themselves, on CPU
	$(ENGINES)/bin/python -m pytest -q -s --timeout 600 tests/engines/test_llama_cpp*.py \
		tests/engines/test_transformers*.py tests/engines/test_pages.py

# llama.cpp's server: $LLAMA_SERVER, else built of the source in llama-cpp-python's package, with CMake.
BUILT_SERVER := $(CURDIR)/$(ENGINES)/llama.cpp/bin/llama-server
LLAMA_SERVER ?= $(BUILT_SERVER)
$(BUILT_SERVER): | $(ENGINES)/.done
	@mkdir -p $(ENGINES)/llama.cpp
	$(ENGINES)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--no-binary llama-cpp-python -d $(ENGINES)/llama.cpp 'llama-cpp-python==0.3.36'
	tar -xzf $(ENGINES)/llama.cpp/llama_cpp_python-*.tar.gz -C $(ENGINES)/llama.cpp --strip-components 1
	cmake -S $(ENGINES)/llama.cpp/vendor/llama.cpp -B $(ENGINES)/llama.cpp -DCMAKE_BUILD_TYPE=Release \
		-DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
	cmake --build $(ENGINES)/llama.cpp --target llama-server --parallel

engines-llama-server: $(ENGINES)/.done $(LLAMA_SERVER) ## test llama.cpp's server with its prompts kept, on CPU
	LLAMA_SERVER=$(LLAMA_SERVER) $(ENGINES)/bin/python -m pytest -q --timeout 1800 tests/engines/test_llama_server.py

# These engines need a GPU to run, but not to test their caches. Each has an environment of its own, without CUDA parts.
LMCACHE := lmcache==0.5.6
SGLANG := sglang==0.5.23
VLLM := vllm==0.33.0
.PRECIOUS: $(ENGINES)-%/.done
$(ENGINES)-%/.done: tests/engines/requirements-%.txt pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $< hypothesis pytest pytest-timeout -e '.[server]'
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$($(shell echo $* | tr a-z A-Z))'
	@touch $@

engines-%: $(ENGINES)-%/.done ## engines-lmcache, -sglang, -vllm: test with their own code on CPU, and compare with the caches that they bring along
	@$(<D)/bin/python -W ignore -c 'import $*' # without it, the tests would be skipped
	$(<D)/bin/python -m pytest -q --timeout 600 tests/engines/test_$**.py
	$(<D)/bin/python -m tests.bench.bench_engines $*

$(VENV)/.docs: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## build the pages and the reference in build/docs; a link without a target fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Its tools have an environment of their own: none of them is needed to work on prefixd.
$(VENV)-release/.done: pyproject.toml
	@test -x $(VENV)-release/bin/python || $(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --disable-pip-version-check '.[release]'
	@touch $@

release-check: $(VENV)-release/.done ## build wheel and sdist in build/release, and use both in empty environments of PYTHONS
	PATH="$(CURDIR)/$(VENV)-release/bin:$$PATH" $(VENV)-release/bin/python -m tests.support.release build/release $(PYTHONS)

check: $(VENV)/.dev ## lint, check types, generated code, and that the contract only grew since the last release
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python proto/generate.py --check
	$(BIN)/buf lint
	@last=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null); \
	if test -z "$$last"; then echo "no release yet, with which to compare the contract"; else \
		mkdir -p build/released && git show "$$last:proto/prefixd.proto" >build/released/prefixd.proto && \
		$(BIN)/buf breaking proto --against build/released; fi

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/.dev ## generate proto/*_pb2* from proto/prefixd.proto
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) $(VENV)-release $(ENGINES) $(ENGINES)-* build dist .pytest_cache .mypy_cache .ruff_cache
