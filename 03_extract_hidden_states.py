"""Stage 3: hidden states of the verifier, a file a sample, by a forward pass in vLLM.

Reads tokenized_data.jsonl, loads the verifier in vLLM (--tp-size GPUs) and writes the
residual stream after each layer of --layers (0-based; the last is the final layer before
the final norm). Run the same command again after a kill: it continues, and the finished
folder is the same to the byte.
"""

import functools
import json
import os
import shutil
import time
from pathlib import Path

from common import artifacts, cli, progress

STAGE = "extract"
JOURNAL = "journal.jsonl"
PROBE = ".probe"


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path", "--prepared-data", "--output-dir", "--max-samples")
    p.add_common("--max-seq-len", "--layers")
    p.add_argument("--tp-size", type=cli.positive_int, default=1, metavar="GPUS")
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
        default=256,
        metavar="SAMPLES",
        help="most samples in one forward pass (never over 256; the token budget bounds it too)",
    )
    p.add_argument(
        "--gpu-memory-utilization", type=cli.between(0.01, 1), default=0.9, metavar="FRACTION"
    )
    p.add_argument("--dtype", default="auto", choices=cli.DTYPES)
    p.add_argument(
        "--storage-dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32"],
        help="dtype of the files (default: the verifier's)",
    )
    p.add_argument("--engine-args", type=cli.json_object, default={}, metavar="JSON")
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--prepared-data", "--output-dir")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common import engine, hidden_files, plan, samples, verifier

    engine.check_engine_args(args.engine_args)
    model = verifier.load_verifier(args.model_path)
    layers = check_layers(args.layers or model.default_layers(), model)
    dtype = check_dtype(args.dtype, model)
    storage_dtype = dtype if args.storage_dtype == "auto" else args.storage_dtype
    heads = model.text.get("num_attention_heads")
    if heads and heads % args.tp_size:
        raise cli.UserError(
            f"--tp-size {args.tp_size}: the verifier's {heads} attention heads do not divide"
        )
    folder = samples.prepared_folder(args.prepared_data)
    artifacts.check_apart(out, folder)
    data = list(samples.read_samples(folder, args.max_samples, model.vocab_size))
    longest = max(data, key=lambda s: len(s.input_ids))
    limit = min(args.max_seq_len, args.max_batch_tokens, (model.max_positions or 2**31) - 1)
    if len(longest.input_ids) > limit:
        raise cli.UserError(
            f"{folder / samples.FILE}:{longest.index + 1}: sample {longest.id!r} has"
            f" {len(longest.input_ids)} tokens, over {limit} (the least of --max-seq-len"
            f" {args.max_seq_len}, --max-batch-tokens {args.max_batch_tokens} and the model's"
            " positions less one); raise the flag or prepare shorter samples with 01"
        )
    lengths = {s.index: len(s.input_ids) for s in data}
    units = plan.plan_units(lengths, args.max_batch_tokens, args.batch_size)
    token_bytes = hidden_files.bytes_a_token(len(layers), model.hidden_size, storage_dtype)
    total_tokens = sum(lengths.values())

    settings = {
        "layers": layers,
        "layer_convention": "output",
        "hidden_size": model.hidden_size,
        "dtype": storage_dtype,
        "verifier_dtype": dtype,
        "max_samples": args.max_samples,
        # Batch layout moves low bits: a resume must keep it.
        "max_batch_tokens": args.max_batch_tokens,
        "batch_size": min(args.batch_size, plan.MAX_SAMPLES_A_PASS),
        "tp_size": args.tp_size,
        "engine_args": args.engine_args,
    }
    inputs = {
        "prepared": samples.prepared_identity(folder),
        "verifier": verifier.fingerprint(model),
    }
    state = artifacts.earlier_run(out, STAGE, settings, inputs, args.overwrite)
    whole = state == "complete"
    done = {} if state == "none" else read_journal(out, units, lengths, settings, not whole)
    if whole and len(done) == len(units):
        progress.log(f"extract: {out} is complete (--overwrite makes it again)")
        return
    todo = [u for u in range(len(units)) if u not in done]
    todo_tokens = sum(lengths[i] for u in todo for i in units[u])
    progress.log(
        f"extract: {len(data)} samples, {total_tokens} tokens in {len(units)} forward passes of at"
        f" most {args.max_batch_tokens} tokens; layers {layers} of {model.num_layers}; {dtype},"
        f" files {storage_dtype}, {total_tokens * token_bytes / 1e9:.2f} GB"
        f"{f'; {len(done)} passes are done already' if done else ''}"
    )
    artifacts.require_space(out, todo_tokens * token_bytes)
    if args.dry_run:
        progress.log("extract: dry run, every check passed; nothing was loaded or written")
        return
    artifacts.prepare_output(out, args.overwrite)
    report = functools.partial(artifacts.report, STAGE, settings, inputs)

    # ---------------------------------------------------------------- load and work
    if todo:
        extract(args, model, settings, report, data, units, todo, done, out)

    # ---------------------------------------------------------------- report
    seconds = sum(entry["seconds"] for entry in done.values())  # of all runs
    hashes = {i: h for unit in done.values() for i, h in unit["sha256"].items()}
    artifacts.write_json(out / "sample_lengths.json", {str(i): n for i, n in lengths.items()})
    digest = artifacts.sha256_json([hashes[str(i)] for i in sorted(lengths)])
    counts = {"num_samples": len(data), "total_tokens": total_tokens, "forward_passes": len(units)}
    size = sum(hidden_files.hidden_file(out, i).stat().st_size for i in lengths)
    artifacts.write_json(
        out / artifacts.REPORT,
        report(
            counts,
            digest,
            time.monotonic() - started,
            extract_seconds=round(seconds, 2),
            **{k: settings[k] for k in ("layers", "layer_convention", "hidden_size", "dtype")},
            **{k: counts[k] for k in ("num_samples", "total_tokens")},
            bytes=size,
        ),
    )
    progress.log(
        f"extract: {len(data)} samples, {total_tokens} tokens in {progress.duration(seconds)}"
        f" ({total_tokens / max(seconds, 1e-9):.0f} tok/s), {size / 1e9:.2f} GB in {out}; this run"
        f" {progress.duration(time.monotonic() - started)} with loading"
    )


