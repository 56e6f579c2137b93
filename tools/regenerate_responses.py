"""The verifier's own answers to a file of prompts, as exact output token ids.

A draft is accepted as often as its training data looks like the verifier's output, so
train on what the verifier says itself. Reads chat rows (the last assistant turn, if any,
is dropped), writes OUTPUT_DIR/responses.jsonl: a line an answer with id, messages (the
answer's text included), input_ids, loss_mask and finish_reason, which 01 passes through.
Run the same command again after a kill: prompts already answered are not asked twice.
"""

import functools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import artifacts, cli, progress

STAGE = "regenerate"


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path", "--output-dir", "--max-samples", "--max-seq-len", "--seed")
    p.add_argument("--prompts", nargs="+", metavar="FILE", help=".json, .jsonl or .parquet rows")
    p.add_argument("--max-new-tokens", type=cli.positive_int, default=512, metavar="TOKENS")
    p.add_argument("--temperature", type=cli.between(0, 10), default=0.0, help="0 is greedy")
    p.add_argument("--top-p", type=cli.between(0.001, 1), default=1.0)
    p.add_argument(
        "--answers-per-prompt",
        type=cli.positive_int,
        default=1,
        metavar="N",
        help="over 1 needs --temperature over 0",
    )
    p.add_argument("--tp-size", type=cli.positive_int, default=1, metavar="GPUS")
    p.add_argument("--batch-size", type=cli.positive_int, default=128, help="answers at a time")
    p.add_argument("--gpu-memory-utilization", type=cli.between(0.01, 1), default=0.9)
    p.add_argument("--dtype", default="auto", choices=cli.DTYPES)
    p.add_argument("--engine-args", type=cli.json_object, default={}, metavar="JSON")
    p.add_argument("--skip-bad-rows", action="store_true", help="count and drop bad prompts")
    p.add_common("--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--output-dir", "--prompts")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common import chat, prompts, rows, samples, verifier

    model = verifier.load_verifier(args.model_path)
    sources = rows.parse_sources(args.prompts, args.max_samples)
    artifacts.check_apart(out, args.model_path, *(f for s in sources for f in s.files))
    settings = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "answers_per_prompt": args.answers_per_prompt,
        "max_samples": args.max_samples,
        "max_seq_len": args.max_seq_len,
        "seed": args.seed,
        "dtype": args.dtype,
        "engine_args": args.engine_args,
        "skip_bad_rows": args.skip_bad_rows,
    }
    if args.answers_per_prompt > 1 and args.temperature == 0:
        raise cli.UserError("--answers-per-prompt over 1 needs --temperature over 0")
    inputs = {
        "prompts": rows.digest(sources),
        "verifier": verifier.fingerprint(model),
        "verifier_weights": verifier.weights_fingerprint(model),
    }
    state = artifacts.earlier_run(out, STAGE, settings, inputs, args.overwrite)
    if state == "complete":
        progress.log(f"regenerate: {out} is complete (--overwrite makes it again)")
        return
    found = list(rows.read_rows(sources, args.max_samples))

    @functools.cache
    def template():
        tokenizer = chat.load_tokenizer(args.model_path, args.trust_remote_code)
        return chat.Template(tokenizer, model.end_ids)

    longest = min(args.max_seq_len, (model.max_positions or 2**31) - 1) - args.max_new_tokens
    usable, skipped = prompts.load_prompts(
        found, template, model.vocab_size, longest, args.skip_bad_rows
    )
    count = args.answers_per_prompt
    asked = {
        f"{p.id}{samples.SEPARATOR}{k}" if count > 1 else p.id: p
        for p in usable
        for k in range(count)
    }
    if args.dry_run:
        progress.log(
            f"regenerate: dry run, {len(usable)} prompts ({skipped} skipped) x {count}, at most"
            f" {args.max_new_tokens} tokens each, into {out}; nothing was written"
        )
        return
    artifacts.hold_output(out, STAGE, settings, inputs, args.overwrite, state)
    report = functools.partial(artifacts.report, STAGE, settings, inputs)

    # ---------------------------------------------------------------- ask
    answers = out / "responses.jsonl"
    done = {} if args.overwrite else read_answers(answers)

    def begin() -> None:
        """The verifier is up: from here on the folder is this run's."""
        if args.overwrite:
            artifacts.empty_output(out)
        if state == "none":
            artifacts.write_json(out / artifacts.REPORT, report({}, None, 0))

    if len(done) < len(asked):
        ask(args, model, template, asked, done, answers, begin)
    tokens = sum(done.values())

    # ---------------------------------------------------------------- report
    seconds = time.monotonic() - started
    counts = {
        "prompts": len(usable),
        "skipped": skipped,
        "answers": len(asked),
        "answer_tokens": tokens,
    }
    digest = artifacts.sha256_file(answers)
    artifacts.write_json(out / artifacts.REPORT, report(counts, digest, seconds))
    progress.log(
        f"regenerate: {len(asked)} answers, {tokens} tokens in {progress.duration(seconds)}"
        f" -> {answers}"
    )


