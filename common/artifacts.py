"""Files that are complete or absent, hashes of content, and the disk they need."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from common.errors import UserError

# ---------------------------------------------------------------- atomic writes


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO]:
    """Open a temporary file that becomes `path` when the block ends without an error.

    The bytes are on the disk before the name is (fsync, then rename), so a file
    under its final name is complete even after a power cut. On an error nothing is left.
    """
    temporary = path.with_name(f".{path.name}.partial")
    encoding = None if "b" in mode else "utf-8"
    try:
        with writing(path), open(temporary, mode, encoding=encoding) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An I/O error in this block names the file: that of a write (a full disk, say) does not."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path, "w") as f:
        json.dump(value, f, indent=1)
        f.write("\n")


def decode_json(data: str | bytes) -> Any:
    """json.loads, whose only error is ValueError."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; UserError naming the file when it is missing or broken."""
    try:
        value = decode_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; is the folder right, and has its stage been run?"
        ) from None
    except ValueError as e:  # JSON or UTF-8
        raise UserError(f"{path}: not JSON ({e}); make it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; make it again")
    return value


# ---------------------------------------------------------------- hashes


def sha256_json(value: Any) -> str:
    """Hash of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# ---------------------------------------------------------------- the disk


def free_space(folder: Path) -> int:
    """Bytes free on the file system of `folder`, which need not exist yet."""
    there = next(p for p in [folder, *folder.parents] if p.exists())
    return shutil.disk_usage(there).free


def require_space(folder: Path, needed_bytes: int, overwrite: bool, remedy: str) -> None:
    """UserError when the file system of `folder` cannot be written, or has less free than needed;
    what --overwrite will delete counts as free."""
    there = next(p for p in [folder, *folder.parents] if p.exists())
    if not os.access(there, os.W_OK):
        raise UserError(f"--output-dir {folder}: {there} cannot be written; choose another")
    free = free_space(folder)
    if overwrite:
        free += sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    if needed_bytes > free:
        raise UserError(
            f"{folder}: needs {needed_bytes / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free;"
            f" free space, choose another --output-dir or {remedy}"
        )


def check_apart(output: Path, *inputs: str | Path) -> None:
    """UserError when the output folder cannot be one, or when an input is, or lies in, it:
    --overwrite would delete it."""
    for path in (output, *output.parents):
        if os.path.lexists(path) and not path.is_dir():
            what = "a file" if path.exists() else "a broken link"
            raise UserError(f"{path}: is {what}; --output-dir takes a folder")
    out = output.resolve()
    for path in map(Path, inputs):
        there = Path(os.path.realpath(path))  # unlike resolve(), of a link to itself too
        if there == out or out in there.parents:
            raise UserError(f"--output-dir {output}: holds the input {path}; choose another folder")