def extract(args, model, settings, report, data, units, todo, done, out) -> None:
    """Load the verifier, check the capture, and run the units of `todo` into `done`."""
    from common import engine, selfcheck, verifier

    layers = settings["layers"]
    head = None
    if layers[-1] == model.num_layers - 1:
        head = verifier.read_tensors(model, ("norm", "lm_head"))
    by_index = {s.index: s for s in data}
    lengths = {s.index: len(s.input_ids) for s in data}
    engine.prepare_environment(args.tp_size)
    loading = time.monotonic()
    engine_args = engine.capture_engine_args(
        model,
        tp_size=args.tp_size,
        max_seq_len=args.max_seq_len,
        max_batch_tokens=args.max_batch_tokens,
        batch_size=args.batch_size,
        dtype=settings["verifier_dtype"],
        gpu_memory_utilization=args.gpu_memory_utilization,
        trust_remote_code=args.trust_remote_code,
    )
    with engine.running(engine_args, args.engine_args, "extract") as llm:
        took = progress.duration(time.monotonic() - loading)
        progress.log(f"extract: verifier loaded in {took}")
        engine.require_kv_cache(llm, units, lengths)
        llm.collective_rpc("capture_start", args=(layers, model.num_layers))
        stopper = progress.Stopper()
        room = max(1, args.max_batch_tokens // selfcheck.PROBE_TOKENS)
        checked = units[todo[0]][: min(selfcheck.PROBE_SAMPLES, room)]
        try:
            run_probe(llm, model, settings, head, by_index, checked, out)
            # From here on the folder holds data, and belongs to these settings.
            artifacts.write_json(out / artifacts.REPORT, report({}, None, 0))
            run_units(llm, settings, by_index, units, todo, done, checked, stopper, out)
        finally:
            shutil.rmtree(out / PROBE, ignore_errors=True)
        llm.collective_rpc("capture_stop")
    if stopper.code and len(done) < len(units):
        raise cli.Interrupted(
            stopper.code, f"{len(done)} of {len(units)} passes are in {out}; run again to continue"
        )


def run_units(llm, settings, by_index, units, todo, done, checked, stopper, out) -> None:
    """Run the units of `todo`, noting each in the journal once its files are on the disk."""
    total = sum(len(s.input_ids) for s in by_index.values())
    left = sum(len(by_index[i].input_ids) for u in todo for i in units[u])
    bar = progress.Progress("extract", total, "tokens", initial=total - left)
    with artifacts.atomic_file(out / JOURNAL, "w") as f:  # without what a kill cut
        f.writelines(json.dumps(entry) + "\n" for entry in done.values())
    with open(out / JOURNAL, "a", encoding="utf-8") as journal:
        for u in todo:
            began = time.monotonic()
            batch = [(i, by_index[i].input_ids.tolist()) for i in units[u]]
            generate(llm, batch)
            result = write(llm, batch, out, settings["dtype"])
            if result["bad"]:
                bad = by_index[result["bad"][0]]
                raise cli.UserError(
                    f"sample {bad.id!r} (line {bad.index + 1}): its hidden states hold NaN or Inf;"
                    " it was not written. Remove the sample, or try --dtype bfloat16 or float32"
                )
            if result["passes"] != 1:
                raise cli.UserError(
                    f"vLLM ran {len(batch)} samples in {result['passes']} steps instead of one, so"
                    " the result would depend on chance; raise --gpu-memory-utilization or lower"
                    " --max-batch-tokens"
                )
            if u == todo[0]:
                check_first_unit(out, units[u], checked, settings)
            for folder in {f.parent for f in unit_files(out, units[u])}:
                artifacts.fsync_folder(folder)
            done[u] = {
                "unit": u,
                "seconds": round(time.monotonic() - began, 4),
                "sha256": {str(i): h for i, h in result["sha256"].items()},
            }
            journal.write(json.dumps(done[u]) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
            bar.add(sum(len(ids) for _, ids in batch))
            if stopper.code:
                break
    bar.close()


def generate(llm, batch, **sampling):
    """One forward pass over the batch: each request makes the one token vLLM insists on."""
    from vllm import SamplingParams

    return llm.generate(
        [{"prompt_token_ids": ids} for _, ids in batch],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False, **sampling),
        use_tqdm=False,
    )


def write(llm, batch, folder: Path, storage_dtype: str) -> dict:
    """Have rank 0 write the rows of the passes since the last call."""
    results = llm.collective_rpc("capture_write", args=(batch, str(folder), storage_dtype))
    result = next(r for r in results if r is not None)
    if "os_error" in result:
        raise OSError(*result["os_error"])
    return result


def run_probe(llm, model, settings, head, by_index, indices, out: Path) -> None:
    """Check the capture on the beginnings of the first unit's samples, before any data."""
    from common import selfcheck

    layers, probe = settings["layers"], out / PROBE
    shutil.rmtree(probe, ignore_errors=True)
    batch = [(i, by_index[i].input_ids[: selfcheck.PROBE_TOKENS].tolist()) for i in indices]
    llm.collective_rpc("capture_check_layers", args=(True,))
    outputs = generate(llm, batch, prompt_logprobs=0)
    received = next(
        r for r in llm.collective_rpc("capture_check_layers", args=(False,)) if r is not None
    )
    result = write(llm, batch, probe, settings["dtype"])
    if result["bad"]:
        raise cli.UserError(
            f"sample {by_index[result['bad'][0]].id!r}: its hidden states hold NaN or Inf; nothing"
            " was written. Are the verifier's weights right?"
        )
    selfcheck.check_received(received, layers, model.num_layers)
    text = f"layers {layers[:-1]} are what the next layer receives"
    if head is not None:
        theirs = {
            i: [p[t].logprob for t, p in zip(ids[1:], o.prompt_logprobs[1:], strict=True)]
            for (i, ids), o in zip(batch, outputs, strict=True)
        }
        mean, count = selfcheck.check_final_layer(
            probe, theirs, head["norm"], head["lm_head"], model.rms_norm_eps
        )
        text = (
            f"the final layer reproduces the verifier's log-probabilities (mean |difference|"
            f" {mean:.2g} over {count} tokens), {text}"
        )
    progress.log(f"self-check: {text}")


def check_first_unit(out: Path, unit, checked, settings) -> None:
    """The first batch, once written, must agree with the probe; otherwise it goes again."""
    from common import selfcheck

    try:
        dtypes = {settings["dtype"], settings["verifier_dtype"]}
        median = selfcheck.check_layout(out, out / PROBE, checked, dtypes)
    except cli.UserError:
        for path in unit_files(out, unit):
            path.unlink()
        raise
    progress.log(f"self-check: the first batch agrees with the probe (median {median:.1g})")


def unit_files(out: Path, unit: list[int]) -> list[Path]:
    from common.hidden_files import hidden_file

    return [hidden_file(out, i) for i in unit]


def read_journal(out: Path, units, lengths, settings, hashes: bool) -> dict[int, dict]:
    """Units that an earlier run finished: noted in the journal and whole on the disk, where
    `hashes` says so to the byte."""
    from common.hidden_files import check_hidden_file, hidden_file

    path = out / JOURNAL
    done: dict[int, dict] = {}
    shape = len(settings["layers"]), settings["hidden_size"], settings["dtype"]
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
            float(entry["seconds"])
            for i in units[entry["unit"]]:
                path_i, noted = hidden_file(out, i), entry["sha256"][str(i)]
                check_hidden_file(path_i, lengths[i], *shape)
                if hashes and artifacts.sha256_file(path_i) != noted:
                    raise cli.UserError(f"{path_i}: its bytes have changed")
        except (ValueError, TypeError, KeyError, IndexError):  # the line that a kill cut
            continue
        except cli.UserError as e:
            progress.log(f"extract: {e} (its forward pass runs again)")
            continue
        done[entry["unit"]] = entry
    return done


def check_layers(layers: list[int], model) -> list[int]:
    wrong = [i for i in layers if not 0 <= i < model.num_layers]
    if wrong or len(set(layers)) != len(layers):
        raise cli.UserError(
            f"--layers {' '.join(map(str, layers))}: expected distinct layers from 0 to"
            f" {model.num_layers - 1}"
        )
    return sorted(layers)


def check_dtype(dtype: str, model) -> str:
    """Resolve `auto` to the verifier's dtype; refuse float16 where vLLM rescales the stream."""
    if dtype == "auto":
        dtype = str(model.text.get("dtype") or model.text.get("torch_dtype") or "bfloat16")
        dtype = dtype.removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise cli.UserError(f"the verifier's dtype is {dtype!r}; pass --dtype")
    if dtype == "float16" and "kv_lora_rank" in model.text:
        raise cli.UserError(
            "--dtype float16: vLLM divides the residual stream of DeepSeek-class models by"
            " routed_scaling_factor in float16; use bfloat16"
        )
    return dtype


if __name__ == "__main__":
    cli.run(main)
