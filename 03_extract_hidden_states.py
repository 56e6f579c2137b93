"""Stage 3: hidden states of the verifier, a file a sample, by a forward pass in vLLM.

Reads tokenized_data.jsonl, loads the verifier in vLLM (--tp-size GPUs) and writes the
residual stream after each layer of --layers (0-based; the last is the final layer before
the final norm). Run the same command again after a kill: it continues, and the finished
files are the same to the byte.
"""

import shutil
import time
from pathlib import Path

from common import artifacts, cli, errors, progress
from common.manifest import PROBE, Output, Stage, must_match

STAGE = "extract"
STORAGE = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path", "--prepared-data", "--output-dir", "--max-samples")
    p.add_common("--max-seq-len", "--layers")
    p.add_common("--tp-size")
    p.add_argument(
        "--max-batch-tokens",
        type=cli.positive_int,
        default=8192,
        metavar="TOKENS",
        help="token budget of one forward pass; bounds memory",
    )
    p.add_argument(
        "--batch-size",
        type=cli.positive_int,
        default=128,
        metavar="SAMPLES",
        help="most samples in one forward pass (never over 128; the token budget bounds it too)",
    )
    p.add_common("--gpu-memory-utilization", "--dtype")
    p.add_argument(
        "--storage-dtype",
        default="auto",
        choices=["auto", "bf16", "fp8", "bfloat16", "float32"],
        help="of the files (default: the verifier's); fp8 is e4m3 with a scale a token and layer,"
        " half the disk",
    )
    p.add_argument(
        "--num-shards",
        type=cli.positive_int,
        default=1,
        metavar="N",
        help="split the samples by tokens, for several engines or machines",
    )
    p.add_argument(
        "--shard-index",
        type=cli.whole_number,
        metavar="I",
        help="the shard to make, from 0; it lies in OUTPUT_DIR/shard-I-of-N",
    )
    p.add_argument(
        "--allow-missing",
        type=cli.whole_number,
        default=0,
        metavar="N",
        help="call the folder finished with up to N samples that failed",
    )
    p.add_common("--engine-args", "--load-timeout")
    p.add_argument(
        "--verify", action="store_true", help="read a finished folder again, load nothing"
    )
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--prepared-data", "--output-dir")
    args = p.parse()
    if args.num_shards == 1 and args.shard_index is None:
        args.shard_index = 0
    if args.shard_index is None or args.shard_index >= args.num_shards:
        p.error(f"--num-shards {args.num_shards} needs --shard-index 0 to {args.num_shards - 1}")
    return args


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common.data import samples
    from common.extraction import preflight
    from common.states import journal
    from common.states.files import file_bytes
    from common.states.folder import refuse_shards, shard_folder
    from common.verifier import engine
    from common.verifier.config import load_verifier

    if args.num_shards > 1:
        out = shard_folder(out, args.shard_index, args.num_shards)
    elif not args.verify:
        refuse_shards(out)
    folder = samples.prepared_folder(args.prepared_data)
    artifacts.check_apart(out, folder, args.model_path)
    if args.verify:
        verify(out, folder, started)
        return
    engine.check_engine_args(args.engine_args)
    model = load_verifier(args.model_path)
    layers = check_layers(args.layers or model.default_layers(), model)
    dtype = check_dtype(args.dtype, model)
    storage = STORAGE.get(args.storage_dtype, args.storage_dtype)
    storage = dtype if storage == "auto" else storage
    preflight.check_divides(model, args.tp_size)
    weights = preflight.check_weights(model)
    settings = run_settings(args, layers, model, dtype, storage)
    inputs = {"prepared": samples.prepared_identity(folder)}
    samples.check_tokenizer(folder, model)
    inputs |= preflight.identities(model, weights, out, args.dry_run)
    output = Output(out, Stage(STAGE, settings, inputs), args.overwrite)
    state = output.earlier_run()

    # ---------------------------------------------------------------- plan
    shape = len(layers), model.hidden_size, storage
    if state == "none":
        units, lengths, data = plan_passes(args, model, folder)
        done = {}
    else:
        units, lengths = journal.read_plan(out)
        check_longest(args, model, folder, lengths)
        done = journal.settled_units(out, units, lengths, shape)
    missing = journal.missing_samples(done)
    if state == "complete" and len(done) == len(units) and len(missing) <= args.allow_missing:
        progress.log(f"extract: {out} is complete (--overwrite makes it again)")
        return
    todo = [(u, units[u]) for u in range(len(units)) if u not in done]
    if len(missing) > args.allow_missing:  # what failed before is tried again
        todo += [(u, [int(i) for i in e["missing"]]) for u, e in done.items() if e["missing"]]
    if state != "none":
        only = {i for _, indices in todo for i in indices}
        found = samples.read_samples(folder, args.max_samples, model.vocab_size, only)
        data = {s.index: s for s in found}
    todo_bytes = sum(file_bytes(lengths[i], *shape) for _, m in todo for i in m)
    lines = preflight.work_lines(args, units, lengths, done, storage, todo_bytes, out)
    preflight.check_plan(args, model, weights, settings, lines)
    artifacts.require_space(out, todo_bytes, args.overwrite, "lower --max-samples")
    if args.dry_run:
        progress.log("extract: dry run, every check passed; nothing was loaded or written")
        return
    output.lock(state)

    # ---------------------------------------------------------------- load and work
    if todo:
        from common.extraction.forward import Work

        samples_todo = {i: data[i] for _, indices in todo for i in indices}
        tokens = sum(lengths.values())
        work = Work(model, layers, dtype, storage, args.max_batch_tokens, samples_todo, todo,
                    out, tokens)  # fmt: skip
        extract(args, work, output, units, lengths, done)
    missing = journal.missing_samples(done)
    if len(missing) > args.allow_missing:
        first = min(missing)
        raise errors.UserError(
            f"{len(missing)} of {len(lengths)} samples have no hidden states, the first on line"
            f" {first + 1} of {folder / samples.FILE}: {missing[first]}. Run again to try them once"
            f" more, or accept it with --allow-missing {len(missing)}; mended data are other data,"
            " extracted anew"
        )

    # ---------------------------------------------------------------- report
    finish(output, units, lengths, done, shape, started)


