#!/usr/bin/env bash
# Drafts for the embedded verifier, trained side by side on one GPU from the same files over the
# same epochs: this project's, in bfloat16 and float8, and that of `speculators train` with its
# defaults. Rows differ: 2048 tokens here, 8192 there.
# Usage: benchmarks/embedded_peer.sh RESPONSES.jsonl FOLDER [EPOCHS]
# run_pipeline.sh makes RESPONSES.jsonl and models/smollm2-135m-instruct. The drafts are FOLDER/ours,
# FOLDER/ours-float8 and FOLDER/theirs; compare them with tools/evaluate_draft.py and
# benchmarks/paired_acceptance.py.
set -euo pipefail
cd "$(dirname "$0")/.."
RESPONSES=$1 W=$2 EPOCHS=${3:-4} PY=${PY:-python3}
C="--config configs/smollm2-135m.yaml"
stage() { # NAME COMMAND...
    local name=$1 started=$(date +%s%3N)
    shift
    "$PY" "$@" > "$W/$name.log" 2>&1 || { tail -5 "$W/$name.log"; return 1; }
    echo "$name: $((($(date +%s%3N) - started) / 1000)) s; $(tail -1 "$W/$name.log")"
}
mkdir -p "$W"
stage prepare 01_prepare_data.py $C --dataset "$RESPONSES" --output-dir "$W/prepared"
stage vocab 02_build_vocab_map.py $C --prepared-data "$W/prepared" --output-dir "$W/map"
stage extract 03_extract_hidden_states.py $C --prepared-data "$W/prepared" --output-dir "$W/hidden" \
    --gpu-memory-utilization 0.3
INPUTS="--prepared-data $W/prepared --vocab-map $W/map --hidden-states $W/hidden"
stage layout tools/speculators_layout.py $INPUTS --output-dir "$W/layout"
stage ours 04_train.py $C $INPUTS --output-dir "$W/ours" --epochs "$EPOCHS" &
stage ours-float8 04_train.py $C $INPUTS --output-dir "$W/ours-float8" --epochs "$EPOCHS" --float8 &
# as much is held out as here; layers 2, 15, 27 are its ids 3, 16, 28
stage theirs benchmarks/peer_trainer.py --speculator-type eagle3 --data-path "$W/layout" \
    --verifier-name-or-path models/smollm2-135m-instruct --target-layer-ids 3 16 28 \
    --draft-vocab-size 8192 --on-missing raise --train-data-ratio 0.95 --epochs "$EPOCHS" \
    --save-path "$W/theirs" &
for job in $(jobs -p); do wait "$job"; done