def ask(args, model, template, asked, done, answers: Path, begin) -> None:
    """Let vLLM answer what `done` lacks, adding each answer to it and to the file."""
    from common import engine

    engine.prepare_environment(args.tp_size)
    from vllm import SamplingParams

    engine_args = engine.generation_engine_args(
        model,
        tp_size=args.tp_size,
        max_seq_len=args.max_seq_len,
        batch_size=args.batch_size,
        dtype=args.dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        trust_remote_code=args.trust_remote_code,
    )
    with engine.running(engine_args, args.engine_args, "regenerate") as llm:
        begin()
        bar = progress.Progress("regenerate", len(asked), "answers", initial=len(done))
        stopper = progress.Stopper()
        for n, (key, prompt) in enumerate(asked.items()):
            if key in done:
                continue
            params = SamplingParams(
                max_tokens=args.max_new_tokens,
                temperature=args.temperature,
                top_p=args.top_p,
                stop_token_ids=list(model.end_ids),
                detokenize=False,
                # by its place among all, so that a resumed run asks as an unbroken one would
                seed=None if args.temperature == 0 else args.seed + n,
            )
            llm.llm_engine.add_request(key, {"prompt_token_ids": prompt.input_ids}, params)
        with open(answers, "a", encoding="utf-8") as f:
            while llm.llm_engine.has_unfinished_requests() and not stopper.code:
                for output in llm.llm_engine.step():
                    if not output.finished:
                        continue
                    line = answer_line(output, asked[output.request_id], template)
                    f.write(json.dumps(line) + "\n")
                    f.flush()
                    done[line["id"]] = sum(line["loss_mask"])
                    bar.add(1)
        bar.close()
    if stopper.code and len(done) < len(asked):
        raise cli.Interrupted(stopper.code, f"{len(done)} answers are in {answers}; run again")


def answer_line(output, prompt, template) -> dict:
    """The line of a finished request: its messages with the answer, and the exact ids."""
    answer = list(output.outputs[0].token_ids)
    line = {
        "id": output.request_id,
        "input_ids": prompt.input_ids + answer,
        "loss_mask": [0] * len(prompt.input_ids) + [1] * len(answer),
        "finish_reason": output.outputs[0].finish_reason,
    }
    if prompt.messages:
        text = template().tokenizer.decode(answer, skip_special_tokens=True)
        line["messages"] = [*prompt.messages, {"role": "assistant", "content": text}]
    return line


def read_answers(path: Path) -> dict[str, int]:
    """Ids already answered → answer tokens; cuts off a last line that a kill left unfinished."""
    done: dict[str, int] = {}
    if not path.exists():
        return done
    good = 0
    with open(path, "rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                break
            try:
                row = artifacts.decode_json(line)
                done[row["id"]] = sum(row["loss_mask"])
            except (ValueError, TypeError, KeyError) as e:
                raise cli.UserError(
                    f"{path}: the line after byte {good} is damaged ({e}); delete that line (its"
                    " prompt is asked again) and run the same command"
                ) from None
            good += len(line)
    with open(path, "r+b") as f:
        f.truncate(good)
    return done


if __name__ == "__main__":
    cli.run(main)
