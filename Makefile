# Everything a fresh machine needs is installed here: uv, the locked dependencies, the servers of the tests.
SHELL := /bin/bash
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
BIN := .venv/bin
STAMP := .venv/.locked

.PHONY: help install run test check bench faults docs proto lock servers kernels clean
help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(UV):
	$(PYTHON) -m venv .tools && .tools/bin/pip install --quiet uv

$(STAMP): $(UV) requirements.lock pyproject.toml
	test -x $(BIN)/python || $(UV) venv --quiet --python '>=3.11' .venv
	$(UV) pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

install: $(STAMP) ## the virtual environment with the locked dependencies

run: install     ## the product with the embedded store on http://127.0.0.1:8080
	$(BIN)/keyfold serve --demo

servers: install ## the real servers of the tests (Kafka, ZooKeeper; Debian packages when root)
	bash tests/servers/install

test: install servers ## every test, on every store, with real servers
	@$(MAKE) --no-print-directory -j2 check kernels
	$(BIN)/pytest -n auto --dist loadgroup

kernels: install # compiled ahead, so that no test waits for them
	$(BIN)/python -m tools.kernels

check: install   ## lint, types, import rules
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache

faults: install servers ## the long fault runs
	KEYFOLD_FAULTS=long $(BIN)/pytest tests/faults tests/conformance/test_listings_large.py --timeout 0

bench: install servers ## every benchmark, with its peers in the same run
	$(UV) pip install --quiet --python $(BIN)/python fastapi uvicorn httptools redis hiredis
	bash bench/install
	$(BIN)/python -m bench

docs: install    ## the reference, from the code
	$(BIN)/python -m tools.reference

proto: install   ## the messages, from their .proto file
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/keyfold/counters/messages.proto

lock: $(UV)      ## resolve the dependencies anew
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --all-extras --group dev -o requirements.lock pyproject.toml

clean:
	rm -rf .venv .tools .servers
