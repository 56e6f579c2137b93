"""The verifier's own answers to a file of prompts, as exact output token ids.

A draft is accepted as often as its training data looks like the verifier's output, so
train on what the verifier says itself. Reads chat rows (an assistant turn at their end is
dropped) and writes OUTPUT_DIR/responses.jsonl, which 01 passes through: a line an answer with
id, messages (the answer's text and reasoning included), input_ids, loss_mask and finish_reason.
Asks vLLM in this process, or with --endpoint a running OpenAI-compatible server. Run the same
command again after a kill: what is answered is not asked twice.
"""

import contextlib
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import artifacts, cli, errors, progress
from common.manifest import Output, Stage

STAGE = "regenerate"
REFUSED = 20  # prompts of which not one could be asked: then the fault lies elsewhere
TOLD = 5  # refusals told one by one; all are counted


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path", "--output-dir", "--max-samples", "--max-seq-len", "--seed")
    p.add_argument(
        "--prompts",
        type=cli.path_text,
        nargs="+",
        metavar="DATA",
        help="rows as 01 reads them, with the same options",
    )
    p.add_argument(
        "--max-new-tokens",
        type=cli.positive_int,
        default=512,
        metavar="TOKENS",
        help="of an answer",
    )
    p.add_argument("--temperature", type=cli.between(0, 10), default=0.0, help="0 is greedy")
    p.add_argument("--top-p", type=cli.between(0.001, 1), default=1.0, help="nucleus sampling")
    p.add_argument(
        "--answers-per-prompt",
        type=cli.positive_int,
        default=1,
        metavar="N",
        help="over 1 needs --temperature over 0",
    )
    p.add_argument(
        "--all-turns",
        action="store_true",
        help="answer every turn, each after the verifier's own answers to those before",
    )
    p.add_common("--template-args")
    p.add_argument(
        "--endpoint",
        type=cli.path_text,
        metavar="URL",
        help="ask this server instead, as http://localhost:8000/v1 (OPENAI_API_KEY is its key)",
    )
    p.add_argument("--served-model", metavar="NAME", help="the server's (default: its only one)")
    p.add_argument("--concurrency", type=cli.counted(4096), default=64, help="requests at a time")
    p.add_argument("--retries", type=cli.whole_number, default=5, help="of a failed request")
    p.add_argument(
        "--request-timeout",
        type=cli.between(1, 1e6),
        default=1800,
        metavar="SECONDS",
        help="of an answer",
    )
    p.add_argument("--batch-size", type=cli.positive_int, default=128, help="answers at a time")
    p.add_common("--tp-size", "--gpu-memory-utilization", "--dtype", "--engine-args")
    p.add_common("--load-timeout")
    p.add_argument(
        "--skip-bad-rows", action="store_true", help="count and drop prompts that cannot be used"
    )
    p.add_common("--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--output-dir", "--prompts")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common.data import chat_template, prompts
    from common.data.conversations import CUT
    from common.data.sources import parse_sources, read_rows, sources_digest
    from common.regeneration import turns
    from common.verifier.config import load_verifier
    from common.verifier.fingerprint import fingerprint, tokenizer_fingerprint
    from common.verifier.weights import check_weights, identities

    model = load_verifier(args.model_path)
    sources = parse_sources(args.prompts, args.max_samples, "--prompts")
    artifacts.check_apart(out, args.model_path, *(f for s in sources for f in s.files))
    settings = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "answers_per_prompt": args.answers_per_prompt,
        "all_turns": args.all_turns,
        "template_args": args.template_args,
        "max_samples": args.max_samples,
        "max_seq_len": args.max_seq_len,
        "seed": args.seed,
        "dtype": args.dtype,
        "engine_args": args.engine_args,
        "endpoint": bool(args.endpoint),
        "served_model": args.served_model,
        "skip_bad_rows": args.skip_bad_rows,
        "end_ids": sorted(model.end_ids),
    }
    if args.answers_per_prompt > 1 and args.temperature == 0:
        raise errors.UserError("--answers-per-prompt over 1 needs --temperature over 0")
    inputs = {
        "prompts": sources_digest(sources),
        "tokenizer": tokenizer_fingerprint(args.model_path),
    }
    if args.endpoint:
        inputs["verifier"] = fingerprint(model)
    else:
        weights = check_weights(model)
        inputs |= identities(model, weights, out, args.dry_run)
    output = Output(out, Stage(STAGE, settings, inputs), args.overwrite)
    state = output.earlier_run()
    if state == "complete":
        progress.log(f"regenerate: {out} is complete (--overwrite makes it again)")
        return
    found = list(read_rows(sources, args.max_samples))
    parts = args.model_path, args.trust_remote_code, model.end_ids, args.template_args
    template = functools.cache(functools.partial(chat_template.load_template, *parts))
    longest = model.longest_sample(args.max_seq_len) - args.max_new_tokens
    usable, skipped = prompts.load_prompts(
        found, template, model.vocab_size, longest, args.skip_bad_rows, args.all_turns
    )
    asked = turns.conversations(usable, args.answers_per_prompt)
    if args.dry_run:
        progress.log(
            f"regenerate: dry run, {len(usable)} prompts ({skipped} skipped) x"
            f" {args.answers_per_prompt}, at most {args.max_new_tokens} tokens each, into {out};"
            " nothing was written"
        )
        return
    output.lock(state)

    # ---------------------------------------------------------------- ask
    answers = out / "responses.jsonl"
    done = {} if args.overwrite else turns.read_answers(answers, args.all_turns)
    before = len(done)

    names = [one.turn_names() for one in asked]
    unfinished = [one for one in asked if resumed(one, done)]
    ended: Counter[str] = Counter(one.final for one in done.values() if one.final)
    if unfinished:
        with backend(args, model, template, longest) as server:
            ask(args, server, unfinished, sum(map(len, names)), done, ended, answers, output)
    if args.all_turns:
        turns.join_turns(answers, names)

    # ---------------------------------------------------------------- report
    seconds = time.monotonic() - started
    reasons = Counter(one.finish_reason for one in done.values())
    tokens = sum(one.tokens for one in done.values())
    counts = {
        "prompts": len(usable),
        "skipped": skipped,
        "answers": len(done),
        "answer_tokens": tokens,
        **{f"finish_reason: {reason}": n for reason, n in sorted(reasons.items())},
        **{f"ended early: {reason}": n for reason, n in sorted(ended.items())},
    }
    digest = artifacts.sha256_file(answers)
    output.finish(counts, digest, seconds)
    ends = ", ".join(f"{reason} {n}" for reason, n in reasons.most_common())
    if ended:
        ends += "; ended early: " + ", ".join(f"{why} {n}" for why, n in ended.most_common())
    if reasons[CUT]:
        ends += f"; 01 leaves out those of {CUT}, unless --keep-unfinished"
    progress.log(
        f"regenerate: {len(done)} answers{f', {tokens} tokens' if tokens else ''} (finish reasons:"
        f" {ends}); this run {len(done) - before} in {progress.duration(seconds)} -> {answers}"
    )


