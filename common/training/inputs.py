"""What 04 checks before it trains: its inputs, the draft's shape, what it computes in; and the plan
of its steps."""

import importlib.util
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import artifacts
from common.data.samples import FILE, Sample, prepared_folder, prepared_identity, read_samples
from common.data.vocab_map import load_map
from common.draft.config import DraftShape, check_on_gpu, draft_shape
from common.errors import UserError
from common.manifest import Manifest, Output, must_match, read_manifest
from common.states.files import check_hidden_file, check_token_ids
from common.states.folder import HiddenFolder, open_hidden
from common.states.identity import check_made_with, states_made_with
from common.training.packing import Step, pack_rows, plan_steps, split_samples
from common.training.settings import TrainSettings
from common.verifier.config import Verifier, load_verifier
from common.verifier.fingerprint import hashes_of
from common.verifier.head import (
    HEAD_FILE,
    HEAD_MANIFEST,
    HeadManifest,
    check_head_bytes,
    read_head_manifest,
)


@dataclass(frozen=True)
class TrainData:
    """What earlier stages have made.

    d2t: int64 [draft vocabulary], offsets; t2d: bool [verifier's vocabulary]; head, verifier: as
    03 noted them beside the states, none of the verifier's files is opened; layers: those
    captured, ascending, the final one last; samples: by index, those with hidden states;
    identities: the inputs of 04's manifest.
    """

    prepared: Path
    d2t: np.ndarray
    t2d: np.ndarray
    hidden: HiddenFolder
    head: HeadManifest
    verifier: Verifier
    layers: list[int]
    samples: dict[int, Sample]
    identities: dict[str, Any]


@dataclass(frozen=True)
class TrainJob:
    """What a run trains, once everything is checked.

    settings: with nothing left to `auto`; train, held: samples, index → tokens; steps: of the
    complete run, of rows_per_step rows each but the last of an epoch; held_rows: of `held`.
    """

    settings: TrainSettings
    output: Output
    shape: DraftShape
    data: TrainData
    train: dict[int, int]
    held: dict[int, int]
    steps: list[Step]
    rows_per_step: int
    held_rows: list[list[int]]

    @property
    def rows(self) -> list[list[int]]:
        """Those trained on, of all epochs."""
        return [row for step in self.steps for row in step.rows]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, of the held-out ones too."""
        lengths = self.train | self.held
        return max(sum(lengths[i] for i in row) for row in self.rows + self.held_rows)


# ---------------------------------------------------------------- inputs


def open_data(settings: TrainSettings) -> TrainData:
    """UserError where folders are incomplete, do not belong together, or hold the output."""
    prepared, vocab_map = prepared_folder(settings.prepared_data), Path(settings.vocab_map)
    others = [p for p in (settings.init_from, settings.model_path) if p]
    artifacts.check_apart(settings.out, prepared, vocab_map, settings.hidden_states, *others)
    hidden = open_hidden(Path(settings.hidden_states))
    head = open_head(settings, hidden)
    verifier = head.make_verifier(hidden.path)
    d2t, t2d = load_map(vocab_map, verifier.vocab_size)
    vocab_manifest = read_manifest(vocab_map, "vocab")
    identities = {
        "prepared": prepared_identity(prepared),
        "vocab": vocab_manifest.content_sha256,
        "extract": hidden.content_sha256,
        "verifier": head.verifier,
    }
    check_prepared(identities["prepared"], prepared, vocab_map, vocab_manifest, hidden)
    layers = check_captured_layers(settings.layers, verifier, hidden)
    samples = read_checked_samples(settings, prepared, hidden, verifier)
    return TrainData(prepared, d2t, t2d, hidden, head, verifier, layers, samples, identities)


def open_head(settings: TrainSettings, hidden: HiddenFolder) -> HeadManifest:
    """The verifier's head beside the states; UserError where it is missing or of another verifier.

    A --model-path that is here must be the verifier of the states, or a copy by flag; the
    checkpoint then names it.
    """
    head = read_head_manifest(hidden.head_folder)
    if head is None:
        raise UserError(
            f"{hidden.path}: has no {HEAD_FILE}, an earlier version made it; run the command again"
            " that made it, or one of its shards (python 03_extract_hidden_states.py"
            f" --prepared-data {settings.prepared_data} --output-dir {hidden.path} and its other"
            " flags), which adds it and extracts nothing again"
        )
    for name in ("verifier", "verifier_weights"):
        remedy = f"delete {hidden.head_folder / HEAD_MANIFEST} and run 03's command again"
        mine = getattr(head, name)
        must_match(
            name, hidden.head_folder / HEAD_FILE, mine, hidden.path, hidden.inputs[name], remedy
        )
    check_head_bytes(hidden.head_folder, head)
    given = Path(settings.model_path or "")
    if not settings.model_path or not given.exists():
        return head
    found = load_verifier(settings.model_path)
    check_made_with(states_made_with(hidden), found, hashes_of(found), settings.quantized_copy)
    return replace(head, name=str(given.resolve()))


def check_prepared(
    identity: str, prepared: Path, vocab_map: Path, vocab_manifest: Manifest, hidden: HiddenFolder
) -> None:
    """UserError unless the map and the states come from this prepared data, of this identity; the
    map may come from several."""
    counted = vocab_manifest.stage.inputs.get("prepared")
    if isinstance(counted, list):
        counted = identity if identity in counted else counted[0]
    for folder, found, script, flag in (
        (vocab_map, counted, "02", "--vocab-map"),
        (hidden.path, hidden.inputs.get("prepared"), "03", "--hidden-states"),
    ):
        remedy = f"run {script} on this prepared data, or pass the {flag} made from it"
        must_match("prepared data", folder, found, prepared, identity, remedy)


def read_checked_samples(
    settings: TrainSettings, prepared: Path, hidden: HiddenFolder, verifier: Verifier
) -> dict[int, Sample]:
    """The samples that have hidden states, by index; UserError where a file is not theirs."""
    count = max(hidden.lengths) + 1
    count = min(count, settings.max_samples or count)
    there = hidden.lengths.keys()  # 03 may have skipped some
    found = {s.index: s for s in read_samples(prepared, count, verifier.vocab_size, there)}
    for sample in found.values():
        size = len(sample.input_ids)
        path = hidden.file(sample.index)
        places = check_hidden_file(path, size, hidden.form)
        check_token_ids(path, places["token_ids"], sample.input_ids)
        for flag, most in (
            ("--max-batch-tokens", settings.max_batch_tokens),
            ("--max-seq-len", settings.max_seq_len),
        ):
            if size > most:
                raise UserError(
                    f"{prepared / FILE}:{sample.index + 1}: sample {sample.id!r} has {size} tokens,"
                    f" over {flag} {most}; raise it"
                )
    return found


def check_captured_layers(
    layers: list[int] | None, verifier: Verifier, hidden: HiddenFolder
) -> list[int]:
    """The folder's layers, which must be those expected and end with the final one."""
    captured = hidden.layers
    expected = sorted(layers) if layers else verifier.default_layers()
    if captured != expected:
        raise UserError(
            f"{hidden.path}: holds layers {captured}, expected {expected}; pass the layers that 03"
            " captured as --layers here, or run 03 with other ones"
        )
    if captured[-1] != verifier.num_layers - 1 or len(captured) != 4:
        raise UserError(
            f"{hidden.path}: holds layers {captured}; training needs three layers (vLLM feeds a"
            f" draft of this format three) and the final one, {verifier.num_layers - 1} (the"
            " targets); run 03 with four --layers"
        )
    return captured


