"""Sources of rows: local files or folders of them, or a hub data set, read row by row.

Read by hand rather than through `datasets`, whose readers give every row one schema (rows of chat
data have keys of their own), copy the data into a cache and cannot name the line of a bad row.
"""

import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.artifacts import decode_json, sha256_file, sha256_json
from common.data.conversations import FORMS
from common.errors import UserError, nearest, one_line
from common.progress import log

SUFFIXES = (".jsonl", ".json", ".parquet")
PACKED = {".gz": "gzip", ".zst": "zstd"}  # suffix: pyarrow's name of the compression
OPTIONS = ("config", "split", "revision", "weight", "form")


@dataclass(frozen=True)
class Row:
    """A row of a source.

    where: its place, for messages: `file:line` or `file row N`.
    form: a name in conversations.FORMS, where the source says it.
    """

    where: str
    value: dict[str, Any]
    form: str | None = None


@dataclass(frozen=True)
class Source:
    """A data set: `files` of a local one (none: a hub name), and its options.

    weight: its share of the rows read, against the other sources'.
    """

    name: str
    files: tuple[Path, ...] = ()
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    weight: float | None = None
    form: str | None = None


def parse_source(text: str, flag: str = "--dataset") -> Source:
    """`NAME[,option=value..]` → Source; UserError for a file that is not there or an option that
    is none. A hub data set is taken as it is now: its revision becomes that commit."""
    name, options = text, dict[str, Any]()
    if not Path(text).exists():
        name, *rest = text.split(",")
        for option in rest:
            key, _, value = option.partition("=")
            if key not in OPTIONS or not value:
                raise UserError(
                    f"{flag} {text}: unknown option {option!r}{nearest(key, list(OPTIONS))};"
                    f" expected {', '.join(f'{k}=...' for k in OPTIONS)}"
                )
            options[key] = value
    if "form" in options and options["form"] not in FORMS:
        raise UserError(f"{flag} {text}: form is one of {', '.join(FORMS)}")
    weight = None
    if "weight" in options:
        weight = weight_of(options["weight"], f"{flag} {text}")
    files: tuple[Path, ...] = ()
    if is_local(name):
        of_hub = [key for key in ("config", "split", "revision") if key in options]
        if of_hub:
            raise UserError(
                f"{flag} {text}: {of_hub[0]} is for hub data sets only; name the file itself"
            )
        files = tuple(local_files(Path(name)))
    else:
        options["revision"] = hub_commit(name, options.get("revision"), flag)
    return Source(name, files, **options | {"weight": weight})  # type: ignore[arg-type]


def weight_of(value: str, where: str) -> float:
    """The number of a `weight=..` option; UserError for one that is no share."""
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise UserError(f"{where}: weight is a number over 0")
    return weight


def hub_commit(name: str, revision: str | None, flag: str) -> str | None:
    """The commit that a hub data set's revision (default: its newest) is now; offline, where only
    what was fetched before can be read, the revision itself."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return revision
    try:
        return str(HfApi().dataset_info(name, revision=revision, timeout=30).sha)
    except Exception as e:  # hub and network errors are many; one remedy
        raise UserError(
            f"{flag} {name}: no such file, and the hub did not name its commit"
            f" ({one_line(e, 200)}); give a local .json, .jsonl or .parquet"
        ) from None


def parse_sources(
    texts: list[str], max_samples: int | None, flag: str = "--dataset"
) -> list[Source]:
    """Every source; UserError where only some have a weight, or no --max-samples is there to share.

    Args:
        flag: that the texts are of, for messages.
    """
    sources = [parse_source(str(text), flag) for text in texts]
    weighted = [s for s in sources if s.weight is not None]
    if weighted and len(weighted) < len(sources):
        lacking = next(s for s in sources if s.weight is None)
        raise UserError(f"{flag} {lacking.name}: has no weight, others have one; give all or none")
    if weighted and max_samples is None:
        raise UserError(f"{flag}: weights share out --max-samples; pass it")
    return sources


def is_local(name: str | Path) -> bool:
    """Whether a data set's name means local files rather than a hub name."""
    plain = str(name)
    for packed in PACKED:
        plain = plain.removesuffix(packed)
    return Path(name).exists() or plain.endswith(SUFFIXES) or plain.startswith((".", "/"))


def local_files(path: Path) -> list[Path]:
    """The data files that a name means: itself, or those in the folder, by name."""
    if path.is_dir():
        found = sorted(p for p in below(path) if suffix_of(p) in SUFFIXES)
        if not found:
            raise UserError(f"{path}: no {', '.join(SUFFIXES)} in this folder")
        broken = next((p for p in found if not p.is_file()), None)
        if broken is not None:
            raise UserError(f"{broken}: a broken link; fix or delete it")
        return found
    if not path.is_file():
        what = "is no regular file; give one" if path.exists() else "no such file"
        raise UserError(f"{path}: {what}")
    if suffix_of(path) not in SUFFIXES:
        raise UserError(f"{path}: expected one of {', '.join(SUFFIXES)}, also .gz or .zst")
    return [path]


def below(folder: Path) -> list[Path]:
    """All files in a folder and those in it, hidden ones left out; UserError where one cannot be
    opened."""
    found = []

    def refuse(e: OSError) -> None:
        raise UserError(f"{e.filename}: {e.strerror}; nothing of it could be read") from None

    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return found