def resumed(asked, done) -> bool:
    """Move a conversation past the turns already answered; returns whether one is left."""
    while asked.key in done:
        if not asked.take(done[asked.key]):
            return False
    return True


def ask(args, server, conversations, turns: int, done, ended, path: Path, output: Output) -> None:
    """Have every conversation answered to its end, adding each answer to `done` and the file,
    and to `ended` why one could not go on; the folder is this run's from the first on."""
    from common.regeneration.turns import Done, Refusal, line_of, turn_summary

    at_once = args.concurrency if args.endpoint else args.batch_size
    bar = progress.Progress("regenerate", turns, "answers", len(done), at_once)
    stopper = progress.Stopper()
    waiting, asked = list(reversed(conversations)), dict[str, Any]()
    refused, f = 0, None
    with contextlib.ExitStack() as stack:
        while (waiting or asked) and not stopper.code:
            while waiting and server.room() > 0 and not stopper.code:
                one = waiting.pop()
                asked[one.key] = one
                # by its place among all, so that a resumed run asks as an unbroken one would
                seed = args.seed + one.number + 1_000_003 * one.turn if args.temperature else None
                server.put(one, seed)
            for answer in server.answers():
                one = asked.pop(answer.key)
                if isinstance(answer, Refusal):
                    ended[answer.reason] += 1
                    refused += 1
                    if refused <= TOLD:
                        progress.log(f"regenerate: {answer.key}: {answer.reason}: {answer.detail}")
                    if not done and (refused == REFUSED or not (waiting or asked)):
                        raise errors.UserError(
                            f"{answer.key}: {answer.reason}: {answer.detail}; the first"
                            f" {refused} prompts all failed"
                        )
                    continue
                if f is None:
                    output.empty()
                    output.begin()
                    f = stack.enter_context(open(path, "a", encoding="utf-8"))
                line = line_of(one, answer)
                f.write(json.dumps(line) + "\n")
                f.flush()
                messages = line.get("messages", []) if one.later else []
                _, tokens, reason = turn_summary(line)
                done[answer.key] = Done(messages, tokens, reason, line.get("final", ""))
                ended.update([line["final"]] if "final" in line else [])
                bar.add(1)
                if one.take(done[answer.key]):
                    waiting.append(one)
    bar.close()
    if waiting or asked:
        raise errors.Interrupted(
            stopper.code, f"{len(done)} answers are in {path}; {errors.again()}"
        )


