"""The file format, float8 quantization, shards of a plan, and --verify."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from common.artifacts import sha256_json
from common.errors import UserError
from common.extraction.batching import make_batches, shard_batches
from common.extraction.writer import CaptureBuffer, CapturedBatch, Writer, write_rows
from common.manifest import MANIFEST
from common.states.files import (
    FP8,
    StatesFormat,
    file_bytes,
    hidden_file,
    quantize_rows,
    read_hidden,
)
from common.states.folder import open_hidden
from common.states.journal import checksums, data_sha256, read_entries
from common.states.values import all_finite, states_problem
from common.verifier.head import HEAD_FILE
from tests.conftest import extract_args, files_of, last_line, must, script


def rows_of(states_TLH: torch.Tensor, scale_TL: torch.Tensor | None = None) -> CaptureBuffer:
    dtype = str(states_TLH.dtype).removeprefix("torch.")
    tokens, layers, hidden = states_TLH.shape
    rows = CaptureBuffer.empty((tokens, layers, hidden), dtype, torch.device("cpu"), False)
    rows.states_NLH.copy_(states_TLH)
    if scale_TL is not None:
        rows.scale_NL.copy_(scale_TL)
    return rows


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_files_are_what_the_safetensors_library_writes(tmp_path, dtype):
    """To the byte, so every reader of safetensors reads them; the size is known beforehand."""
    states = torch.randn(7, 4, 24).to(dtype)
    scale = torch.rand(7, 4)
    ids = np.arange(3, 10, dtype=np.int32)
    path = tmp_path / "rows" / "hs_0.safetensors"
    write_rows(path, rows_of(states, scale), slice(0, 7), ids)
    tensors = {"hidden_states": states, "token_ids": torch.from_numpy(ids).long()}
    if dtype == torch.float8_e4m3fn:
        tensors["hidden_states_scale"] = scale
    assert path.read_bytes() == save(tensors)
    assert path.stat().st_size == file_bytes(
        7, StatesFormat(4, 24, str(dtype).removeprefix("torch."))
    )


@pytest.mark.quick
def test_bytes_a_token_of_kimi():
    assert StatesFormat(4, 7168, "bfloat16").bytes_per_token == 57_344 + 8
    assert StatesFormat(4, 7168, FP8).bytes_per_token == 28_672 + 16 + 8


@pytest.mark.quick
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 1.0, 1e4]))
def test_float8_keeps_every_value_within_its_step(seed, size):
    """Normal float8 numbers round by at most 1/16 of a value, smaller ones by half of the
    least step; the largest value of a row is exact."""
    generator = torch.Generator().manual_seed(seed)
    x_NH = torch.randn(5, 64, generator=generator) * size
    x_NH[:, 3] *= 300  # the residual stream has such outliers
    x_NH[4] = 0
    largest_N = x_NH.abs().amax(-1)
    q_NH, scale_N = quantize_rows(x_NH, largest_N)
    back_NH = q_NH.float() * scale_N[:, None]
    step_N = scale_N * 2.0**-10
    assert bool(((back_NH - x_NH).abs() <= torch.maximum(x_NH.abs() / 16, step_N[:, None])).all())
    assert torch.allclose(back_NH.abs().amax(-1), largest_N, rtol=1e-6)


@pytest.mark.quick
def test_reading_float8_gives_bfloat16_and_the_first_tokens_alone(tmp_path):
    x_TLH = torch.randn(9, 4, 32)
    q = [quantize_rows(x_TLH[:, k], x_TLH[:, k].abs().amax(-1)) for k in range(4)]
    states = torch.stack([a.view(torch.uint8) for a, _ in q], 1).view(torch.float8_e4m3fn)
    rows = rows_of(states, torch.stack([s for _, s in q], 1))
    path = tmp_path / "f"
    write_rows(path, rows, slice(0, 9), np.arange(9, dtype=np.int32))
    back_TLH, ids_T = read_hidden(path)
    assert back_TLH.dtype == torch.bfloat16
    assert float((back_TLH.float() - x_TLH).norm() / x_TLH.norm()) < 0.03
    first_TLH, first_T = read_hidden(path, 4)
    assert torch.equal(first_TLH, back_TLH[:4])
    assert torch.equal(first_T, ids_T[:4])


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", FP8])
def test_all_finite_sees_one_bad_value(dtype):
    x = torch.randn(1000).to(getattr(torch, dtype))
    assert all_finite(x.view(torch.uint8).numpy(), dtype)
    for bad in [float("nan")] if dtype == FP8 else [float("nan"), float("inf"), -float("inf")]:
        y = x.clone()
        y[617] = torch.tensor(bad).to(y.dtype)
        assert not all_finite(y.view(torch.uint8).numpy(), dtype)


def fault(states_TLH: torch.Tensor, kind: str) -> None:
    """Put one fault into sound states: in the third layer, of a few tokens where these suffice."""
    rows = states_TLH[:, 2]
    if kind == "NaN in some rows":
        rows[3:5, 17] = float("nan")
    elif kind == "Inf in one row":
        rows[2, 40] = -float("inf")
    elif kind == "a row of zeros":
        rows[4] = 0
        rows[4, 5] = -0.0
    elif kind == "all rows the same":
        rows[:] = rows[1].clone()


FAULTS = {
    "NaN in some rows": "its hidden states hold NaN or Inf (token 3, layer 9)",
    "Inf in one row": "its hidden states hold NaN or Inf (token 2, layer 9)",
    "a row of zeros": "its hidden states hold a row of zeros (token 4, layer 9)",
    "all rows the same": "its hidden states are the same at all 6 tokens (layer 9)",
    "none": None,
}


def stored(x_TLH: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(states as a file of the dtype has them, scale [T, L])."""
    if dtype != FP8:
        return x_TLH.to(getattr(torch, dtype)), torch.ones(x_TLH.shape[:2])
    flat = x_TLH.flatten(0, 1)
    q, scale = quantize_rows(flat, torch.linalg.vector_norm(flat, float("inf"), dim=-1))
    return q.view(x_TLH.shape), scale.view(x_TLH.shape[:2])


