"""Writes that are whole or absent, hashes that ignore what gives no meaning, stale data."""

import pytest

from common import artifacts
from common.errors import UserError
from common.manifest import (
    LOCK,
    MANIFEST,
    STAGE_FILES,
    Output,
    Stage,
    read_manifest,
    write_manifest,
)
from common.progress import Progress

pytestmark = pytest.mark.quick


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")

    def write():
        with artifacts.atomic_file(path, "w") as f:
            f.write("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def output(folder, settings=None, inputs=None, overwrite=False, stage="vocab"):
    return Output(folder, Stage(stage, settings or {}, inputs or {}), overwrite)


def test_content_hash_is_of_meaning_not_of_time(tmp_path):
    def content(settings, inputs, data, seconds):
        write_manifest(tmp_path, Stage("vocab", settings, inputs), {}, data, seconds)
        return read_manifest(tmp_path, "vocab").content_sha256

    one = content({"a": 1}, {"prepared": "x"}, "d", 3.0)
    assert content({"a": 1}, {"prepared": "x"}, "d", 9.0) == one
    assert content({"a": 2}, {"prepared": "x"}, "d", 3.0) != one
    assert content({"a": 1}, {"prepared": "y"}, "d", 3.0) != one
    assert content({"a": 1}, {"prepared": "x"}, "e", 3.0) != one


def test_earlier_runs(tmp_path):
    def state(settings, inputs, overwrite=False):
        return output(tmp_path, settings, inputs, overwrite).earlier_run()

    assert state({"a": 1}, {}) == "none"
    output(tmp_path, {"a": 1}, {"p": "x"}).begin()
    assert state({"a": 1}, {"p": "x"}) == "in_progress"
    output(tmp_path, {"a": 1}, {"p": "x"}).finish({}, "d", 0)
    assert state({"a": 1}, {"p": "x"}) == "in_progress"  # what it made is gone
    for name in STAGE_FILES["vocab"]:
        (tmp_path / name).touch()
    assert state({"a": 1}, {"p": "x"}) == "complete"
    with pytest.raises(UserError, match="was made with a = 1, asked for 2"):
        state({"a": 2}, {"p": "x"})
    with pytest.raises(UserError, match=r'from other data \(input p = "x", asked for "y"\)'):
        state({"a": 1}, {"p": "y"})
    assert state({"a": 2}, {}, overwrite=True) == "none"


def test_overwrite_spares_folders_that_are_not_ours(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"would delete thesis.tex, which none of these scripts"):
        output(tmp_path, overwrite=True).earlier_run()
    output(tmp_path).finish({}, "d", 0)
    with pytest.raises(UserError, match=r"would delete thesis.tex"):
        output(tmp_path, overwrite=True).earlier_run()
    assert (tmp_path / "thesis.tex").exists()
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    with pytest.raises(UserError, match=r"would delete .ssh"):
        output(tmp_path / "home", overwrite=True).earlier_run()


def test_overwrite_makes_a_damaged_folder_again(tmp_path):
    """A manifest cut short, or lost: what lies there is still ours."""
    (tmp_path / "rows_0-999").mkdir()
    (tmp_path / "journal.jsonl").touch()
    output(tmp_path, overwrite=True, stage="extract").lock("none")
    (tmp_path / MANIFEST).touch()
    with pytest.raises(UserError, match=r"not JSON .* or --overwrite"):
        output(tmp_path, overwrite=False, stage="extract").earlier_run()
    assert output(tmp_path, overwrite=True, stage="extract").earlier_run() == "none"
    output(tmp_path, overwrite=True).empty()
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]


def test_manifests_of_other_stages_or_unfinished_ones_are_refused(tmp_path):
    output(tmp_path).finish({}, "d", 0)
    with pytest.raises(UserError, match="is stage 'vocab' format 1, expected 'extract'"):
        read_manifest(tmp_path, "extract")
    output(tmp_path).begin()
    with pytest.raises(UserError, match="has not finished"):
        read_manifest(tmp_path, "vocab")


def test_space_is_checked_before_it_runs_out(tmp_path):
    artifacts.require_space(tmp_path / "new", 1000, overwrite=False, remedy="x")
    with pytest.raises(UserError, match="GB free; free space"):
        artifacts.require_space(tmp_path / "new", 10**18, overwrite=False, remedy="x")


def test_overwrite_may_use_what_it_frees(small_disk):
    folder = small_disk / "o"
    folder.mkdir()
    size = artifacts.free_space(folder) * 2 // 3
    (folder / "responses.jsonl").write_bytes(bytes(size))
    with pytest.raises(UserError, match="GB free"):
        artifacts.require_space(folder, size, overwrite=False, remedy="x")
    artifacts.require_space(folder, size, overwrite=True, remedy="x")


def test_a_second_run_into_one_folder_is_refused(tmp_path):
    output(tmp_path / "o").lock("none")
    with pytest.raises(UserError, match="another run is writing into it"):
        output(tmp_path / "o", overwrite=True).lock("none")


def test_a_folder_that_another_run_finished_meanwhile_is_refused(tmp_path):
    before = output(tmp_path, {"a": 1}).earlier_run()
    output(tmp_path, {"a": 1}).finish({}, "d", 0)
    with pytest.raises(UserError, match="another run has changed it"):
        output(tmp_path, {"a": 1}).lock(before)


def test_what_an_overwrite_could_not_finish_keeps_its_manifest(small_disk, tmp_path):
    """What is left is the earlier run's, and must say so."""
    (tmp_path / MANIFEST).write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(OSError):  # noqa: PT011 (a file system is mounted there)
        output(tmp_path, overwrite=True).empty()
    assert (tmp_path / MANIFEST).exists()


def test_an_eta_waits_for_what_is_under_way():
    bar = Progress("regenerate", 100, "answers", concurrency=10)
    bar.done = 10
    assert bar.line(5) == "regenerate: 10/100 answers (10.0%) 2.0 answers/s ETA ?"
    bar.done = 20
    assert bar.line(5).endswith("4.0 answers/s ETA 20s")
