"""tokenized_data.jsonl: the samples that 01 writes and 02, 03 and 04 read.

One line per sample: {"id": str, "input_ids": [int...], "loss_mask": [0|1...]}, equal lengths.
"""

import hashlib
import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.artifacts import decode_json, sha256_file
from common.errors import UserError
from common.manifest import MANIFEST, must_match, read_manifest
from common.verifier.config import Verifier
from common.verifier.fingerprint import tokenizer_fingerprint

FILE = "tokenized_data.jsonl"
# Between a conversation's id and the number of one of its several samples or answers.
SEPARATOR = "##"


def conversation_id(name: object) -> str:
    """The id that a data set gives a conversation, without what would separate it."""
    return str(name).replace(SEPARATOR, "#")


def conversation_name(content: list) -> str:
    """The id of a conversation that has none, by its content: messages or token ids."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Sample:
    """One tokenized conversation; `index` is its line, from 0, and its name in later stages."""

    index: int
    id: str
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]

    @property
    def conversation(self) -> str:
        """Id of the conversation it comes from (samples of one conversation share it)."""
        return self.id.split(SEPARATOR, 1)[0]


def prepared_folder(path: str) -> Path:
    """Accept the folder or the file in it (`--prepared-data`, `--data-path`)."""
    p = Path(path)
    folder = p.parent if p.name == FILE else p
    if folder.is_file():
        raise UserError(f"--prepared-data {path}: expected a folder or a file named {FILE}")
    if not folder.is_dir():
        raise UserError(f"--prepared-data {path}: no such folder; run 01_prepare_data.py first")
    return folder


def check_sample(row: Any, where: str, vocab_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (input_ids int32 [T], loss_mask bool [T]) of a tokenized row.

    UserError naming what is wrong with it.
    """
    ids, mask = (row.get("input_ids"), row.get("loss_mask")) if isinstance(row, dict) else (0, 0)
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise UserError(f"{where}: needs the lists input_ids and loss_mask")
    if not ids:
        raise UserError(f"{where}: input_ids is empty")
    if len(ids) != len(mask):
        raise UserError(
            f"{where}: {len(ids)} input_ids and {len(mask)} loss_mask values; they must be equal"
        )
    mask_T = integer_array(mask, f"{where}: loss_mask")
    if not np.isin(mask_T, (0, 1)).all():
        raise UserError(f"{where}: loss_mask holds values other than 0 and 1")
    ids_T = integer_array(ids, f"{where}: input_ids")
    if ids_T.dtype.kind == "b":
        raise UserError(f"{where}: input_ids holds true and false instead of ids")
    low, high = int(ids_T.min()), int(ids_T.max())
    if low < 0 or high >= (vocab_size or 2**31):
        raise UserError(
            f"{where}: id {low if low < 0 else high} is outside the verifier's vocabulary of"
            f" {vocab_size}; was it tokenized for another model?"
        )
    return ids_T.astype(np.int32), mask_T.astype(bool)


def integer_array(values: list, where: str) -> np.ndarray:
    """The list as an array of whole numbers; UserError for anything else in it."""
    try:
        array = np.array(values)
    except ValueError:  # lists of unequal lengths inside
        array = np.array(None)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise UserError(f"{where} holds values that are not whole numbers; fix or remove the row")
    return array


def read_samples(
    folder: Path,
    max_samples: int | None = None,
    vocab_size: int | None = None,
    only: Container[int] | None = None,
) -> Iterator[Sample]:
    """Yield the samples of a prepared folder, or those of the indices `only`; UserError naming
    file and line."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; run 01_prepare_data.py first")
    number = 0
    with open(path, "rb") as f:
        blank = 0
        for number, line in enumerate(f, 1):
            index = number - 1
            if max_samples is not None and index >= max_samples:
                return
            if not line.strip():
                blank = blank or number  # harmless after the last sample
                continue
            if blank:
                raise UserError(f"{path}:{blank}: a blank line among the samples; remove it")
            if only is not None and index not in only:
                continue
            where = f"{path}:{number}"
            try:
                row = decode_json(line)
            except ValueError as e:  # JSON or UTF-8
                raise UserError(f"{where}: not JSON ({e}); make the file again with 01") from None
            ids, mask = check_sample(row, where, vocab_size)
            name = row.get("id")
            yield Sample(index, str(index if name is None else name), ids, mask)
    if number == 0:
        raise UserError(f"{path}: holds no samples")


def check_tokenizer(folder: Path, verifier: Verifier) -> None:
    """UserError unless 01 prepared the data with this verifier's tokenizer (data without a
    manifest do not say)."""
    if not (folder / MANIFEST).exists():
        return
    manifest = read_manifest(folder, "prepare")
    must_match(
        "tokenizer",
        folder,
        manifest.stage.inputs.get("tokenizer"),
        Path(verifier.path),
        tokenizer_fingerprint(verifier.path),
        "pass the --model-path that 01 was run with, or run 01 with this one",
    )


def prepared_identity(folder: Path) -> str:
    """content_sha256 of the prepared data.

    The manifest's when 01 wrote it and the file is still the one it describes; a file brought
    by hand, without a manifest, is known by its own hash.
    """
    if not (folder / FILE).is_file():
        raise UserError(f"{folder / FILE}: no such file; run 01_prepare_data.py first")
    digest = sha256_file(folder / FILE)
    if not (folder / MANIFEST).exists():
        return digest
    manifest = read_manifest(folder, "prepare")
    if manifest.counts.get("file_sha256") != digest:
        raise UserError(
            f"{folder / FILE}: was changed after 01 wrote it (its hash is not the one in"
            f" {MANIFEST}); run 01 again, or remove the manifest to use the file as it is"
        )
    return manifest.content_sha256