@pytest.mark.quick
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", FP8])
def test_states_that_teach_nothing_are_seen(dtype, kind):
    """Of a file of each dtype, by token and layer."""
    x_TLH = torch.randn(6, 4, 80)
    fault(x_TLH, kind)
    states, scale = stored(x_TLH, dtype)
    form = StatesFormat(4, 80, dtype)
    data = states.view(torch.uint8).numpy().reshape(-1)
    scale_TL = scale.numpy() if dtype == FP8 else None
    assert states_problem(data, scale_TL, form, [1, 4, 9, 11]) == FAULTS[kind]
    if dtype == FP8:
        scale[2, 3] = 0
        if kind == "none":
            text = "its hidden states hold a row of zeros (token 2, layer 11)"
            assert states_problem(data, scale_TL, form, [1, 4, 9, 11]) == text
        scale[2, 3] = float("inf")
        assert "NaN or Inf" in (states_problem(data, scale_TL, form, [1, 4, 9, 11]) or "")


@pytest.mark.quick
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_sound_states_pass_however_sparse(tokens, hidden, seed):
    """Rows that are alike in part, or zero but for one number, of one token or several."""
    generator = torch.Generator().manual_seed(seed)
    x_TLH = torch.zeros(tokens, 2, hidden)
    at_TL1 = torch.randint(hidden, (tokens, 2, 1), generator=generator)
    x_TLH.scatter_(2, at_TL1, 1.0 + torch.arange(2 * tokens).view(tokens, 2, 1))
    states, _ = stored(x_TLH, "bfloat16")
    data = states.view(torch.uint8).numpy().reshape(-1)
    assert states_problem(data, None, StatesFormat(2, hidden, "bfloat16"), [0, 1]) is None


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_the_writer_leaves_out_the_samples_at_fault_alone(tmp_path, dtype):
    """All kinds in one batch: NaN or Inf in some rows of one layer, a row of zeros, rows all
    alike; and sound samples whose largest values are all one number, or of a single token."""
    x_NLH = torch.randn(6 * 6 + 1, 4, 80)
    for n, kind in enumerate(FAULTS):
        fault(x_NLH[6 * n : 6 * n + 6], kind)
    x_NLH[30:36, :, 7] = 50.0
    states, scale = stored(x_NLH, dtype)
    writer = Writer((37, 4, 80), dtype, [1, 4, 9, 11], pin=False)
    rows = writer.free_buffer()
    ids = [np.arange(6 * n, 6 * n + 6, dtype=np.int32) for n in range(6)] + [np.array([36])]
    rows.states_NLH.copy_(states)
    rows.scale_NL.copy_(scale)
    rows.largest_NL.copy_(torch.linalg.vector_norm(x_NLH, float("inf"), dim=-1))
    rows.ids_N.copy_(torch.arange(37))
    rows.positions_N.copy_(torch.tensor([*range(6)] * 6 + [0]))
    writer.submit(0, CapturedBatch(rows, 37, None), list(enumerate(ids)), tmp_path)
    (result,) = writer.finished(of_all=True)
    writer.close()
    result.raise_error()
    assert result.bad == dict(enumerate(list(FAULTS.values())[:4]))
    assert sorted(result.checksums) == [4, 5, 6]
    assert [hidden_file(tmp_path, n).exists() for n in range(7)] == [False] * 4 + [True] * 3


