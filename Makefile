# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
# The CUDA build; === keeps pip from preferring a local CPU build.
CUDA_TORCH ?= torch===2.13.0
# What examples/huggingface.py and lightning_loop.py train with.
EXAMPLES := transformers==5.23.0 accelerate==1.15.0 lightning==2.6.6
BIN := $(VENV)/bin
SOURCES := sdk/src exporter/src tools/src dashboards tests benchmarks examples

.PHONY: demo test check format dashboards docs check-grafana kubernetes stack test-allocator test-gpu clean

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[exporter]'
	touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## Simulated training on four cards, with the real SDK and exporter
	$(BIN)/torchmem demo $(ARGS)

test: $(VENV)/.dev check  ## Everything that needs no GPU and no CUDA build of torch
	tests/install-stack.sh
	$(BIN)/python -m pytest -m 'not allocator and not gpu' $(ARGS)

check: $(VENV)/.dev  ## Style, types, import arrows, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.11 dashboards
	$(BIN)/lint-imports
	$(BIN)/python dashboards/build.py --check
	$(BIN)/python docs/metrics.py --check
	$(BIN)/torchmem rules --thresholds prometheus/thresholds.yml --check prometheus/rules
	$(BIN)/python docs/dashboards.py --check
	$(BIN)/python deploy/kubernetes/build.py --check

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dashboards: $(VENV)/.dev  ## Write dashboards/json from the Python in dashboards/
	$(BIN)/python dashboards/build.py

docs: $(VENV)/.dev  ## Write the generated tables of the README and docs/dashboards.md
	$(BIN)/python docs/metrics.py
	$(BIN)/python docs/dashboards.py

check-grafana:  ## The dashboards against the types that Grafana 11, 12 and 13 publish; needs npm
	npm install --prefix tests/grafana --silent --no-package-lock --ignore-scripts
	node tests/grafana/check.mjs dashboards/json/*.json

kubernetes: $(VENV)/.dev  ## Write the manifests made from the rules and the dashboards
	$(BIN)/python deploy/kubernetes/build.py

stack: $(VENV)/.demo  ## Exporter, Prometheus, Alertmanager (and Grafana, if installed) without Docker
	PATH="$(abspath $(BIN)):$$PATH" deploy/stack.sh $(ARGS)

$(CUDA_VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet '$(CUDA_TORCH)' numpy $(EXAMPLES)
	$(CUDA_VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

test-allocator: $(CUDA_VENV)/.dev  ## PyTorch's real CUDA allocator on the phantom GPU; needs about 6 GB of disk
	tests/install-stack.sh
	$(CUDA_VENV)/bin/python -m pytest -m allocator --numprocesses 2 --dist loadfile $(ARGS)

test-gpu: $(CUDA_VENV)/.dev  ## A real NVIDIA GPU
	$(CUDA_VENV)/bin/python -m pytest -m gpu $(ARGS)

clean:
	rm -rf $(VENV) $(CUDA_VENV) .stack build dist