def run_settings(args, layers: list[int], model, dtype: str, storage: str) -> dict:
    """What gives the folder's files their meaning; a resume must have the same."""
    from common.extraction.batching import MAX_SAMPLES_A_PASS

    settings = {
        "layers": layers,
        "layer_convention": "output",
        "hidden_size": model.hidden_size,
        "dtype": storage,
        "verifier_dtype": dtype,
        "max_samples": args.max_samples,
        # Batch layout moves low bits: a resume must keep it.
        "max_batch_tokens": args.max_batch_tokens,
        "batch_size": min(args.batch_size, MAX_SAMPLES_A_PASS),
        "tp_size": args.tp_size,
        "engine_args": args.engine_args,
    }
    if args.num_shards > 1:
        settings["shard"] = [args.shard_index, args.num_shards]
    return settings


def plan_passes(args, model, folder: Path):
    """Read and check all samples; returns (passes, lengths, samples) of this shard."""
    from common.data import samples
    from common.extraction import batching

    found = samples.read_samples(folder, args.max_samples, model.vocab_size)
    data = {s.index: s for s in found}
    lengths = {i: len(s.input_ids) for i, s in data.items()}
    check_longest(args, model, folder, lengths)
    units = batching.plan_units(lengths, args.max_batch_tokens, args.batch_size)
    if args.num_shards > len(units):
        raise errors.UserError(
            f"--num-shards {args.num_shards}: the samples make {len(units)} forward passes; use"
            " fewer shards or a lower --max-batch-tokens"
        )
    if args.num_shards > 1:
        units = batching.deal_units(units, lengths, args.num_shards, args.shard_index)
        lengths = {i: lengths[i] for unit in units for i in unit}
        data = {i: data[i] for i in lengths}
    return units, lengths, data


def check_longest(args, model, folder: Path, lengths: dict[int, int]) -> None:
    from common.data import samples

    index = max(lengths, key=lambda i: lengths[i])
    limit = min(model.longest_sample(args.max_seq_len), args.max_batch_tokens)
    if lengths[index] > limit:
        raise errors.UserError(
            f"{folder / samples.FILE}:{index + 1}: the sample has {lengths[index]} tokens, over"
            f" {limit} (the least of --max-seq-len {args.max_seq_len}, --max-batch-tokens"
            f" {args.max_batch_tokens} and the model's positions less one); raise the flag or"
            " prepare shorter samples with 01"
        )