# ---------------------------------------------------------------- shape and device


def choose_compute(settings: TrainSettings) -> TrainSettings:
    """Resolve `auto`: CUDA where there is one; bfloat16 where the processor computes in it.
    UserError where the device lacks it."""
    device, dtype = settings.device, settings.compute_dtype
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU")
    if dtype == "auto":
        fast = device == "cuda" or torch.cpu._is_avx512_bf16_supported()
        dtype = "bfloat16" if fast else "float32"
    if settings.float8 and (device == "cpu" or torch.cuda.get_device_capability() < (8, 9)):
        raise UserError(
            "--float8: needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
        )
    if settings.float8 and dtype != "bfloat16":
        raise UserError("--float8: goes with --compute-dtype bfloat16")
    return replace(settings, device=device, compute_dtype=dtype)


def check_shape(settings: TrainSettings, data: TrainData) -> DraftShape:
    """The draft's shape, which the device must fit."""
    aux = data.layers[:-1]
    shape = draft_shape(
        settings.draft_shape,
        data.verifier,
        len(aux),
        len(data.d2t),
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
    )
    if settings.device == "cuda":
        check_on_gpu(shape, settings.float8)
    return shape


# The flags that decide the weights, beside the draft's shape and the data.
CONTENT = (
    "epochs", "max_batch_tokens", "ttt_steps", "ttt_decay", "loss_rule", "optimizer", "lr",
    "warmup", "weight_decay", "clip", "heldout_fraction", "train_lm_head", "float8", "patience",
    "seed",
)  # fmt: skip


def content_settings(settings: TrainSettings, shape: DraftShape, data: TrainData) -> dict[str, Any]:
    """The manifest's settings: a run that resumes, or is reused, must have the same."""
    return {
        **{name: getattr(settings, name) for name in CONTENT},
        "draft": asdict(shape),
        "layers": data.layers,
        "rows_per_step": settings.rows_per_step,
        "samples": len(data.samples),
        "device": settings.device,
        "compute_dtype": settings.compute_dtype,
    }


# ---------------------------------------------------------------- plan


def plan_job(
    settings: TrainSettings, output: Output, shape: DraftShape, data: TrainData
) -> TrainJob:
    """Split the samples and pack them into steps; UserError where that leaves none."""
    train, held = split_samples(data.samples, settings.heldout_fraction, settings.loss_rule)
    if not train:
        raise UserError(
            f"{data.prepared}: nothing to train on ({len(held)} of {len(data.samples)} samples held"
            " out, the others without a loss position); lower --heldout-fraction or prepare more"
        )
    if settings.patience and not held:
        raise UserError(
            "--patience: no sample is held out to measure on; raise --heldout-fraction or leave it"
        )
    rows, budget = settings.rows_per_step or 1, settings.max_batch_tokens
    steps = plan_steps(train, budget, settings.epochs, settings.seed, rows)
    held_rows = pack_rows(held, budget, None)
    return TrainJob(settings, output, shape, data, train, held, steps, rows, held_rows)


def check_packages(settings: TrainSettings) -> None:
    """UserError where a package is missing that is used only during or after training."""
    for package in ("speculators", "matplotlib", *["tensorboard"] * settings.tensorboard):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"the package {package} is not installed; see requirements.txt")
