# The course's commands. `make` alone lists them; CONTRIBUTING.md gives them without make.
#
#   PYTHON=python3.12      another Python to build .venv with
#   TORCH_INDEX=URL        another package index for torch and torchvision
#   LAB_ARGS=--no-browser  more arguments for JupyterLab
#   OPS="cpu-adam async-io"  what `make offload` builds
#   MODEL=name CARD=gpu      what `make fit` asks about; FIT_ARGS="--method qlora" adds the rest
#   CHECK_ARGS=--few         three pages in place of all for `make site-check`
#   FOLDER=handed_in         where `make scores` finds a class's scoreboards, and notebooks of lab 99

PYTHON ?= python3
RUN := .venv/bin/python

# Without it the profiler writes its start lines into the outputs of cells.
export KINETO_LOG_LEVEL := 99
export TORCH_INDEX
# With it every kernel would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

# JupyterLab refuses to run as root unless told: containers and some WSL set-ups do run as root.
LAB := jupyterlab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root)
FIRST_PAGE := --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

.DEFAULT_GOAL := help
.PHONY: help setup offload lab test quick optional style bytes soak course bench validate fit record notebooks my-labs constraints badges \
	site site-check slides ready wheelhouse scores colab links release

help:  ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Install everything into .venv (a second call does no work)
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) on this machine: install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) utils/install.py

# Never in a cell: a lesson without them says what it skips. Async I/O needs libaio with its headers.
OPS ?= cpu-adam
offload: setup  ## Build DeepSpeed's CPU optimizer, once (one to three minutes)
	@$(RUN) -m utils.techniques.deepspeed_ops $(OPS)

lab: setup  ## Set up, then open JupyterLab on the first notebook
	@[ -w "$$HOME" ] || { export HOME="$(CURDIR)/build/home"; mkdir -p "$$HOME"; \
		echo "Your home cannot be written to: JupyterLab's files go to build/home."; }; \
	$(RUN) -m $(LAB) $(FIRST_PAGE) $(LAB_ARGS)

# What the stages are, and in which order they run, stands in tools/stages.py.
test: setup  ## Set up, then run every test, notebook, lab and solution
	@$(RUN) tools/stages.py test

quick: setup  ## What to run before each commit: rules, types, and the short tests that start no process
	@$(RUN) tools/stages.py quick

optional: setup  ## Add the optional packages, then run what `make test` skipped without them
	@$(RUN) tools/stages.py optional

style: setup  ## Rules, format, types and the direction of imports
	@$(RUN) tools/style.py

bytes: export CUDA_VISIBLE_DEVICES :=
bytes: setup  ## The tests of bytes alone, with whatever kernels the environment chooses
	@$(RUN) tools/soak.py bytes

soak: setup  ## What takes too long for each change: slow tests, other kernels, lessons one size up, clean states
	@$(RUN) tools/stages.py soak

# Threads of a kernel that wait for work sleep: spinning, they take the processors from other kernels.
course notebooks: export OMP_WAIT_POLICY := passive
course: setup  ## Set up, then run the whole course headless into build/course/
	@$(RUN) tools/course.py

bench: setup  ## Print each speed beside its budget
	@$(RUN) -m pytest evidence/benchmarks --benchmark-columns=median,iqr,rounds

validate: setup  ## Print predicted and simulated against published, source by source
	@$(RUN) -m evidence.validation
	@$(RUN) -m evidence.recorded
	@$(RUN) -m evidence.fit_peers

MODEL ?= Qwen/Qwen2.5-7B
CARD ?= RTX 4090
fit: setup  ## Say whether MODEL trains on CARD and what would make it fit; FIT_ARGS="--method qlora --tokens 4096"
	@$(RUN) -m utils.fitting "$(MODEL)" --card "$(CARD)" $(FIT_ARGS)

record: setup  ## Measure on this machine's device, write evidence/results/, and prove the paths of a GPU on it
	@$(RUN) tools/stages.py record

notebooks: setup  ## Build notebooks, labs and solutions from sources/
	@$(RUN) tools/build.py

my-labs: setup  ## Copy the labs into my_labs/, where you work on them
	@$(RUN) -m utils.labs

constraints: setup  ## Write the versions installed in .venv to constraints.txt
	@$(RUN) tools/constraints.py

badges: setup  ## Rewrite all badges from the address in pyproject.toml
	@$(RUN) tools/badges.py

site: setup  ## Build the site of all lessons into build/site, from the stored outputs
	@$(RUN) tools/extra.py site
	@$(RUN) tools/website.py

site-check: setup  ## Look at every page and deck in a browser: rules, links, widths, weights (CHECK_ARGS=--few: three)
	@$(RUN) tools/extra.py site
	@$(RUN) tools/site_check.py $(CHECK_ARGS)

slides: setup  ## Make a deck of slides from each lesson, in build/slides
	@$(RUN) tools/slides.py

ready:  ## Say whether this machine is ready for a course day
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) on this machine: install Python 3.11 or newer."; exit 1; }
	@$(PYTHON) tools/ready.py

wheelhouse: setup  ## Pack the course for machines without a network, into build/wheelhouse
	@$(RUN) tools/wheelhouse.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

FOLDER ?= handed_in
scores: setup  ## Collect the scoreboards in FOLDER into build/scores.csv
	@$(RUN) tools/scores.py "$(FOLDER)"

colab: setup  ## Run all lessons with the versions that Colab brings along
	@$(RUN) tools/colab_room.py make build/colab
	@$(RUN) tools/colab_room.py whole build/colab

links: setup  ## Ask every address in the course whether it is still there
	@$(RUN) tools/links.py

release: site wheelhouse  ## Pack site, wheelhouse and notebooks into build/release
	@$(RUN) tools/release.py
