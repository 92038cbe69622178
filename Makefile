# The one door for developers; CI goes through it too. `make` alone lists the targets.
#   PYTHON     the interpreter that creates .venv (3.10 or newer)
#   PIP_FLAGS  more arguments for pip install, such as the index of a torch build
#   MINUTES    how long `make fuzz` runs
#   RELEASE    --final: `make release-check` demands the changelog's date
#   WORKERS    how many processes run the tests, each with one thread (where a test asks for more, they wait asleep)
PYTHON    ?= python3
PIP_FLAGS ?=
VENV      := .venv
BIN       := $(VENV)/bin
READY     := $(VENV)/.ready
PEERS     := $(VENV)/.ready-bench
PAGES     := $(VENV)/.ready-docs
QUIET     := TORCH_CPP_LOG_LEVEL=ERROR KINETO_LOG_LEVEL=99
MINUTES   ?= 10
WORKERS   ?= 2
SOURCE     = $(QUIET) PYTHONPATH=src:. $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
PYTEST    := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 10
CORNERS   := --only "lowest libraries" "newest libraries"
FULL      := torch,O1,mixed,O2,lean,torch:fp16,O1:fp16,mixed:fp16,O2:fp16

# Compiled sources and rewritten tests are kept: without them every process compiles them again, 11 s each. pip compiles
# nothing (--no-compile): it would compile five times as many files as are imported.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))  # every target that is listed below

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(READY)  ## create .venv and install halfstep into it, editable, with the versions in constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "halfstep needs Python 3.10 or newer and $(PYTHON) is older; try: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[tasks,dev]'
	touch $@

demo: $(READY)  ## what low formats do on this machine: time, bytes, accuracy, a NaN cured; some 2 minutes on 2 cores -> out/report.html
	$(QUIET) $(BIN)/halfstep demo --html out/report.html

test: $(READY)  ## run the tests but the slow ones and those of integrations, some 5 minutes on 2 cores
	$(PYTEST) --ignore tests/integrations

# A file's tests stay in one process: fixtures of a module start processes and compile. The longest files come first.
test-slow: $(READY)  ## run the slow tests, some 5 minutes on 2 cores
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m 'slow and not hours' $$($(BIN)/python -m tests.slow)

test-all: test test-slow test-integrations  ## all three: what CI runs

test-hours: $(READY)  ## run the tests that are in neither: every line of a step cut off, all combinations
	$(PYTEST) -m hours

test-distributed: $(READY)  ## run the tests of 2 and 4 processes, every strategy under every policy, some 10 minutes on 2 cores
	$(BIN)/python -m pytest -m dist --durations 10 tests/distributed tests/step/test_two_ranks.py tests/weights/test_ranks.py

# Otherwise each process of `make test` compiles all tests and torch, at the same time as the others.
collection: $(READY)  ## compile the tests and what they import once, for all processes that will run them
	$(BIN)/python -m pytest --quiet --collect-only --ignore tests/integrations > /dev/null

environments: $(READY)  ## make the environments of test-integrations, which makes them too where they are missing
	$(BIN)/python -m benchmarks.matrix --prepare $(CORNERS)

test-integrations: $(READY)  ## run tests/integrations with the lowest and the newest libraries, some 2 minutes on 2 cores
	$(BIN)/python -m benchmarks.matrix --workers $(WORKERS) $(CORNERS)

release-check: $(READY)  ## build sdist and wheels, try them in empty environments with each extra, 15 minutes and 4 GB -> dist/
	$(BIN)/python -m tests.release.check $(RELEASE)

matrix: $(READY)  ## run the tests under every Python, torch and library that docs name, an hour -> benchmarks/results/matrix.json
	$(BIN)/python -m benchmarks.matrix --workers $(WORKERS) --json benchmarks/results/matrix.json

lint: $(READY)  ## ruff check, ruff format, mypy --strict on package and tests, unused names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.architecture.unused
	$(BIN)/mypy

format: $(READY)  ## rewrite the code as `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PEERS): $(READY)
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[bench]'
	touch $@

bench: $(PEERS)  ## time and bytes beside torch.amp and its peers, some 15 minutes on 2 cores -> benchmarks/results/cpu.json
	$(QUIET) $(BIN)/python -m benchmarks.run --device cpu --json benchmarks/results/cpu.json

$(PAGES): $(READY)
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(PAGES)  ## build the documentation site, a warning is an error -> out/site/index.html
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src:. $(BIN)/mkdocs build --strict

docs-look: docs  ## photograph every page at 390 and 1200 px, light and dark, and check them (node, npm, Chromium) -> out/look
	npm install --silent --no-fund --no-audit --prefix out/look playwright-core
	node docs_site/look.mjs out/look out/site

# These two run from a bare clone, on a machine from which nothing can be installed: .venv's interpreter if there is one,
# else PYTHON with its torch. `make gpu-first DRY=1` runs every block small on a CPU and writes nothing.
gpu-first:  ## what only a GPU can show, in ten minutes -> benchmarks/results/gpu_first.json, and a log beside it
	$(SOURCE) -m benchmarks.gpu_first $(if $(DRY),--device cpu --dry-run,--json benchmarks/results/gpu_first.json)

bench-gpu:  ## the same as bench on a CUDA device -> benchmarks/results/gpu.json
	$(SOURCE) -m benchmarks.run $(if $(DRY),--dry-run,--device cuda --json benchmarks/results/gpu.json)

bench-lens: $(READY)  ## what black box, monitor and audit cost, some 7 minutes on 2 cores -> benchmarks/results/lens.json
	$(QUIET) $(BIN)/python -m benchmarks.lens --json benchmarks/results/lens.json

