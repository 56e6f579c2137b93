#!/usr/bin/env bash
# The whole job: the verifier's own answers -> 01 -> 02 -> 03 -> 04 -> the draft in real vLLM.
# Without arguments: SmolLM2-135M on this machine's CPU, no GPU, no model hub, about 20 minutes.
# Another verifier: CONFIG=configs/x.yaml PROMPTS=p.jsonl EVAL_PROMPTS=q.jsonl ./run_pipeline.sh
# Finished stages are skipped (each script sees for itself); RUN=folder keeps runs apart.
set -euo pipefail
cd "$(dirname "$0")"

CONFIG=${CONFIG:-configs/smollm2-135m.yaml}
RUN=${RUN:-run/$(basename "$CONFIG" .yaml)}
PY=${PY:-}

if [ -z "$PY" ]; then
    tools/setup_venv.sh
    PY=.venv/bin/python
fi
if [ "$CONFIG" = configs/smollm2-135m.yaml ]; then
    [ -f models/smollm2-135m-instruct/config.json ] ||
        "$PY" tools/make_smollm2.py --output-dir models/smollm2-135m-instruct
fi

# A stage runs beside this shell, which passes a signal on and waits until the stage has saved.
child=
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT
stage() {
    local status=0
    "$PY" "$@" &
    child=$!
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal has ended the wait, not the stage
        status=0
        wait "$child" || status=$?
    done
    child=
    return "$status"
}

stage tools/regenerate_responses.py --config "$CONFIG" ${PROMPTS:+--prompts "$PROMPTS"} --output-dir "$RUN/responses"
stage 01_prepare_data.py --config "$CONFIG" --dataset "$RUN/responses/responses.jsonl" --output-dir "$RUN/prepared"
stage 02_build_vocab_map.py --config "$CONFIG" --prepared-data "$RUN/prepared" --output-dir "$RUN/vocab_map"
stage 03_extract_hidden_states.py --config "$CONFIG" --prepared-data "$RUN/prepared" --output-dir "$RUN/hidden_states"
stage 04_train.py --config "$CONFIG" --prepared-data "$RUN/prepared" --vocab-map "$RUN/vocab_map" --hidden-states "$RUN/hidden_states" --output-dir "$RUN/draft"
stage tools/evaluate_draft.py --config "$CONFIG" --draft "$RUN/draft" ${EVAL_PROMPTS:+--prompts "$EVAL_PROMPTS"} --hidden-states "$RUN/hidden_states" --output-dir "$RUN/evaluation"
