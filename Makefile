# On a fresh machine, `make demo` and `make test` need nothing but Python with venv. Tests that need more are skipped, and
# the end of `make test` says what lets them run.
PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
# The build with CUDA. With === pip does not prefer a CPU build that it finds locally.
CUDA_TORCH ?= torch===2.13.0
# Training frameworks that examples/ and tests/allocator_tier/test_frameworks.py need. Ray is left
# out: its test, which takes half a minute, is skipped without it.
FRAMEWORKS := transformers==5.23.0 accelerate==1.15.0 lightning==2.6.6 trl==1.16.0 deepspeed==0.19.8 \
	fastai==2.8.12
# Their greenlets share a thread: tests/allocator_tier/test_greenlets.py. 13 MB.
GREENLETS := gevent==26.9.0 eventlet==0.41.3
# RAPIDS' memory manager, for tests/allocator_tier/test_rmm.py; needs Python 3.11. 6 MB.
RMM := rmm-cu13==26.10.0
# Other monitoring agents; tests/allocator_tier/test_agents.py runs them beside torchmem.
AGENTS := newrelic==14.1.0 ddtrace==4.16.0 opentelemetry-distro==0.66b2
# The inference engine, and the trainer that has it in its own process.
SERVING := vllm==0.33.0 trl==1.16.0
SGLANG := sglang==0.5.23
# A test runs a notebook.
NOTEBOOKS := nbclient==0.11.0 ipykernel==7.4.0
# It is below 1.0, so each release may change the pages.
SITE_GENERATOR := zensical==0.0.73
BIN := $(VENV)/bin
# $(call install,ENVIRONMENT,WHAT) installs with uv, which takes a third of pip's CPU time or less. If uv fails, pip installs:
# its own configuration may name another index. Most of what it installs is never imported, so --no-compile.
install = echo "Installing into $(1), which may take a minute:" '$(strip $(2))' && $(PYTHON) -m venv $(1) && \
	{ { $(1)/bin/python -m pip install --quiet uv && $(1)/bin/uv pip install --quiet --python $(1) $(2); } || \
	$(1)/bin/python -m pip install --no-compile $(2); }
# What pip does not compile below, Python compiles when it is first imported. Where this variable is set, as in many
# container images, each process would compile PyTorch again, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo stack programs test check format generate site boards pictures check-grafana test-allocator test-dependencies test-versions test-programs test-suites test-serving test-sglang gpu-wheels test-gpu clean

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*  ## /\1  /p' $(MAKEFILE_LIST) | awk '{ name = $$1; $$1 = ""; printf "make %-15s%s\n", name, $$0 }'

# What `make test` has unpacked.
export PATH := $(PATH):$(abspath .programs/bin)

$(VENV)/.demo: pyproject.toml
	@$(call install,$(VENV),--editable .[exporter])
	@touch $@

$(VENV)/.dev: pyproject.toml
	@$(call install,$(VENV),--editable .[dev])
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## Run a simulated training on four GPUs through the real SDK and exporter; ARGS='--ranks 8' for eight.
	@$(BIN)/torchmem demo --by-make $(ARGS)

stack: $(VENV)/.demo  ## Start exporter, Prometheus, Alertmanager and, if installed, Grafana, without Docker.
	PATH="$(abspath $(BIN)):$$PATH" deploy/stack.sh $(ARGS)

programs:  ## Unpack what the tests need and the machine lacks, such as Prometheus, into .programs/; installs nothing.
	@tests/programs.sh

# The tests in a browser are skipped without npm.
NPM_PACKAGES := $(if $(shell command -v npm),tests/grafana/node_modules/.installed)

# Three processes keep two processors busy: many tests wait for a browser, a server or a clock. Pass
# `ARGS='--numprocesses 0'` to run the tests in one process, or a path to run only some of them.
test: $(VENV)/.dev programs $(NPM_PACKAGES) check  ## Run all checks, and all tests that need neither a GPU nor PyTorch.
	$(BIN)/python -m pytest -m 'not allocator and not serving and not versions' --numprocesses 3 $(ARGS)

check: $(VENV)/.dev  ## Check style, types, import directions and generated files.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.11 dashboards
	$(BIN)/lint-imports
	$(BIN)/python generate.py --check