bench-lint: $(READY)  ## seeded mistakes that the linter finds, 10 seconds -> benchmarks/results/lint_mistakes.json
	$(BIN)/python -m benchmarks.lint_mistakes --json benchmarks/results/lint_mistakes.json

bench-losses: $(READY)  ## cross entropy over a vocabulary, some 5 minutes on 2 quiet cores -> benchmarks/results/losses.json
	$(QUIET) $(BIN)/python -m benchmarks.losses --json benchmarks/results/losses.json

bench-pages: $(READY)  ## page faults of a step, some 5 minutes on 2 cores -> benchmarks/results/pages.json
	$(QUIET) $(BIN)/python -m benchmarks.pages --json benchmarks/results/pages.json

bench-scale: $(READY)  ## several processes beside one, some 10 minutes on 2 cores -> benchmarks/results/{parity,ranks,collectives}.json
	$(BIN)/python -m benchmarks.scale --json benchmarks/results

bench-auto: $(READY)  ## what policy="auto" chooses, some 10 minutes on 2 quiet cores -> benchmarks/results/auto.json
	$(QUIET) $(BIN)/python -m benchmarks.auto --again --json benchmarks/results/auto.json

bench-plan: $(PEERS)  ## planned bytes beside those counted, some 4 minutes on 2 cores -> benchmarks/results/plan.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.plan --json benchmarks/results/plan.json

bench-tune: $(PEERS)  ## tuned policies beside every preset, some 10 minutes on 2 quiet cores -> benchmarks/results/tune.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.tune --parts out/tune --json benchmarks/results/tune.json

bench-serving: $(READY)  ## forward passes that serve, some 5 minutes on 2 cores -> benchmarks/results/serving.json
	$(QUIET) $(BIN)/python -m benchmarks.serving --json benchmarks/results/serving.json

bench-optimizers: $(READY)  ## optimizers under each preset: train, resume, skip; with the libraries installed -> benchmarks/results/optimizers.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.optimizers --json benchmarks/results/optimizers.json

bench-recipes: $(READY)  ## rules for parts of a model, some 4 minutes on a core -> benchmarks/results/recipes.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.recipes --json benchmarks/results/recipes.json

bench-invariance: $(READY)  ## equal bits over threads and batches, 10 seconds -> benchmarks/results/invariance.json
	$(BIN)/python -m benchmarks.invariance --json benchmarks/results/invariance.json

bench-rl-formats: $(READY)  ## trainer and sampler in bf16 and fp16, 2 minutes on a core -> benchmarks/results/rl_formats.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.rl_formats --json benchmarks/results/rl_formats.json

bench-block-formats: $(READY)  ## which block formats train the GPT, and what an audit said, an hour on a busy core -> benchmarks/results/block_formats.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.block_formats --json benchmarks/results/block_formats.json

bench-lean: $(PEERS)  ## lean beside fp32, long runs and fine-tuning, some 30 minutes on a core -> benchmarks/results/lean.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.lean --parts out/lean --json benchmarks/results/lean.json

bench-wheel: $(READY)  ## a wheel's compiled kernels beside those compiled here, 4 minutes on 2 quiet cores -> benchmarks/results/wheel.json
	$(QUIET) OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.wheel --json benchmarks/results/wheel.json

count: $(READY)  ## casts, bytes and launches of a step on a fake GPU -> benchmarks/results/counts.json
	$(BIN)/python -m benchmarks.count --json benchmarks/results/counts.json

soak: $(READY)  ## 20,000 micro-batches with everything on: memory, objects and files, 7 minutes -> benchmarks/results/soak.json
	$(BIN)/python -m benchmarks.soak --json benchmarks/results/soak.json

faults: $(READY)  ## score the instruments on seeded faults and healthy controls
	$(BIN)/python -m benchmarks.faults.scored

stories: $(READY)  ## score the instruments on stories from public trackers, some 10 minutes on a core -> benchmarks/results/stories.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults.stories_scored --json benchmarks/results/stories.json

fuzz: $(READY)  ## random programs against torch.amp, float64 and themselves, 10 minutes (MINUTES=60 for an hour; FUZZ="--only contents --programs 2000")
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ)

fuzz-arguments: $(READY)  ## every wrong argument of every public entry, 2 minutes
	$(BIN)/python -m tests.fuzz.arguments

zoo: $(READY)  ## transformers' architectures, tiny, under five presets, an hour; goes on where it was cut off -> benchmarks/results/zoo.json
	$(QUIET) OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo --parts out/zoo.jsonl --json benchmarks/results/zoo.json

compare-full: $(READY)  ## every preset in bf16 and fp16, 5 seeds -> benchmarks/results/compare.json
	$(BIN)/halfstep compare --task lenet5 --task gpt --policies $(FULL) --seeds 5 --json benchmarks/results/compare.json
	$(BIN)/halfstep compare --task resnet --policies $(FULL) --seeds 5 --json benchmarks/results/compare_resnet.json
	$(BIN)/python -m benchmarks.stamp benchmarks/results/compare.json benchmarks/results/compare_resnet.json

tables: $(READY)  ## write the short tables and the pictures of README and docs, from benchmarks/results/ and from the code
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.concept_pictures
	$(BIN)/python -m tests.architecture.reading
	$(BIN)/python -m tests.architecture.picture

notebooks: $(READY)  ## run docs/notebooks in a Jupyter kernel and write their outputs into them, a minute
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[notebooks]'
	$(BIN)/python -m benchmarks.notebooks

walks: $(READY)  ## count the files that a step, a cast and a verdict pass, beside their limits
	$(BIN)/python -m tests.architecture.walks

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist out src/halfstep.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