lengths = st.dictionaries(st.integers(0, 5000), st.integers(1, 64), min_size=1, max_size=200)


@pytest.mark.quick
@given(lengths, st.integers(64, 200), st.integers(1, 9))
def test_shards_share_the_passes_evenly_by_tokens(lengths, budget, count):
    units = make_batches(lengths, budget)
    shards = [shard_batches(units, lengths, count, n) for n in range(count)]
    assert sorted(map(tuple, (u for s in shards for u in s))) == sorted(map(tuple, units))
    loads = [sum(lengths[i] for u in s for i in u) for s in shards]
    assert max(loads) - min(loads) <= budget


def verify(stages, out):
    return script("03_extract_hidden_states.py", *extract_args(stages, out, "--verify"))


@pytest.mark.quick
def test_verify_passes_on_a_whole_folder(tiny_stages):
    before = {p: p.stat().st_mtime_ns for p in tiny_stages["hidden"].rglob("*")}
    result = must(verify(tiny_stages, tiny_stages["hidden"]))
    assert "40 files" in last_line(result)
    assert "are complete, finite and as prepared" in last_line(result)
    assert before == {p: p.stat().st_mtime_ns for p in tiny_stages["hidden"].rglob("*")}


@pytest.mark.quick
def test_verify_refuses_another_runs_report(tiny_stages, tmp_path):
    out = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], out)
    lines = (out / "journal.jsonl").read_text().splitlines()
    entry = json.loads(lines[0])
    entry["checksums"] = dict.fromkeys(entry["checksums"], "0" * 32)
    (out / "journal.jsonl").write_text("\n".join([json.dumps(entry), *lines[1:]]) + "\n")
    result = verify(tiny_stages, out)
    assert result.returncode == 1
    assert "its manifest is not of the files in its journal" in last_line(result)


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def other_ids(path):
    tensors = load_file(path)
    tensors["token_ids"] = tensors["token_ids"] + 1
    path.write_bytes(save(tensors))


def changed(change):
    """A function that changes a file's states [T, L, H]."""

    def spoil(path):
        tensors = load_file(path)
        change(tensors["hidden_states"])
        path.write_bytes(save(tensors))

    return spoil


