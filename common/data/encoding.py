"""Rows → tokenized samples, on all cores, in the rows' order and constant memory."""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.data.chat_template import Encoded, Template, load_template
from common.data.conversations import CUT, NO_ANSWER, RowError, bad_row, messages_of, tools_of
from common.data.samples import SEPARATOR, check_sample, conversation_id
from common.data.sources import Row
from common.errors import UserError

# Rows that a worker is handed at once: enough to hide the hand-over, few enough to fill all.
CHUNK = 64
# Fewer rows than this are encoded sooner than other processes are ready.
FEW = 1024


@dataclass(frozen=True)
class Rules:
    """How rows become samples; everything that decides the ids but the tokenizer's files.

    long: what becomes of a sample of more than `longest` tokens: cut, drop or split.
    """

    model_path: str
    trust_remote_code: bool
    vocab_size: int
    end_ids: tuple[int, ...]
    longest: int
    long: str = "cut"
    template_args: dict[str, Any] = field(default_factory=dict)
    keep_unfinished: bool = False
    skip_bad_rows: bool = False


class Line(NamedTuple):
    """A sample as written, the hash of its ids and mask, its tokens, and those with loss."""

    text: str
    content: bytes
    tokens: int
    loss_tokens: int


@dataclass(frozen=True)
class EncodedRow:
    """A row's samples, and what befell it, to be counted."""

    lines: list[Line]
    counts: Counter[str]


class RowEncoder:
    """Turns rows into samples."""

    def __init__(self, rules: Rules):
        self.rules = rules

    @functools.cached_property
    def template(self) -> Template:
        """Loaded at the first chat row, for tokenized rows need none."""
        r = self.rules
        return load_template(r.model_path, r.trust_remote_code, r.end_ids, r.template_args)

    def encode(self, row: Row) -> EncodedRow:
        """UserError for a row that is no conversation, unless bad rows are skipped."""
        counts: Counter[str] = Counter(rows=1)
        try:
            samples = self._encode(row, counts)
        except RowError as e:
            counts[f"dropped: {e.reason}"] += 1
            if e.malformed and not self.rules.skip_bad_rows:
                raise UserError(
                    f"{row.where}: {e}; mend the row, or pass --skip-bad-rows"
                ) from None
            return EncodedRow([], counts)
        return EncodedRow([line_of(sample) for sample in samples], counts)

    def _encode(self, row: Row, counts: Counter[str]) -> list[dict[str, Any]]:
        value, rules = row.value, self.rules
        reason = value.get("finish_reason")
        if reason == CUT and not rules.keep_unfinished:
            counts["dropped: answer cut by the length limit"] += 1
            return []
        if reason in NO_ANSWER:
            counts[f"dropped: finish_reason {reason}"] += 1
            return []
        if "input_ids" in value or "loss_mask" in value:
            try:
                ids, mask = check_sample(value, row.where, rules.vocab_size)
            except UserError:
                if not rules.skip_bad_rows:
                    raise
                raise bad_row("broken tokenized row") from None
            encoded = [Encoded(ids.tolist(), mask.astype(int).tolist())]
            known: Any = encoded[0].input_ids
        else:
            messages = known = messages_of(value, row.form)
            encoded = self.template.encode(messages, tools_of(value))
        # the same conversation has the same name, wherever it stands
        name = value.get("id")
        if name is None:
            name = conversation_name(known)
        elif reason is None:  # not an answer of ours, whose names are of one conversation
            name = conversation_id(name)
        name = str(name)
        samples = []
        for one in encoded:
            counts.update(one.notes)
            samples += self._fit(one, counts)
        several = len(samples) > 1
        return [
            {"id": f"{name}{SEPARATOR}{k}" if several else name, **sample}
            for k, sample in enumerate(samples)
        ]

    def _fit(self, one: Encoded, counts: Counter[str]) -> list[dict[str, Any]]:
        """The sample within the length limit, as none, one or several."""
        rules, size = self.rules, len(one.input_ids)
        if size > rules.longest:
            counts[f"long: {rules.long}"] += 1
        if size > rules.longest and rules.long == "drop":
            return []
        ends = range(0, size, rules.longest) if rules.long == "split" else [0]
        samples = []
        for start in ends:
            part = slice(start, start + rules.longest)
            ids, mask = one.input_ids[part], one.loss_mask[part]
            if not any(mask):
                counts["dropped: no loss tokens"] += 1
                continue
            if mask[-1] and ids[-1] not in rules.end_ids:
                counts["note: answers without an end-of-turn token"] += 1
            samples.append({"input_ids": ids, "loss_mask": mask})
        return samples


def line_of(sample: dict[str, Any]) -> Line:
    ids, mask = sample["input_ids"], sample["loss_mask"]
    content = hashlib.blake2b(array("q", ids).tobytes() + bytes(mask), digest_size=16).digest()
    return Line(json.dumps(sample) + "\n", content, len(ids), sum(mask))


def conversation_name(content: Any) -> str:
    """Name of a conversation without an id, by its content."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- on all cores


_encoder: RowEncoder


def start_worker(rules: Rules, main: int) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    threading.Thread(target=end_with, args=(main,), daemon=True).start()
    _encoder = RowEncoder(rules)


def end_with(main: int) -> None:
    """End this process when the main one, which is not its parent, is gone (by SIGKILL, say)."""
    while os.path.exists(f"/proc/{main}"):
        time.sleep(1)
    os._exit(1)


def encode_chunk(rows: list[Row]) -> list[EncodedRow]:
    return [_encoder.encode(row) for row in rows]


def encode_rows(rules: Rules, rows: Iterator[Row], workers: int) -> Iterator[EncodedRow]:
    """Encode rows on several processes, in their order; at most a few chunks of them a worker
    are under way."""
    first = list(itertools.islice(rows, FEW))
    rows = itertools.chain(first, rows)
    if workers == 1 or len(first) < FEW:
        yield from map(RowEncoder(rules).encode, rows)
        return
    chunks = iter(lambda: list(itertools.islice(rows, CHUNK)), [])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, context, start_worker, (rules, os.getpid()))
    try:
        under_way: deque[Future[list[EncodedRow]]] = deque()
        for chunk in chunks:
            under_way.append(pool.submit(encode_chunk, chunk))
            if len(under_way) >= 3 * workers:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process died (out of memory?); run again, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ---------------------------------------------------------------- for a person's eyes


def show(rules: Rules, rows: Iterator[Row], count: int) -> None:
    """Print the first samples decoded: loss tokens coloured on a terminal, elsewhere within
    guillemets."""
    encoder = RowEncoder(rules)
    before, after = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("«", "»")
    shown = (line for row in rows for line in encoder.encode(row).lines)
    empty = True
    for line in itertools.islice(shown, count):
        sample = json.loads(line.text)
        text = f"--- {sample['id']}: {len(sample['input_ids'])} tokens\n"
        pairs = zip(sample["input_ids"], sample["loss_mask"], strict=True)
        for loss, run in itertools.groupby(pairs, key=lambda x: x[1]):
            part = encoder.template.tokenizer.decode([token for token, _ in run])
            text += f"{before}{part}{after}" if loss else part
        print(text, flush=True)
        empty = False
    if empty:
        print("not one sample in these rows; without --show the last line says why")
