"""What 04 checks before it trains: its inputs belong together, and what it computes in."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import artifacts, errors
from common.data.samples import FILE, Sample, prepared_folder, prepared_identity, read_samples
from common.data.vocab_map import load_map
from common.manifest import Manifest, must_match, read_manifest
from common.states.files import check_hidden_file, check_token_ids
from common.states.folder import HiddenFolder, open_hidden
from common.verifier.config import Verifier
from common.verifier.fingerprint import fingerprint


@dataclass(frozen=True)
class Data:
    """What earlier stages have made: maps are d2t and t2d; samples by index; layers those
    captured; identities the inputs of 04's report."""

    prepared: Path
    maps: tuple[np.ndarray, np.ndarray]
    hidden: HiddenFolder
    layers: list[int]
    samples: dict[int, Sample]
    identities: dict[str, Any]


def open_data(args, model: Verifier) -> Data:
    """UserError where folders are not whole, do not belong together, or hold the output."""
    prepared, vocab_map = prepared_folder(args.prepared_data), Path(args.vocab_map)
    init = [args.init_from] if args.init_from else []
    read = args.model_path, prepared, vocab_map, args.hidden_states, *init
    artifacts.check_apart(Path(args.output_dir), *read)
    maps = load_map(vocab_map, model.vocab_size)
    vocab_manifest = read_manifest(vocab_map, "vocab")
    hidden = open_hidden(Path(args.hidden_states))
    identities = {
        "prepared": prepared_identity(prepared),
        "vocab": vocab_manifest.content_sha256,
        "extract": hidden.content_sha256,
        "verifier": fingerprint(model),
    }
    check_prepared(identities["prepared"], prepared, vocab_map, vocab_manifest, hidden)
    must_match(
        "verifier",
        hidden.path,
        hidden.inputs.get("verifier"),
        Path(args.model_path),
        identities["verifier"],
        "pass the --model-path that 03 was run with, or run 03 on this one",
    )
    layers = check_layers(args.layers, model, hidden)
    samples = read_samples_of(args, prepared, hidden, model)
    return Data(prepared, maps, hidden, layers, samples, identities)


def check_prepared(
    identity: str, prepared: Path, vocab_map: Path, vocab_manifest: Manifest, hidden: HiddenFolder
) -> None:
    """UserError unless the map and the states come from this prepared data, of this identity; the
    map may come from several."""
    counted = vocab_manifest.stage.inputs.get("prepared")
    if isinstance(counted, list):
        counted = identity if identity in counted else counted[0]
    must_match(
        "prepared data",
        vocab_map,
        counted,
        prepared,
        identity,
        "run 02 on this prepared data, or pass the --vocab-map made from it",
    )
    must_match(
        "prepared data",
        hidden.path,
        hidden.inputs.get("prepared"),
        prepared,
        identity,
        "run 03 on this prepared data, or pass the --hidden-states made from it",
    )


def read_samples_of(args, prepared: Path, hidden, model) -> dict[int, Sample]:
    """The samples that have hidden states, by index; UserError where a file is not theirs."""
    count = max(hidden.lengths) + 1
    count = min(count, args.max_samples or count)
    there = hidden.lengths.keys()  # 03 may have skipped some
    found = {s.index: s for s in read_samples(prepared, count, model.vocab_size, there)}
    for sample in found.values():
        size = len(sample.input_ids)
        path = hidden.file(sample.index)
        places = check_hidden_file(path, size, hidden.form)
        check_token_ids(path, places["token_ids"], sample.input_ids)
        for flag, most in (
            ("--max-batch-tokens", args.max_batch_tokens),
            ("--max-seq-len", args.max_seq_len),
        ):
            if size > most:
                raise errors.UserError(
                    f"{prepared / FILE}:{sample.index + 1}: sample {sample.id!r} has {size} tokens,"
                    f" over {flag} {most}; raise it"
                )
    return found


def check_layers(asked, model, hidden) -> list[int]:
    """The folder's layers, which must be those expected and end with the final one."""
    held = hidden.settings["layers"]
    expected = sorted(asked) if asked else model.default_layers()
    if held != expected:
        raise errors.UserError(
            f"{hidden.path}: holds layers {held}, expected {expected}; pass the layers that 03"
            " captured as --layers here, or run 03 with other ones"
        )
    if held[-1] != model.num_layers - 1 or len(held) != 4:
        raise errors.UserError(
            f"{hidden.path}: holds layers {held}; training needs three layers (vLLM feeds a draft"
            f" of this format three) and the final one, {model.num_layers - 1} (the targets); run"
            " 03 with four --layers"
        )
    return held


def choose_compute(device: str, dtype: str, float8: bool):
    """Resolve `auto`: CUDA where there is one; bfloat16 where the processor computes in it.
    UserError where the device cannot do what is asked."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise errors.UserError("--device cuda: torch sees no CUDA GPU")
    if dtype == "auto":
        fast = device == "cuda" or torch.cpu._is_avx512_bf16_supported()
        dtype = "bfloat16" if fast else "float32"
    if float8 and (device == "cpu" or torch.cuda.get_device_capability() < (8, 9)):
        raise errors.UserError(
            "--float8: needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
        )
    if float8 and dtype != "bfloat16":
        raise errors.UserError("--float8: goes with --compute-dtype bfloat16")
    return device, getattr(torch, dtype)


def require_memory(needed_bytes: int) -> None:
    """UserError when this process's GPU has not so much free."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    if needed_bytes > free:
        raise errors.UserError(
            f"needs {needed_bytes / 1e9:.1f} GB of GPU memory and the activations', and"
            f" {free / 1e9:.1f} GB are free; free it, take a larger GPU, or more of them by"
            " torchrun, which share the optimizer's state"
        )


def run_settings(args, shape, data: Data, device, dtype, rows_a_step) -> dict:
    """What decides the weights: a resume or a reuse must have the same."""
    names = [
        "epochs",
        "max_batch_tokens",
        "ttt_steps",
        "ttt_decay",
        "loss_rule",
        "optimizer",
        "lr",
        "warmup",
        "weight_decay",
        "clip",
        "heldout_fraction",
        "train_lm_head",
        "float8",
        "patience",
        "seed",
    ]
    return {
        **{n: getattr(args, n) for n in names},
        "draft": asdict(shape),
        "layers": data.layers,
        "rows_per_step": rows_a_step,
        "samples": len(data.samples),
        "device": device,
        "compute_dtype": str(dtype).removeprefix("torch."),
    }
