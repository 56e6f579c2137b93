#!/usr/bin/env bash
# Format, lint, types, the rooms' imports, then the whole test suite (real vLLM on the CPU included), on two cores.
# Arguments go to pytest: ./run_tests.sh -k loss_table
set -euo pipefail
cd "$(dirname "$0")"
tools/setup_venv.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/lint-imports pyproject.toml --no-logo
[ -f models/smollm2-135m-instruct/config.json ] ||
    .venv/bin/python tools/make_smollm2.py --output-dir models/smollm2-135m-instruct
exec .venv/bin/python -m pytest -q -rs -n 2 --durations=15 "$@"
