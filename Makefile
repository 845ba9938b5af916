# Every target sets up .venv by itself and has a twin that needs no make: python -m cbserve <target>
# The logic lives in cbserve/bootstrap.py, so that both ways do the same.
#
#   PYTHON=python3.12     the interpreter to make .venv from (3.11 to 3.13)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu    take torch from there (a small CPU build)
#   ARGS="..."            passed on: make lab ARGS="--no-browser", make test ARGS="-k scheduler"

SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $$p && break; done)
export TORCH_INDEX

.PHONY: help lab test test-fast demo notebooks lint clean
help:
	@echo "make lab        open the course in JupyterLab"
	@echo "make test       run every test (at most 30 minutes on two cores)"
	@echo "make test-fast  run the unit tests (two minutes on two cores)"
	@echo "make demo       static against continuous batching, in this terminal"
	@echo "make notebooks  build every notebook from its source"
	@echo "make lint       ruff and mypy"
	@echo "make clean      remove .venv and caches; work/ and the model stay"

lab test test-fast demo notebooks lint clean:
	@$(if $(PYTHON),,echo "cbserve needs Python 3.11 to 3.13, and none is on PATH: make $@ PYTHON=/path/to/python3.12" >&2; exit 2;) \
	$(PYTHON) -m cbserve $@ $(ARGS)