def check_outside(output: Path, sources: list[Source]) -> None:
    """UserError where the output would become part of a data folder."""
    folders = [Path(s.name) for s in sources if s.files and Path(s.name).is_dir()]
    inside = next((f for f in folders if f.resolve() in output.resolve().parents), None)
    if inside is not None:
        raise UserError(f"--output-dir {output}: lies in the data folder {inside}; choose another")


def suffix_of(path: Path) -> str:
    """Its suffix, that of a packing left out (no parquet file is packed)."""
    inner = Path(path.stem).suffix if path.suffix in PACKED else path.suffix
    return "" if inner == ".parquet" and path.suffix in PACKED else inner


def sources_digest(sources: list[Source]) -> str:
    """Identity of the sources: the content of local files, the commit of hub data sets, options."""
    found = []
    for s in sources:
        place: list[str | None] = [s.name, s.config, s.split, s.revision]
        if s.files:
            place = [sha256_file(f) for f in s.files]
        found.append([place, s.weight, s.form])
    return sha256_json(found)


def read_rows(
    sources: list[Source], max_rows: int | None = None, enough: float = float("inf")
) -> Iterator[Row]:
    """Yield rows of all sources, one after the other or mixed by weight; UserError naming file
    and line or row.

    Args:
        enough: rows that the caller needs; a source that ends after them is not logged (workers
            read ahead).
    """
    mixed = sources and sources[0].weight is not None
    rows = mix(sources, enough) if mixed else (row for s in sources for row in source_rows(s))
    return itertools.islice(rows, max_rows)


def mix(sources: list[Source], enough: float) -> Iterator[Row]:
    """Rows of all sources in turns by weight, the same on every run; one that ends drops out."""
    streams = [source_rows(s) for s in sources]
    total = 0
    given = dict.fromkeys(range(len(sources)), 0)
    while given:
        due = min(given, key=lambda n: given[n] / (sources[n].weight or 1))
        row = next(streams[due], None)
        if row is None:
            count = given.pop(due)
            if given and total < enough:
                log(
                    f"{sources[due].name}: ended after {count} rows, under its weight; the others"
                    " continue without it"
                )
        else:
            given[due] += 1
            total += 1
            yield row


def source_rows(source: Source) -> Iterator[Row]:
    empty = True
    found = (row for file in source.files for row in read_file(file))
    for row in found if source.files else read_hub(source):
        empty = False
        if not isinstance(row.value, dict):
            raise UserError(f"{row.where}: expected an object, found {type(row.value).__name__}")
        # a key that is null is one that the row does not have, as tables are written out
        value = {k: v for k, v in row.value.items() if v is not None}
        yield Row(row.where, value, source.form)
    if empty:
        raise UserError(f"{source.name}: holds no rows; is it the right file?")


def read_file(path: Path) -> Iterator[Row]:
    kind = suffix_of(path)
    if kind == ".parquet":
        yield from read_parquet(path)
        return
    try:
        yield from read_jsonl(path) if kind == ".jsonl" else read_json_array(path)
    except OSError as e:
        if path.suffix not in PACKED:
            raise
        raise UserError(
            f"{path}: cannot be unpacked ({e}); is it complete? copy or download it again"
        ) from None


def open_bytes(path: Path) -> Any:
    """A binary file to read lines from, unpacked where its name says so."""
    if path.suffix not in PACKED:
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=PACKED[path.suffix]))


def read_jsonl(path: Path) -> Iterator[Row]:
    with open_bytes(path) as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                value = decode_json(line)
            except (ValueError, RecursionError) as e:
                packed = (
                    "it is gzip; name it .gz"
                    if line[:2] == b"\x1f\x8b"
                    else "fix or remove the line"
                )
                raise UserError(f"{path}:{number}: not JSON ({e}); {packed}") from None
            yield Row(f"{path}:{number}", value)


def read_json_array(path: Path) -> Iterator[Row]:
    """A .json file is one array of rows; JSON Lines under that name is read as such."""
    try:
        with open_bytes(path) as f:
            values = decode_json(f.read())
    except (ValueError, RecursionError) as e:
        if getattr(e, "msg", "") == "Extra data":
            yield from read_jsonl(path)
            return
        line = getattr(e, "lineno", 1)
        raise UserError(f"{path}:{line}: not JSON ({e}); fix the file") from None
    if isinstance(values, dict):
        values = [values]
    if not isinstance(values, list):
        raise UserError(f"{path}: expected an array of rows")
    for n, value in enumerate(values):
        yield Row(f"{path} row {n}", value)


def read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    n = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=256):
            for value in batch.to_pylist():
                yield Row(f"{path} row {n}", drop_nulls(value))
                n += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise UserError(
            f"{path} row {n}: not readable as parquet ({e}); make the file again"
        ) from None


def drop_nulls(value: Any) -> Any:
    """Remove the nulls with which Arrow fills keys that a row does not have."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [drop_nulls(v) for v in value]
    return value


def read_hub(source: Source) -> Iterator[Row]:
    """Stream a split of a hub data set, so that only the rows read are downloaded."""
    import datasets

    try:
        data = datasets.load_dataset(
            source.name,
            source.config,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
        for n, value in enumerate(data):
            yield Row(f"{source.name} row {n}", drop_nulls(value))
    except Exception as e:  # hub, network and builder errors are many; one remedy
        raise UserError(
            f"{source.name}: no such file, and the hub did not serve it ({one_line(e, 200)});"
            " give a local .json, .jsonl or .parquet"
        ) from None
