"""Lay out a run's data as speculators' own trainer reads it; copies no hidden states.

<output-dir>/                     an Arrow table: input_ids, loss_mask, seq_len per row
<output-dir>/d2t-<D>.npy, t2d-<D>.npy          the vocabulary map
<output-dir>/hidden_states/hs_<row>.safetensors  links to 03's files

Then: speculators train --speculator-type eagle3 --data-path <output-dir> --on-missing raise ...
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli, errors, progress
from common.manifest import read_manifest

STAGE = "speculators_layout"


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--prepared-data", "--vocab-map", "--hidden-states", "--output-dir")
    p.need("--prepared-data", "--vocab-map", "--hidden-states", "--output-dir")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common.data import samples
    from common.data.vocab_map import load_map
    from common.states.files import FP8
    from common.states.folder import open_hidden
    from common.training.inputs import check_prepared

    prepared, vocab_map = samples.prepared_folder(args.prepared_data), Path(args.vocab_map)
    hidden = open_hidden(Path(args.hidden_states))
    vocab_manifest = read_manifest(vocab_map, "vocab")
    size = vocab_manifest.stage.settings["draft_vocab_size"]
    load_map(vocab_map, vocab_manifest.stage.settings["target_vocab_size"])
    identity = samples.prepared_identity(prepared)
    check_prepared(identity, prepared, vocab_map, vocab_manifest, hidden)
    if hidden.form.dtype == FP8:
        raise errors.UserError(
            f"{hidden.path}: holds float8 states, which speculators does not read; run 03 with"
            " --storage-dtype bf16"
        )
    if out.exists():
        raise errors.UserError(f"--output-dir {out}: exists already; choose another or delete it")

    # ---------------------------------------------------------------- write
    import datasets

    found = list(samples.read_samples(prepared, only=hidden.lengths.keys()))
    numbers = datasets.Value("int64")
    table = datasets.Dataset.from_dict(
        {
            "input_ids": [s.input_ids for s in found],
            "loss_mask": [s.loss_mask.astype("int8") for s in found],
            "seq_len": [len(s.input_ids) for s in found],
        },
        datasets.Features({"input_ids": [numbers], "loss_mask": [numbers], "seq_len": numbers}),
    )
    table.set_format(type="torch")
    datasets.disable_progress_bars()
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    table.save_to_disk(partial)
    (partial / "hidden_states").mkdir()
    for row, sample in enumerate(found):
        link = partial / "hidden_states" / f"hs_{row}.safetensors"
        link.symlink_to(hidden.file(sample.index).resolve())
    for name in ("d2t", "t2d"):
        shutil.copyfile(vocab_map / f"{name}.npy", partial / f"{name}-{size}.npy")
    os.rename(partial, out)
    progress.log(
        f"speculators_layout: {len(found)} samples, draft vocabulary {size}, layers"
        f" {hidden.layers} -> {out}"
    )


if __name__ == "__main__":
    errors.run(main)
