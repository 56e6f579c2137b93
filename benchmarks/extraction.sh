#!/usr/bin/env bash
# Stage 3 against vLLM's plain prefill on one GPU, all in one run: a random verifier of a real
# shape (llama8b or kimi8), 1000 samples, 503,619 tokens. Prints a JSON line per measurement.
# Usage: [PARTS="plain ram"] [TP=2] benchmarks/extraction.sh KIND FAST_DIR DISK_DIR
# FAST_DIR is a RAM disk of 70 GB. PARTS: plain, ram, disk (its write rate before and after the
# extraction), four (samples per batch), fp8, peer.
set -euo pipefail
cd "$(dirname "$0")/.."
KIND=$1 FAST=$2 DISK=$3 TP=${TP:-1}
PY=${PY:-python3}
case $KIND in llama8b) LAYERS="2 16 29 31" ;; kimi8) LAYERS="2 4 5 7" ;; esac
"$PY" benchmarks/extraction.py model "$KIND" "$FAST/$KIND"
"$PY" benchmarks/extraction.py data "$FAST/data"
"$PY" benchmarks/extraction.py touch "$FAST/touch" --gigabytes 30
extract() { # NAME FOLDER FLAGS...
    local name=$1 folder=$2
    shift 2
    "$PY" 03_extract_hidden_states.py --model-path "$FAST/$KIND" --prepared-data "$FAST/data" \
        --output-dir "$folder" --layers $LAYERS --gpu-memory-utilization 0.85 --tp-size "$TP" "$@" > "$FAST/$name.log" 2>&1 ||
        { tail -5 "$FAST/$name.log"; return 1; }
    grep -E "self-check|loaded" "$FAST/$name.log"
    "$PY" benchmarks/extraction.py report "$folder" "$name"
    cp "$folder/journal.jsonl" "$FAST/$name.journal"
    rm -r "$folder"
}
echo "== $KIND"
for part in ${PARTS:-plain ram disk four fp8}; do
    case $part in
    plain) "$PY" benchmarks/extraction.py plain "$FAST/$KIND" "$FAST/data" --tp-size "$TP" 2> /dev/null | grep -v INFO ;;
    ram) extract ram-disk "$FAST/hidden" ;;
    disk)
        "$PY" benchmarks/extraction.py disk "$DISK/rate" --gigabytes 29
        extract disk "$DISK/hidden"
        "$PY" benchmarks/extraction.py disk "$DISK/rate" --gigabytes 29
        ;;
    four) extract four-samples "$FAST/hidden" --batch-size 4 ;;
    peer) "$PY" benchmarks/peer_extraction.py "$FAST/$KIND" "$FAST/data" "$FAST/peer" --layers $LAYERS 2> "$FAST/peer.log" || tail -3 "$FAST/peer.log" ;;
    fp8) extract fp8 "$FAST/hidden" --storage-dtype fp8 ;;
    esac
done
