"""The verifier's head, taken from the loaded verifier and written once beside the states.

It is written under a name of its own, proven by the self-check, and gets its place together with
the first data. What stands there from an earlier run of the same verifier is used as it is.

Shape suffixes: N tokens, H hidden size, V vocabulary.
"""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.artifacts import writing
from common.errors import UserError
from common.extraction.work import Work
from common.progress import duration, log
from common.tensor_files import file_checksum, header_bytes, read_header, tensor_bytes
from common.verifier.config import Verifier
from common.verifier.fingerprint import tokenizer_fingerprint
from common.verifier.head import (
    HEAD_FILE,
    HEAD_MANIFEST,
    HeadFacts,
    HeadManifest,
    check_head_bytes,
    head_tensors,
    read_head_manifest,
)
from common.verifier.loaded_head import LoadedHead, VocabularyShare
from common.verifier.logits import VerifierHead, read_head

PARTIAL = f".{HEAD_FILE}.partial"
EMBEDDING_GATE = 1e-2  # relative difference; a scale in bfloat16 gives 2e-3
WATCHED_TOKENS = 64


def load_head(llm: Any, work: Work) -> VerifierHead:
    """The head beside the states, or, without one, the loaded verifier's, written to PARTIAL."""
    there = read_head_manifest(work.head_folder) if work.has_head else None
    if there is not None:
        check_head_bytes(work.head_folder, there)
        return read_head(work.head_folder / HEAD_FILE, there.facts)
    return write_head(llm, work.capture.verifier, work.out / PARTIAL)


def write_head(llm: Any, verifier: Verifier, path: Path) -> VerifierHead:
    """Write the loaded verifier's head; UserError saying what was met where it is not
    understood."""
    shares: list[LoadedHead] = llm.collective_rpc(
        "head_describe", args=(verifier.num_layers, verifier.vocab_size)
    )
    first = shares[0]
    for share in shares:
        if share.problem:
            raise UserError(
                f"{verifier.architecture}: cannot tell how vLLM makes logits of the last layer"
                f" ({share.problem}); nothing was written, and no draft of it can be trained here;"
                " choose another verifier"
            )
    check_rows("embedding", [share.embed for share in shares], verifier.vocab_size)
    if first.head is not None:
        check_rows(
            "head", [share.head or VocabularyShare(0, 0) for share in shares], verifier.vocab_size
        )
    facts = HeadFacts(
        dtype=first.dtype,
        tied=first.head is None,
        norm_eps=first.norm_eps,
        logit_scale=first.logit_scale,
        soft_cap=first.soft_cap,
    )
    tensors = head_tensors(verifier, facts, first.bias)
    with writing(path), open(path, "wb") as f:
        f.write(header_bytes(tensors))
        # a full disk is found here, not by a worker
        os.posix_fallocate(f.fileno(), 0, f.tell() + tensor_bytes(tensors))
    started = time.monotonic()
    begin = {name: place.begin for name, place in read_header(path).items()}
    llm.collective_rpc(
        "head_write", args=(verifier.num_layers, verifier.vocab_size, str(path), begin)
    )
    took = duration(time.monotonic() - started)
    log(f"extract: verifier head: {first.described}; {path.stat().st_size / 1e9:.2f} GB in {took}")
    return read_head(path, facts)


def check_rows(name: str, shares: list[VocabularyShare], vocab_size: int) -> None:
    """UserError unless the ranks' rows are the vocabulary's."""
    end = 0
    for rows in sorted(shares, key=lambda r: (r.first, r.last)):
        if rows.first > end:
            break
        end = max(end, rows.last)
    if end < vocab_size:
        raise UserError(
            f"the ranks of vLLM hold {name} rows {[(r.first, r.last) for r in shares]}, config.json"
            f" says vocab_size {vocab_size}; nothing was written"
        )


def embedding_scale(head: VerifierHead, ids_N: torch.Tensor, entered_NH: torch.Tensor) -> float:
    """The factor between the embedding's rows and what enters layer 0; UserError where that is not
    the embedding times a number.

    Args:
        ids_N, entered_NH: tokens of the probe and what entered layer 0 of them.
    """
    rows_NH = head.embed_VH[ids_N].float()
    if entered_NH.shape != rows_NH.shape:
        raise UserError(
            f"self-check failed: layer 0 receives {tuple(entered_NH.shape)}, expected"
            f" {tuple(rows_NH.shape)}; nothing was written, choose another verifier"
        )
    scale = float((rows_NH * entered_NH).sum() / rows_NH.square().sum().clamp_min(1e-30))
    difference = float((entered_NH - scale * rows_NH).norm() / entered_NH.norm().clamp_min(1e-30))
    if not difference < EMBEDDING_GATE:
        raise UserError(
            "self-check failed: what enters layer 0 is not the embedding times a number (relative"
            f" difference {difference:.2g}, nearest factor {scale:.3g}): this verifier adds or"
            " norms something there, which no draft is served with; nothing was written, choose"
            " another verifier"
        )
    return 1.0 if abs(scale - 1) < 1e-4 else round(scale, 4)


def keep_head(work: Work, head: VerifierHead, scale: float | None, mean: float | None) -> None:
    """Give the head just proven its place, unless it is there, and describe it.

    Args:
        scale: see embedding_scale; mean: difference of the self-check's log-probabilities.
    """
    if work.has_head:  # of an earlier run, or of another shard that was first
        (work.out / PARTIAL).unlink(missing_ok=True)
        return
    folder, verifier = work.head_folder, work.capture.verifier
    inputs = work.output.stage.inputs
    here = Path(verifier.path)
    manifest = HeadManifest(
        name=str(here.resolve()) if here.is_dir() else verifier.path,
        config=verifier.config,
        end_ids=list(verifier.end_ids),
        tokenizer=tokenizer_fingerprint(verifier.path),
        verifier=inputs["verifier"],
        verifier_weights=inputs["verifier_weights"],
        facts=replace(head.facts, embedding_scale=scale),
        checksum=file_checksum(work.out / PARTIAL),
        logprob_difference=mean,
    )
    (folder / HEAD_MANIFEST).unlink(missing_ok=True)  # of another file
    os.replace(work.out / PARTIAL, folder / HEAD_FILE)
    manifest.write(folder)