def extract(args, work, output, units, lengths, done) -> None:
    """Load the verifier, check the capture, and run the passes of `work` into `done`."""
    from common.extraction import probe, runner
    from common.states import journal
    from common.verifier import engine
    from common.verifier.config import read_tensors

    model, out = work.model, work.out
    head = read_tensors(model, ("norm", "lm_head"))
    engine.prepare_environment(args.tp_size)
    loading = time.monotonic()
    engine_args = engine.capture_engine_args(
        model,
        tp_size=args.tp_size,
        longest=max(lengths.values()),
        max_batch_tokens=args.max_batch_tokens,
        batch_size=args.batch_size,
        dtype=work.verifier_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        trust_remote_code=args.trust_remote_code,
        executor=args.engine_args.get("distributed_executor_backend"),
    )
    timeout = args.load_timeout * 60
    with engine.running(engine_args, args.engine_args, "extract", timeout) as llm:
        took = progress.duration(time.monotonic() - loading)
        progress.log(f"extract: verifier loaded in {took}")
        engine.require_kv_cache(llm, [indices for _, indices in work.todo], lengths)
        stopper = progress.Stopper()
        try:
            checked = probe.run_probe(llm, work, head, resumed=bool(done))
            del head  # 2.3 GB of Kimi-K2.5
            # From here on the folder holds data, and belongs to these settings.
            output.empty(PROBE)
            journal.write_plan(out, units, lengths)
            output.begin()
            with journal.Journal(out, done) as record:
                runner.run_units(llm, work, record, checked, stopper)
        except Exception as e:
            if engine.failed(llm) and not isinstance(e, errors.UserError):
                raise engine.engine_died(errors.one_line(e)) from e
            raise
        finally:
            shutil.rmtree(out / PROBE, ignore_errors=True)
    left = [unit for unit, _ in work.todo if unit not in record.settled]
    if left and not stopper.code:
        raise RuntimeError(f"passes {left[:5]} were neither finished nor given up")
    if left:
        raise errors.Interrupted(
            stopper.code,
            f"{len(units) - len(left)} of {len(units)} passes are in {out}; {errors.again()} to"
            " continue",
        )


def finish(output: Output, units, lengths, done, shape, started: float) -> None:
    """Write the manifest and print what a careful person would look up."""
    out, settings = output.folder, output.stage.settings
    from common.states import journal
    from common.states.files import file_bytes, hidden_file

    shutil.rmtree(out / PROBE, ignore_errors=True)  # of a run killed after its last pass
    missing, sums = journal.missing_samples(done), journal.checksums(done)
    kept = {i: lengths[i] for i in sums}
    tokens, seconds = sum(kept.values()), sum(entry["seconds"] for entry in done.values())
    planned = sum(file_bytes(n, *shape) for n in kept.values())
    folders = sorted({hidden_file(out, i).parent for i in kept})
    size = sum(f.stat().st_size for folder in folders for f in folder.glob("hs_*.safetensors"))
    counts = {
        "num_samples": len(kept),
        "total_tokens": tokens,
        "forward_passes": len(units),
        "missing_samples": len(missing),
    }
    output.finish(
        counts,
        journal.digest(sums),
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


def verify(out: Path, folder: Path, started: float) -> None:
    """--verify: read a finished folder, or all its shards, again."""
    from common.data import samples
    from common.states.folder import open_hidden, verify_folder

    found = open_hidden(out, lone_shard=True)
    must_match(
        "prepared data",
        out,
        found.inputs.get("prepared"),
        folder,
        samples.prepared_identity(folder),
        "pass the --prepared-data it was made from",
    )
    files, tokens, size, missing = verify_folder(found, folder)
    seconds = time.monotonic() - started
    progress.log(
        f"verify: {files} files, {tokens} tokens, {size / 1e9:.2f} GB in {out} are whole, finite"
        f" and as prepared; {progress.duration(seconds)} ({size / 1e9 / seconds:.2f} GB/s)"
        + (f"; {missing} samples are missing, as allowed" if missing else "")
    )


def check_layers(layers: list[int], model) -> list[int]:
    wrong = [i for i in layers if not 0 <= i < model.num_layers]
    if wrong or len(set(layers)) != len(layers):
        raise errors.UserError(
            f"--layers {' '.join(map(str, layers))}: expected distinct layers from 0 to"
            f" {model.num_layers - 1}"
        )
    if len(layers) != 4 or max(layers) != model.num_layers - 1:
        raise errors.UserError(
            f"--layers {' '.join(map(str, layers))}: expected three aux layers, as vLLM feeds a"
            f" draft, and the final one, {model.num_layers - 1}, from which 04 makes its targets"
        )
    return sorted(layers)


def check_dtype(dtype: str, model) -> str:
    """Resolve `auto` to the verifier's dtype; refuse float16 where vLLM rescales the stream."""
    if dtype == "auto":
        dtype = str(model.text.get("dtype") or model.text.get("torch_dtype") or "bfloat16")
        dtype = dtype.removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise errors.UserError(f"the verifier's dtype is {dtype!r}; pass --dtype")
    if dtype == "float16" and "kv_lora_rank" in model.text:
        raise errors.UserError(
            "--dtype float16: vLLM divides the residual stream of DeepSeek-class models by"
            " routed_scaling_factor in float16; use bfloat16"
        )
    return dtype


if __name__ == "__main__":
    errors.run(main)
