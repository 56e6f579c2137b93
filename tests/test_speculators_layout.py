"""03's files as speculators' own dataset reads them."""

from typing import Any

import torch

from common.states.files import hidden_file, read_hidden
from tests.conftest import last_line, must, script


def test_speculators_reads_the_layout(tiny_stages, random_rows, tmp_path):
    from speculators.train.data import ArrowDataset

    out = tmp_path / "layout"
    args = ["--prepared-data", tiny_stages["prepared"], "--vocab-map", tiny_stages["vocab"],
            "--hidden-states", tiny_stages["hidden"], "--output-dir", out]  # fmt: skip
    must(script("tools/speculators_layout.py", *args))
    found = ArrowDataset(256, out, on_missing="raise")
    assert len(found) == len(random_rows)
    for row in (0, 7, 39):
        item: Any = found[row]
        states, ids = read_hidden(hidden_file(tiny_stages["hidden"], row))
        assert item["input_ids"].tolist() == ids.tolist() == random_rows[row]["input_ids"]
        assert item["loss_mask"].tolist() == random_rows[row]["loss_mask"]
        assert torch.equal(item["hidden_states"], states[:, :-1].flatten(1))
        assert torch.equal(item["verifier_last_hidden_states"], states[:, -1])
    assert (out / "d2t-256.npy").exists()
    again = script("tools/speculators_layout.py", *args)
    assert again.returncode == 1
    assert "exists already" in last_line(again)