format: $(VENV)/.dev  ## Format the Python code and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/.dev  ## Write the generated files: rules, dashboards, Kubernetes manifests, pages under docs/.
	$(BIN)/python generate.py

.venv-site/.installed: Makefile
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet '$(SITE_GENERATOR)'
	touch $@

site: .venv-site/.installed  ## Build the documentation site from docs/ into site/, and check its links; needs Python 3.11.
	.venv-site/bin/python -m deploy.site.build

tests/grafana/node_modules/.installed: tests/grafana/package-lock.json
	@echo "Installing into tests/grafana/node_modules: Grafana's packages and those that drive a browser"
	@npm ci --prefix tests/grafana --silent --ignore-scripts
	@touch $@

# Pass `ARGS='node --theme dark'` to draw one of them, and `ARGS=--help` for all options.
boards: $(VENV)/.dev tests/grafana/node_modules/.installed generate  ## Draw the dashboards, and list what is wrong with them; needs npm, Chromium and Prometheus.
	PYTHONPATH=tests $(BIN)/python -m docs.generate.pictures $(ARGS)

# Pass `ARGS=demo` to draw one subject, and `ARGS=--help` for all of them and all options.
pictures: $(VENV)/.dev tests/grafana/node_modules/.installed generate  ## Draw the pictures of the documentation that are older than what they show; needs what `boards` needs.
	PYTHONPATH=tests $(BIN)/python -m docs.generate.pictures.docs $(ARGS)

check-grafana: tests/grafana/node_modules/.installed  ## Check the dashboards against the types of Grafana 11, 12 and 13; needs npm.
	node tests/grafana/check.mjs dashboards/json/*.json

$(CUDA_VENV)/.dev: pyproject.toml
	@$(call install,$(CUDA_VENV),$(CUDA_TORCH) numpy $(FRAMEWORKS) $(NOTEBOOKS) $(GREENLETS) --editable .[dev])
	@touch $@

# Each of them changes how Python starts, so they have an environment of their own on top of that one.
$(CUDA_VENV)/agents/.installed: $(CUDA_VENV)/.dev
	@$(call install,$(CUDA_VENV)/agents,$(AGENTS))
	@packages=$$($(CUDA_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
		echo "import site; site.addsitedir('$$packages')" > $$(echo $(CUDA_VENV)/agents/lib/python3*/site-packages)/cuda.pth
	@touch $@

$(CUDA_VENV)/.rmm: $(CUDA_VENV)/.dev
	@$(call install,$(CUDA_VENV),$(RMM))
	@touch $@

test-allocator: $(CUDA_VENV)/.dev programs  ## Test against PyTorch's CUDA allocator on the phantom GPU; needs 7 GB of disk.
	@$(MAKE) $(CUDA_VENV)/agents/.installed || echo "The tests beside other agents are skipped: they cannot be installed."
	@$(MAKE) $(CUDA_VENV)/.rmm || echo "The test with RMM is skipped: it cannot be installed."
	$(CUDA_VENV)/bin/python -m pytest tests/allocator_tier -m allocator --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder $(ARGS)

# What is installed beside the training, with the oldest and the newest releases that pyproject.toml allows.
RESOLUTIONS ?= lowest-direct highest
EXPORTER_TESTS := $(addprefix tests/exporter/test_,golden.py fake_nvml.py nvml.py nvml_answers.py otlp.py server.py \
	limits.py web_security.py web_config.py fair_queue.py binding.py peer_user.py command.py) $(addprefix tests/packaging/test_,kubernetes.py systemd.py)
# ARGS='-k NAME' picks tests.
test-dependencies: $(RESOLUTIONS:%=test-dependencies-%)  ## Test with the oldest and with the newest release of each dependency.

test-dependencies-%:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet uv
	.venv-$*/bin/uv pip install --quiet --python .venv-$* --resolution $* --editable '.[exporter,otlp]' \
		'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'hypothesis>=6.100' 'httpx>=0.27' 'trustme>=1.1' 'promql-parser>=0.11'
	.venv-$*/bin/python -m pytest -q --numprocesses 2 $(EXPORTER_TESTS) $(ARGS)
	.venv-$*/bin/uv pip install --quiet --python .venv-$* --resolution $* --editable '.[exporter,mcp]'
	.venv-$*/bin/python -m pytest -q --numprocesses 2 tests/mcp/test_process.py tests/mcp/test_exporter.py $(ARGS)

