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
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.data.chat_template import Encoded, Template
from common.data.conversations import CUT, NO_ANSWER, RowError, bad_row, messages_of, tools_of
from common.data.loops import Loops, count_loops
from common.data.rendering import load_template
from common.data.samples import SEPARATOR, check_sample, conversation_id, conversation_name
from common.data.settings import PrepareSettings
from common.data.sources import Row
from common.errors import UserError
from common.verifier.config import Verifier

# Rows handed to a worker in one piece: enough to hide the hand-over, few enough to fill all.
ROWS_PER_CHUNK = 64
# Fewer rows than this are encoded sooner than other processes are ready.
FEW = 1024


class SampleLine(NamedTuple):
    """A sample as written, the hash of its ids and mask, its tokens, and its answers, whose tokens
    are those with loss."""

    text: str
    content: bytes
    tokens: int
    answers: Loops


@dataclass(frozen=True)
class EncodedRow:
    """A row's samples, and what became of it, to be counted ("rows", "dropped: ..", "long: ..",
    "note: ..")."""

    lines: list[SampleLine]
    counts: Counter[str]


class RowEncoder:
    """Turns rows into samples, as the settings say; `settings.date` is the template's today."""

    def __init__(self, settings: PrepareSettings, verifier: Verifier):
        self.settings, self.verifier = settings, verifier
        self.longest = verifier.longest_sample(settings.max_seq_len)

    @functools.cached_property
    def template(self) -> Template:
        """Loaded at the first chat row, for tokenized rows need none."""
        s = self.settings
        return load_template(
            s.model_path, s.trust_remote_code, self.verifier.end_ids, s.template_args, s.date
        )

    def encode(self, row: Row) -> EncodedRow:
        """UserError for a row that is no conversation, unless bad rows are skipped."""
        counts: Counter[str] = Counter(rows=1)
        try:
            samples = self.samples_of(row, counts)
        except RowError as e:
            counts[f"dropped: {e.reason}"] += 1
            if e.malformed and not self.settings.skip_bad_rows:
                raise UserError(
                    f"{row.where}: {e}; fix or remove the row, or pass --skip-bad-rows"
                ) from None
            samples = []
        return EncodedRow([line_of(sample) for sample in samples], counts)

    def samples_of(self, row: Row, counts: Counter[str]) -> list[dict[str, Any]]:
        """The samples of a row as they are written; RowError where it makes none."""
        reason = row.value.get("finish_reason")
        if reason == CUT and not self.settings.keep_unfinished:
            raise RowError("answer cut by the length limit")
        if reason in NO_ANSWER:
            raise RowError(f"finish_reason {reason}")
        content, encoded = self.tokenized(row)
        # the same conversation has the same name, wherever it stands
        name = row.value.get("id")
        if name is None:
            name = conversation_name(content)
        elif reason is None:  # not an answer of ours, whose names are of one conversation
            name = conversation_id(name)
        samples = []
        for one in encoded:
            counts.update(one.notes)
            samples += self.within_limit(one, counts)
        several = len(samples) > 1
        return [
            {"id": f"{name}{SEPARATOR}{k}" if several else str(name), **sample}
            for k, sample in enumerate(samples)
        ]

    def tokenized(self, row: Row) -> tuple[list, list[Encoded]]:
        """(what the row says, messages or ids; its samples, of any length)."""
        if "input_ids" not in row.value and "loss_mask" not in row.value:
            messages = messages_of(row.value, row.form)
            return messages, self.template.encode(messages, tools_of(row.value))
        try:
            ids, mask = check_sample(row.value, row.where, self.verifier.vocab_size)
        except UserError:
            if not self.settings.skip_bad_rows:
                raise
            raise bad_row("broken tokenized row") from None
        return ids.tolist(), [self.ended(ids.tolist(), mask.astype(int).tolist())]

    def ended(self, ids: list[int], mask: list[int]) -> Encoded:
        """A tokenized row without loss on what follows an end-of-turn token in an answer."""
        ended, past = False, 0
        for n, token in enumerate(ids):
            if mask[n] and ended:
                mask[n], past = 0, past + 1
            else:
                ended = bool(mask[n]) and token in self.verifier.end_ids
        note = ["note: tokenized rows with loss after an end-of-turn token"] if past else []
        return Encoded(ids, mask, note)

    def within_limit(self, one: Encoded, counts: Counter[str]) -> list[dict[str, Any]]:
        """The sample within the length limit, as none, one or several."""
        long, size = self.settings.long, len(one.input_ids)
        if size > self.longest:
            counts[f"long: {long}"] += 1
            if long == "drop":
                return []
        starts = range(0, size, self.longest) if long == "split" else [0]
        samples = []
        for start in starts:
            part = slice(start, start + self.longest)
            ids, mask = one.input_ids[part], one.loss_mask[part]
            if not any(mask):
                counts["dropped: no loss tokens"] += 1
                continue
            if self.settings.drop_looping and count_loops(ids, mask).looping:
                counts["dropped: looping answer"] += 1
                continue
            if mask[-1] and ids[-1] not in self.verifier.end_ids:
                counts["note: answers without an end-of-turn token"] += 1
            samples.append({"input_ids": ids, "loss_mask": mask})
        return samples


def line_of(sample: dict[str, Any]) -> SampleLine:
    ids, mask = sample["input_ids"], sample["loss_mask"]
    content = hashlib.blake2b(array("q", ids).tobytes() + bytes(mask), digest_size=16).digest()
    return SampleLine(json.dumps(sample) + "\n", content, len(ids), count_loops(ids, mask))


# ---------------------------------------------------------------- on all cores


_encoder: RowEncoder


def start_worker(settings: PrepareSettings, verifier: Verifier, main: int) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    threading.Thread(target=end_with, args=(main,), daemon=True).start()
    _encoder = RowEncoder(settings, verifier)


def end_with(main: int) -> None:
    """End this process when the main one, which is not its parent, is gone (by SIGKILL, say)."""
    while os.path.exists(f"/proc/{main}"):
        time.sleep(1)
    os._exit(1)


def encode_chunk(rows: list[Row]) -> list[EncodedRow]:
    return [_encoder.encode(row) for row in rows]


def encode_rows(
    settings: PrepareSettings, verifier: Verifier, rows: Iterator[Row]
) -> Iterator[EncodedRow]:
    """Encode rows on `settings.workers` processes, in their order; at most a few chunks per worker
    are under way."""
    workers = settings.workers
    first = list(itertools.islice(rows, FEW))
    rows = itertools.chain(first, rows)
    if workers == 1 or len(first) < FEW:
        yield from map(RowEncoder(settings, verifier).encode, rows)
        return
    chunks = iter(lambda: list(itertools.islice(rows, ROWS_PER_CHUNK)), [])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, context, start_worker, (settings, verifier, os.getpid()))
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


def show(settings: PrepareSettings, verifier: Verifier, rows: Iterator[Row]) -> None:
    """Print the first `settings.show` samples decoded: loss tokens coloured on a terminal,
    elsewhere within guillemets."""
    encoder = RowEncoder(settings, verifier)
    before, after = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("«", "»")
    shown = (line for row in rows for line in encoder.encode(row).lines)
    try:
        empty = True
        for line in itertools.islice(shown, settings.show):
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
    except BrokenPipeError:  # `| head` has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
