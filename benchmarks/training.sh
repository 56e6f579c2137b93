#!/usr/bin/env bash
# Stage 4 against speculators' trainer on one GPU, at the shape of Kimi-K2.5's draft, all in one
# run: the step (frozen and trained head, 3 and 7 depths), then all of the stage, from files to
# checkpoint, over 10 epochs of 1000 samples (503,619 tokens, 72 % with loss). Prints JSON lines.
# Usage: [PARTS="step stage"] benchmarks/training.sh FAST_DIR DISK_DIR
# FAST_DIR is a RAM disk of 70 GB. PARTS: step, depths7, files (which the rest makes if need be),
# stage, stage-float8, peer-stage.
set -euo pipefail
cd "$(dirname "$0")/.."
FAST=$1 DISK=$2 PY=${PY:-python3}
MODEL=$FAST/kimi8 SHAPE='"intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128'
timed() { # NAME COMMAND...
    local name=$1 started=$(date +%s%3N)
    shift
    "$@" > "$DISK/$name.log" 2>&1 || { tail -5 "$DISK/$name.log"; return 1; }
    echo "{\"what\": \"$name\", \"seconds\": $((($(date +%s%3N) - started) / 1000))}"
}
files() { # a random verifier of eight layers, data, map and hidden states, by 02 and 03
    [ ! -f "$FAST/hidden/data_config.json" ] || return 0
    "$PY" benchmarks/extraction.py model kimi8 "$MODEL"
    "$PY" benchmarks/extraction.py data "$FAST/data"
    timed vocab "$PY" 02_build_vocab_map.py --model-path "$MODEL" --prepared-data "$FAST/data" \
        --output-dir "$FAST/map" --draft-vocab-size 32000
    timed extract "$PY" 03_extract_hidden_states.py --model-path "$MODEL" --layers 2 4 5 7 \
        --prepared-data "$FAST/data" --output-dir "$FAST/hidden" --gpu-memory-utilization 0.85
}
steps() { # FLAGS: four processes that compile side by side and are timed one after another
    local together="--together $(mktemp -d) 4" ours="benchmarks/train_step.py --rule next"
    "$PY" benchmarks/peer_training.py $1 $together &
    "$PY" $ours $1 $together --profile --no-train-lm-head &
    "$PY" $ours $1 $together &
    "$PY" $ours $1 $together --profile --float8 &
    for job in $(jobs -p); do wait "$job"; done
}
mkdir -p "$FAST" "$DISK"
for part in ${PARTS:-step depths7 stage stage-float8 peer-stage}; do
    case $part in
    step) steps "" ;;
    files) files ;;
    depths7) steps "--ttt-steps 7 --tokens 4096" ;;
    stage | stage-float8)
        files
        [ $part = stage ] && more=() || more=(--float8)
        timed "$part" "$PY" 04_train.py --model-path "$MODEL" --layers 2 4 5 7 \
            --prepared-data "$FAST/data" --vocab-map "$FAST/map" --hidden-states "$FAST/hidden" \
            --output-dir "$DISK/$part" "${more[@]}" --epochs 10 --lr 1e-4 --heldout-fraction 0 \
            --save-every 100000 --draft-shape "{$SHAPE, \"rope_theta\": 1e6, \"rms_norm_eps\": 1e-6}"
        tail -1 "$DISK/$part.log"
        rm -r "$DISK/$part"
        ;;
    peer-stage)
        files
        "$PY" tools/speculators_layout.py --prepared-data "$FAST/data" --vocab-map "$FAST/map" \
            --hidden-states "$FAST/hidden" --output-dir "$FAST/layout" | tail -1
        echo "{\"model_type\": \"llama\", \"hidden_size\": 7168, \"vocab_size\": 163840, $SHAPE,
            \"num_hidden_layers\": 1, \"max_position_embeddings\": 8192}" > "$FAST/draft.json"
        # the verifier has no tokenizer to take a mask token from; one checkpoint, at the end
        timed peer-train "$PY" benchmarks/peer_trainer.py --speculator-type eagle3 \
            --verifier-name-or-path "$MODEL" --draft-config "$FAST/draft.json" \
            --target-layer-ids 3 5 6 --data-path "$FAST/layout" --draft-vocab-size 32000 \
            --mask-token-id 0 --on-missing raise --epochs 10 --checkpoint-freq 10 \
            --train-data-ratio 0.999 --optimizer adamw --save-path "$DISK/peer"
        ;;
    esac
done
