# Two commands on a fresh machine: `make demo` and `make test`. Each makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit docs fuzz mutants mutants-table models benchmark peers clean

demo: $(VENV)/.installed
	$(BIN)/maecho demo

test: lint types unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# One thread a process: the suite is many small products, and on shared cores threads wait for each other. A file stays in one
# process, since its tests share what they have trained.
WORKERS ?= auto
unit: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile

# The tables in README.md and docs/: methods.md, uploads.md, results.md; from METHODS, STATISTICS and committed results.
docs: $(VENV)/.installed
	$(BIN)/python -m maecho.lab.report.documents
# 20,000 bad files, 20,000 flipped bits, 300 killed writers; prints what came of them, and fails if one was wrong.
fuzz: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m support.fuzz

# Small errors in one package, and whether tests notice: make mutants PACKAGE=linalg SAMPLE=50 REACH=room
PACKAGE ?= linalg
SAMPLE ?= 50
REACH ?= all
JOBS ?= 2
mutants: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -m support.mutants $(PACKAGE) --sample $(SAMPLE) --reach $(REACH) --jobs $(JOBS)

# The table in docs/testing.md, from docs/mutants.
mutants-table: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -m support.mutants --table docs/testing.md

# docs/models.md: networks that people bring, checked and merged. About half an hour.
models: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python benchmarks/models.py

benchmark: $(VENV)/.installed
	$(BIN)/python benchmarks/ma_echo.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/qp.py
	$(BIN)/python benchmarks/echo.py
	$(BIN)/python benchmarks/rounds.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/qp_gram.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/client.py

# Beside FusionBench and mergekit, which get an environment of their own. Its table is in docs/benchmarks.md.
PEERS := .venv-peers
peers: $(PEERS)/.installed
	OMP_NUM_THREADS=1 $(PEERS)/bin/python benchmarks/peers.py

# torch first and alone, at its pin. A peer that cannot be installed is left out, and the benchmark says so.
$(PEERS)/.installed: pyproject.toml constraints-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints-peers.txt torch
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints-peers.txt -e . transformers
	-$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints-peers.txt fusion-bench
	-$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints-peers.txt mergekit
	touch $@

# torch first and alone, at its pin: the CPU build where one is at hand.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis maecho-demo maecho-results
