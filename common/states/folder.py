"""A finished hidden-states folder, or the shards of one, as 04 and the evaluation see it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.artifacts import read_json
from common.errors import UserError
from common.manifest import MANIFEST, Stage, read_manifest
from common.states.files import StatesFormat, hidden_file
from common.states.journal import LENGTHS, checksums, data_sha256, read_entries

SHARD = "shard-{}-of-{}"


def shard_folder(folder: Path, index: int, count: int) -> Path:
    """Folder of one shard below --output-dir."""
    return folder / SHARD.format(index, count)


@dataclass(frozen=True)
class HiddenFolder:
    """Samples with hidden states, of one folder or of all shards together.

    `settings` and `content_sha256` are those of an unsharded folder with the same files.
    """

    path: Path
    settings: dict[str, Any]
    inputs: dict[str, str]
    content_sha256: str
    lengths: dict[int, int]  # sample index → tokens, ascending
    folders: dict[int, Path]  # sample index → folder that holds its file
    head_folder: Path  # that holds the verifier's head

    @property
    def layers(self) -> list[int]:
        """The layers captured, ascending."""
        return self.settings["layers"]

    @property
    def form(self) -> StatesFormat:
        s = self.settings
        return StatesFormat(len(s["layers"]), s["hidden_size"], s["dtype"])

    def file(self, index: int) -> Path:
        return hidden_file(self.folders[index], index)


def open_hidden(path: Path, lone_shard: bool = False) -> HiddenFolder:
    """Read the manifest of a finished folder, or of all its shards.

    UserError when one is missing, unfinished, made with other settings or data, or not the
    shard that its name says; and for a shard without the others unless `lone_shard`.
    """
    unsharded = (path / MANIFEST).exists()
    parts = [path] if unsharded else shard_folders(path)
    if not parts:
        read_json(path / MANIFEST)  # says what is wrong
    manifests = [read_manifest(part, "extract") for part in parts]
    first = manifests[0]
    settings = {k: v for k, v in first.stage.settings.items() if k != "shard"}
    for n, (part, manifest) in enumerate(zip(parts, manifests, strict=True)):
        theirs = dict(manifest.stage.settings)
        shard = theirs.pop("shard", None)
        if unsharded and shard and not lone_shard:
            raise UserError(
                f"{part}: is shard {shard[0]} of {shard[1]}; pass the folder that holds all of them"
            )
        if not unsharded and shard != [n, len(parts)]:
            raise UserError(f"{part}: holds shard {shard}, not the one that its name says")
        if (theirs, manifest.stage.inputs) != (settings, first.stage.inputs):
            raise UserError(
                f"{part}: was made with other settings or data than {parts[0]}; make one of them"
                " again"
            )
    lengths: dict[int, int] = {}
    folders: dict[int, Path] = {}
    sums: dict[int, str] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        try:
            found = {int(i): int(n) for i, n in read_json(part / LENGTHS).items()}
            missing = {int(i) for i in manifest.more.get("missing", {})}
        except (TypeError, ValueError):
            raise UserError(f"{part / LENGTHS}: is damaged; make the folder again") from None
        found = {i: n for i, n in found.items() if i not in missing}
        if len(found) != manifest.counts.get("num_samples"):
            raise UserError(
                f"{part / LENGTHS}: lists {len(found)} samples, {MANIFEST} says"
                f" {manifest.counts.get('num_samples')}; make the folder again with --overwrite"
            )
        lengths |= found
        folders |= dict.fromkeys(found, part)
        if not unsharded:
            sums |= checksums(read_entries(part))
    stage = Stage("extract", settings, first.stage.inputs)
    content = first.content_sha256 if unsharded else stage.content_sha256(data_sha256(sums))
    lengths = dict(sorted(lengths.items()))
    beside = path.parent if "shard" in first.stage.settings and unsharded else path
    return HiddenFolder(path, settings, first.stage.inputs, content, lengths, folders, beside)


def refuse_shards(path: Path) -> None:
    """UserError when a folder holds shards, which an unsharded run would hide."""
    found = sorted(p.name for p in path.glob(SHARD.format("*", "*")))
    if found:
        raise UserError(
            f"{path}: holds {found[0]}; pass --num-shards and --shard-index, or choose another"
            " --output-dir"
        )


def shard_folders(path: Path) -> list[Path]:
    """All shards below a folder; UserError when some are not there."""
    found: dict[int, dict[int, Path]] = {}
    for p in path.glob(SHARD.format("*", "*")):
        match = re.fullmatch(SHARD.format(r"(\d+)", r"(\d+)"), p.name)
        if match and p.is_dir():
            found.setdefault(int(match[2]), {})[int(match[1])] = p
    if len(found) > 1:
        raise UserError(
            f"{path}: holds shards of {' and of '.join(map(str, sorted(found)))}; keep one set"
        )
    for count, parts in found.items():
        absent = [i for i in range(count) if i not in parts]
        if absent:
            raise UserError(
                f"{path}: shards {' '.join(map(str, absent))} of {count} are not there; run 03 with"
                f" --num-shards {count} --shard-index {absent[0]}, or copy them here"
            )
        return [parts[i] for i in range(count)]
    return []
