"""Raw rows of chat data, one at a time: local .json, .jsonl, .parquet, or a hub name."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.artifacts import decode_json, sha256_file, sha256_json
from common.cli import UserError

SUFFIXES = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Row:
    """A row and where it stands (`file:line`, `file row N`), for messages."""

    where: str
    value: dict[str, Any]


def is_local(name: str | Path) -> bool:
    """Whether a data set's name means a local file rather than a hub name."""
    return Path(name).exists() or str(name).endswith(SUFFIXES) or str(name).startswith((".", "/"))


def digest(names: list[Path]) -> str:
    """Identity of the sources: the content of local files, the name of hub data sets."""
    found = []
    for name in names:
        if is_local(name):
            if not name.is_file():
                what = "is a folder; name the files in it" if name.is_dir() else "no such file"
                raise UserError(f"{name}: {what}")
            found.append(sha256_file(name))
        else:
            found.append(str(name))
    return sha256_json(found)


def read_rows(names: list[Path], max_rows: int | None = None) -> Iterator[Row]:
    """Yield rows of all sources in order; UserError naming file and line or row."""
    n = 0
    for name in names:
        empty = True
        for row in read_source(name):
            empty = False
            if max_rows is not None and n >= max_rows:
                return
            if not isinstance(row.value, dict):
                raise UserError(
                    f"{row.where}: expected an object, found {type(row.value).__name__}"
                )
            yield row
            n += 1
        if empty:
            raise UserError(f"{name}: holds no rows; is it the right file?")


def read_source(name: Path) -> Iterator[Row]:
    if not is_local(name):
        yield from read_hub(str(name))
        return
    if not name.is_file():
        raise UserError(f"{name}: no such file")
    if name.suffix == ".jsonl":
        yield from read_jsonl(name)
    elif name.suffix == ".json":
        yield from read_json_array(name)
    elif name.suffix == ".parquet":
        yield from read_parquet(name)
    else:
        raise UserError(f"{name}: expected one of {', '.join(SUFFIXES)}")


def read_jsonl(path: Path) -> Iterator[Row]:
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                value = decode_json(line)
            except (ValueError, RecursionError) as e:
                packed = "it is gzip; unpack it" if line[:2] == b"\x1f\x8b" else "mend the line"
                raise UserError(f"{path}:{number}: not JSON ({e}); {packed}") from None
            yield Row(f"{path}:{number}", value)


def read_json_array(path: Path) -> Iterator[Row]:
    """A .json file is one array of rows; JSON Lines under that name is read as such."""
    try:
        values = decode_json(path.read_bytes())
    except (ValueError, RecursionError) as e:
        if getattr(e, "msg", "") == "Extra data":
            yield from read_jsonl(path)
            return
        line = getattr(e, "lineno", 1)
        raise UserError(f"{path}:{line}: not JSON ({e}); mend the file") from None
    if isinstance(values, dict):
        values = [values]
    if not isinstance(values, list):
        raise UserError(f"{path}: expected an array of rows")
    for n, value in enumerate(values):
        yield Row(f"{path} row {n}", value)


def read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        n = 0
        for batch in file.iter_batches(batch_size=256):
            for value in batch.to_pylist():
                yield Row(f"{path} row {n}", drop_nulls(value))
                n += 1
    except (pyarrow.ArrowException, OSError) as e:
        raise UserError(f"{path}: not a readable parquet file ({e})") from None


def drop_nulls(value: Any) -> Any:
    """Remove the nulls with which Arrow fills keys that a row does not have."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [drop_nulls(v) for v in value]
    return value


def read_hub(name: str) -> Iterator[Row]:
    """Stream the `train` split of a hub data set, so that only the rows asked for travel."""
    import datasets

    try:
        data = datasets.load_dataset(name, split="train", streaming=True)
        for n, value in enumerate(data):
            yield Row(f"{name} row {n}", drop_nulls(value))
    except Exception as e:  # hub, network and builder errors are many; one remedy
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(
            f"--dataset {name}: no such file, and the hub did not serve it ({reason});"
            " give a local .json, .jsonl or .parquet"
        ) from None