# Pass `ARGS='--python 3.12 --torch 2.13.0'` for one pair. `make generate` then writes the table in docs/sdk.md.
test-versions: $(VENV)/.dev  ## Test on each Python found, and on each PyTorch that is supported; takes half an hour.
	PYTHONPATH=tests $(BIN)/python -m versions $(ARGS)

# Pass `ARGS=--core` for ten of them, in five minutes, and `ARGS='--only NAME --again'` for one.
test-programs: $(VENV)/.dev  ## Run 50 programs from PyPI plain and with torchmem on phantom GPUs; own environments, takes hours, goes on where it stopped.
	$(BIN)/python -m experiments.programs $(ARGS)

test-suites: $(VENV)/.dev  ## Run test suites of other projects plain and with torchmem; clones from GitHub, takes an hour, goes on where it stopped.
	$(BIN)/python -m experiments.suites $(ARGS)

SERVING_VENV ?= .venv-serving
# vLLM requires a newer certifi than some indexes have, and cuda-python 12 breaks one of its imports.
SERVING_OVERRIDES := tests/serving/overrides.txt

$(SERVING_VENV)/.serving: pyproject.toml $(SERVING_OVERRIDES)
	$(PYTHON) -m venv $(SERVING_VENV)
	$(SERVING_VENV)/bin/python -m pip install --quiet uv
	$(SERVING_VENV)/bin/uv pip install --quiet --python $(SERVING_VENV) --override $(SERVING_OVERRIDES) \
		$(SERVING) --editable '.[dev]'
	touch $@

# One engine at a time: each takes a minute to start, or five on a busy machine.
test-serving: $(SERVING_VENV)/.serving  ## Test with the real vLLM and TRL on the phantom GPU; own environment, 9 GB of disk.
	$(SERVING_VENV)/bin/python -m pytest -m serving tests/serving $(ARGS)

SGLANG_VENV ?= .venv-sglang

$(SGLANG_VENV)/.serving: pyproject.toml
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet uv
	$(SGLANG_VENV)/bin/uv pip install --quiet --python $(SGLANG_VENV) $(SGLANG) --editable '.[dev]'
	touch $@

test-sglang: $(SGLANG_VENV)/.serving  ## Test with the real SGLang, which needs other releases than vLLM; own environment, 11 GB of disk.
	$(SGLANG_VENV)/bin/python -m pytest -m serving tests/serving/test_sglang.py $(ARGS)

# The Python of a GPU machine without a network, and its version. It needs a PyTorch with CUDA, a C compiler for the
# phantom GPU, and torchvision and transformers for the models. The rest is in .gpu-wheels, 10 MB.
GPU_PYTHON ?= $(CUDA_VENV)/bin/python
GPU_PYTHON_VERSION ?= 3.12
GPU_PLATFORMS := $(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)

gpu-wheels:  ## Save what `make test-gpu GPU_PYTHON=python3` needs on a machine without a network.
	rm -rf .gpu-wheels
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir .gpu-wheels .
	$(PYTHON) -m pip download --quiet --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) $(GPU_PLATFORMS) \
		--find-links .gpu-wheels --dest .gpu-wheels 'torchmem[exporter]' nvitop-exporter gevent pytest hypothesis

# Pass `ARGS=--phantom` where there is no GPU, `ARGS='--only ooms'` for one subject, and `ARGS=--help` for all options.
test-gpu: $(filter $(CUDA_VENV)/.dev,$(patsubst %/bin/python,%/.dev,$(GPU_PYTHON)))  ## Find out in nine minutes what only a real NVIDIA GPU can show.
	$(GPU_PYTHON) -m experiments.real_gpu $(ARGS)

clean:  ## Remove the virtual environments and everything that was built.
	rm -rf .programs .gpu-wheels $(VENV) $(CUDA_VENV) $(SERVING_VENV) $(SGLANG_VENV) .venv-lowest-direct .venv-highest .venv-site .venv-programs .stack build dist site