not_finite = changed(lambda x_TLH: x_TLH[2, 1, 3].fill_(float("nan")))
zero_row = changed(lambda x_TLH: x_TLH[5, 3].zero_())
all_alike = changed(lambda x_TLH: x_TLH[:, 0].copy_(x_TLH[0, 0].clone()))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("spoil", "journal", "text"),
    [
        (flip_a_byte, False, "its bytes are not those that were written"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-9]),
            False,
            "not a complete safetensors",
        ),
        (lambda path: path.unlink(), False, "missing; run 03 again"),
        (other_ids, True, "its token_ids are not the prepared sample's"),
        (not_finite, True, "its hidden states hold NaN or Inf (token 2, layer 4)"),
        (zero_row, True, "its hidden states hold a row of zeros (token 5, layer 7)"),
        (all_alike, True, "its hidden states are the same at all "),
    ],
)
def test_verify_finds_what_is_wrong(tiny_stages, tmp_path, spoil, journal, text):
    """`journal`: journal and manifest are made to agree, so that the next check is reached."""
    from common.tensor_files import file_checksum

    out = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], out)
    path = hidden_file(out, 7)
    spoil(path)
    if journal:
        entries = [json.loads(x) for x in (out / "journal.jsonl").read_text().splitlines()]
        for entry in entries:
            if "7" in entry["checksums"]:
                entry["checksums"]["7"] = file_checksum(path)
        (out / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
        report = json.loads((out / MANIFEST).read_text())
        meaning = {k: report[k] for k in ("stage", "settings", "inputs")}
        data = data_sha256(checksums(read_entries(out)))
        report["content_sha256"] = sha256_json(meaning | {"data": data})
        (out / MANIFEST).write_text(json.dumps(report))
    result = verify(tiny_stages, out)
    assert result.returncode == 1
    assert f"hs_7.safetensors: {text}" in result.stdout
    assert "1 of 40 files are wrong" in last_line(result)


def test_shards_are_the_unsharded_folder_in_parts(tiny_stages, tmp_path):
    """Two engines' shards: the same files to the byte, one identity, 04 reads them together."""
    out = tmp_path / "hidden"
    missing = extract_args(tiny_stages, out, "--num-shards", 2, "--shard-index", 0)
    must(script("03_extract_hidden_states.py", *missing))
    with pytest.raises(UserError, match=r"shards 1 of 2 are not there; run 03 with --num-shards"):
        open_hidden(out)
    other = extract_args(tiny_stages, out, "--num-shards", 2, "--shard-index", 1)
    must(script("03_extract_hidden_states.py", *other))
    parts = [files_of(out / f"shard-{n}-of-2") for n in (0, 1)]
    assert not parts[0].keys() & parts[1].keys()
    head = {HEAD_FILE: (out / HEAD_FILE).read_bytes()}  # once, beside all shards
    assert parts[0] | parts[1] | head == files_of(tiny_stages["hidden"])
    whole, sharded = open_hidden(tiny_stages["hidden"]), open_hidden(out)
    assert sharded.content_sha256 == whole.content_sha256
    assert sharded.lengths == whole.lengths
    assert "40 files" in last_line(must(verify(tiny_stages, out)))
    from tests.conftest import train_args

    args = train_args(tiny_stages | {"hidden": out}, tmp_path / "draft", "--epochs", 1)
    assert "train: 38 samples" in must(script("04_train.py", *args)).stdout  # and 2 held out
    with pytest.raises(UserError, match="is shard 0 of 2; pass the folder that holds all"):
        open_hidden(out / "shard-0-of-2")
    shutil.rmtree(out / "shard-1-of-2")
    shutil.copytree(out / "shard-0-of-2", out / "shard-1-of-2")
    with pytest.raises(UserError, match=r"holds shard \[0, 2\], not the one that its name says"):
        open_hidden(out)


def test_shard_flags(tiny_stages, tmp_path):
    two = ["--num-shards", 2]
    for more in (two, ["--shard-index", 1], [*two, "--shard-index", 2]):
        result = script("03_extract_hidden_states.py", *extract_args(tiny_stages, tmp_path, *more))
        assert result.returncode == 2
        assert "needs --shard-index" in last_line(result)
    one = ["--num-shards", 1, "--shard-index", 0, "--dry-run"]  # a Slurm array of one task
    must(script("03_extract_hidden_states.py", *extract_args(tiny_stages, tmp_path, *one)))
    many = extract_args(tiny_stages, tmp_path / "o", "--num-shards", 99, "--shard-index", 3)
    result = script("03_extract_hidden_states.py", *many)
    assert result.returncode == 1
    assert "forward passes; use fewer shards" in last_line(result)


def test_float8_from_end_to_end(tiny_stages, tmp_path):
    """03 writes it and checks it against the verifier, --verify reads it, 04 trains on it."""
    from tests.conftest import train_args

    out = tmp_path / "hidden"
    args = extract_args(tiny_stages, out, "--storage-dtype", "fp8")
    text = must(script("03_extract_hidden_states.py", *args)).stdout
    assert "the first batch agrees with the probe" in text
    for name, data in files_of(tiny_stages["hidden"]).items():
        if name == HEAD_FILE:
            continue
        ours, _ = read_hidden(out / name)
        theirs, _ = read_hidden(tiny_stages["hidden"] / name)
        error_TL = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
        assert float(error_TL.max()) < 0.04
        assert (out / name).stat().st_size < 0.52 * len(data)
    must(script("03_extract_hidden_states.py", *args, "--verify"))
    must(script("04_train.py", *train_args(tiny_stages | {"hidden": out}, tmp_path / "draft",
                                           "--epochs", 1)))  # fmt: skip