# ---------------------------------------------------------------- who is asked


def backend(args, model, template, longest: int) -> Any:
    """vLLM in this process, or a server; a context manager."""
    if not args.endpoint:
        return own_engine(args, model, template, longest)
    from common.regeneration.endpoint import Endpoint

    body: dict[str, Any] = {
        "max_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
    }
    return contextlib.closing(
        Endpoint(
            args.endpoint,
            args.served_model,
            args.concurrency,
            args.retries,
            args.request_timeout,
            args.template_args,
            body,
        )
    )


@contextlib.contextmanager
def own_engine(args, model, template, longest: int) -> Iterator["Engine"]:
    """vLLM in this process, ended with the context."""
    from common.verifier import engine

    with engine.generating(args, model, "regenerate") as llm:
        yield Engine(llm, args, model, template, longest)


class Engine:
    """vLLM in this process and the questions under way in it."""

    def __init__(self, llm, args, model, template, longest: int):
        self.engine, self.args, self.model = llm.llm_engine, args, model
        self.template, self.longest = template, longest
        self._asked: dict[str, tuple[Any, list[int]]] = {}
        self._refused: list[Any] = []

    def room(self) -> int:
        """How many more questions may be put: enough to fill the next passes, few enough for a
        later turn not to queue behind all first ones."""
        return 2 * self.args.batch_size - len(self._asked)

    def put(self, asked, seed: int | None) -> None:
        """Ask a conversation's turn, or note why it cannot be asked."""
        from vllm import SamplingParams

        from common.data.conversations import RowError
        from common.regeneration.turns import Refusal

        ids = asked.input_ids
        if asked.turn:
            try:
                ids = self.template().prompt_ids(asked.messages, asked.tools)
            except RowError as e:
                self._refused.append(Refusal(asked.key, e.reason, str(e)))
                return
        if len(ids) > self.longest:
            detail = f"{len(ids)} tokens, over {self.longest} (--max-seq-len less --max-new-tokens)"
            self._refused.append(Refusal(asked.key, "prompt grown too long", detail))
            return
        self._asked[asked.key] = asked, ids
        params = SamplingParams(
            max_tokens=self.args.max_new_tokens,
            temperature=self.args.temperature,
            top_p=self.args.top_p,
            stop_token_ids=list(self.model.end_ids),
            detokenize=False,
            seed=seed,
        )
        self.engine.add_request(asked.key, {"prompt_token_ids": ids}, params)

    def answers(self) -> list:
        """Run a step; what it has finished, and what was refused since the last."""
        from common.regeneration.turns import Answer, split_reasoning

        found, self._refused = self._refused, []
        for output in self.engine.step() if self._asked else []:
            if not output.finished:
                continue
            key, ids = output.request_id, list(output.outputs[0].token_ids)
            asked, prompt = self._asked.pop(key)
            text = reasoning = final = ""
            if asked.messages:
                spoken = ids[:-1] if ids and ids[-1] in self.model.end_ids else ids
                reasoning, text = split_reasoning(self.template().tokenizer.decode(spoken))
                if asked.later and self.template().has_special_tokens(text):
                    # a call of tools, say, which the template renders from other fields
                    final = "answer with special tokens"
            reason = output.outputs[0].finish_reason
            found.append(Answer(key, prompt, ids, text, reasoning, reason, final=final))
        return found


if __name__ == "__main__":
    errors.run(main)
