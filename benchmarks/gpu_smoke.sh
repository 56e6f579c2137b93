#!/usr/bin/env bash
# The scripts, unchanged, on one CUDA GPU with a tiny random Llama: self-check, CUDA training,
# the draft served. Ends with SMOKE OK. Usage: benchmarks/gpu_smoke.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
W=${1:-/tmp/gpu-smoke}
PY=${PY:-python3}
mkdir -p "$W"
"$PY" -m tests.tiny_models "$W"
M="--model-path $W/tiny-llama"
"$PY" 01_prepare_data.py $M --dataset "$W/rows.jsonl" --output-dir "$W/prepared"
"$PY" 02_build_vocab_map.py $M --prepared-data "$W/prepared" --output-dir "$W/vocab" --draft-vocab-size 256
"$PY" 03_extract_hidden_states.py $M --prepared-data "$W/prepared" --output-dir "$W/hidden" --max-seq-len 512 --gpu-memory-utilization 0.3
"$PY" 04_train.py $M --prepared-data "$W/prepared" --vocab-map "$W/vocab" --hidden-states "$W/hidden" --output-dir "$W/draft" --epochs 3 --max-batch-tokens 2048 --device cuda
"$PY" tools/evaluate_draft.py $M --draft "$W/draft" --prompts "$W/rows.jsonl" --max-samples 40 --max-seq-len 512 --max-new-tokens 64 --hidden-states "$W/hidden" --output-dir "$W/evaluation" --gpu-memory-utilization 0.3
echo "SMOKE OK"
