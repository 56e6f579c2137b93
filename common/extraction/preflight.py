"""What can be known before the verifier loads: flags against its config, the plan, memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from common.artifacts import free_space
from common.data.samples import FILE, Sample, read_samples
from common.errors import UserError
from common.extraction.batching import Batch, make_batches, shard_batches
from common.extraction.memory import (
    GB,
    check_gpus,
    check_host,
    cpu_vllm,
    gpus,
    memory_needed,
)
from common.extraction.settings import ExtractSettings
from common.extraction.work import Capture, Work
from common.manifest import Output
from common.progress import duration, log
from common.states.files import StatesFormat
from common.states.journal import (
    LENGTHS,
    Entry,
    Plan,
    finished_batches,
    missing_samples,
    read_plan,
)
from common.verifier.config import Verifier
from common.verifier.head import HEAD_FILE
from common.verifier.weights import Weights

STORAGE = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}

# What the capture and the plan of batches rest on, and the flag that sets it.
CAPTURE_ARGS = {
    "model": "--model-path",
    "tensor_parallel_size": "--tp-size",
    "dtype": "--dtype",
    "max_model_len": "--max-seq-len",
    "max_num_batched_tokens": "--max-batch-tokens",
    "max_num_seqs": "--batch-size",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "trust_remote_code": "--trust-remote-code",
    "enforce_eager": None,
    "enable_prefix_caching": None,
    "worker_extension_cls": None,
    "async_scheduling": None,
    "skip_tokenizer_init": None,
    # The layers of a batch would lie on several ranks, one of which captures.
    "pipeline_parallel_size": "--tp-size (or --num-shards)",
}


def check_engine_args(extra: dict[str, Any]) -> None:
    """UserError for an --engine-args key that the capture depends on."""
    for key in extra:
        if key in CAPTURE_ARGS:
            flag = CAPTURE_ARGS[key]
            remedy = f"use {flag}" if flag else "the capture depends on its value"
            raise UserError(f"--engine-args: {key} cannot be set here; {remedy}")


def check_divides(verifier: Verifier, tp_size: int) -> None:
    """UserError where a rank's share of heads or of an expert would not be a whole number."""
    t = verifier.text
    heads, kv_heads = t.get("num_attention_heads"), t.get("num_key_value_heads")
    if heads and heads % tp_size:
        raise UserError(
            f"--tp-size {tp_size}: the verifier's {heads} attention heads do not divide"
        )
    if kv_heads and not t.get("kv_lora_rank") and kv_heads % tp_size and tp_size % kv_heads:
        raise UserError(
            f"--tp-size {tp_size}: the verifier's {kv_heads} key/value heads neither divide nor"
            " repeat evenly"
        )
    for name in ("intermediate_size", "moe_intermediate_size"):
        if isinstance(t.get(name), int) and t[name] % tp_size:
            raise UserError(f"--tp-size {tp_size}: the verifier's {name} {t[name]} does not divide")


def resolve_capture(settings: ExtractSettings, verifier: Verifier) -> Capture:
    """Layers and dtypes by the flags or by default; UserError where the verifier has no such
    layers, or vLLM would rescale the residual stream."""
    layers = settings.layers or verifier.default_layers()
    if verifier.num_layers < 4:
        raise UserError(
            f"{verifier.path}: has {verifier.num_layers} decoder layers; a draft is fed three aux"
            " layers beside the final one"
        )
    given = f"--layers {' '.join(map(str, layers))}"
    if len(set(layers)) != len(layers) or not all(0 <= i < verifier.num_layers for i in layers):
        raise UserError(f"{given}: expected distinct layers from 0 to {verifier.num_layers - 1}")
    if len(layers) != 4 or max(layers) != verifier.num_layers - 1:
        raise UserError(
            f"{given}: expected three aux layers, as vLLM feeds a draft, and the final one,"
            f" {verifier.num_layers - 1}, from which 04 makes its targets"
        )
    dtype = settings.dtype
    if dtype == "auto":
        levels = verifier.config, verifier.text  # a wrapper's word counts, as in vLLM
        found = (level.get(key) for level in levels for key in ("dtype", "torch_dtype"))
        dtype = str(next(filter(None, found), "bfloat16")).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise UserError(f"the verifier's dtype is {dtype!r}; pass --dtype")
    if dtype == "float16" and "kv_lora_rank" in verifier.text:
        raise UserError(
            "--dtype float16: vLLM divides the residual stream of DeepSeek-class models by"
            " routed_scaling_factor in float16; use bfloat16"
        )
    stored = dtype if settings.storage_dtype == "auto" else settings.storage_dtype
    form = StatesFormat(len(layers), verifier.hidden_size, STORAGE.get(stored, stored))
    return Capture(verifier, sorted(layers), dtype, form)


# ---------------------------------------------------------------- the plan


def batch_samples(
    settings: ExtractSettings, verifier: Verifier, prepared: Path
) -> tuple[Plan, dict[int, Sample]]:
    """Read and check all samples; returns this shard's batches and samples."""
    found = read_samples(prepared, settings.max_samples, verifier.vocab_size)
    samples = {s.index: s for s in found}
    lengths = {i: len(s.input_ids) for i, s in samples.items()}
    check_longest(settings, verifier, prepared, lengths)
    batches = make_batches(lengths, settings.max_batch_tokens, settings.batch_size)
    if settings.num_shards > len(batches):
        raise UserError(
            f"--num-shards {settings.num_shards}: the samples make {len(batches)} forward passes;"
            " use fewer shards or a lower --max-batch-tokens"
        )
    if settings.num_shards > 1:
        batches = shard_batches(batches, lengths, settings.num_shards, settings.shard_index)
        lengths = {i: lengths[i] for batch in batches for i in batch}
        samples = {i: samples[i] for i in lengths}
    return Plan(batches, lengths), samples


def check_longest(
    settings: ExtractSettings, verifier: Verifier, prepared: Path, lengths: dict[int, int]
) -> None:
    """UserError naming the longest sample where it is over a limit."""
    index = max(lengths, key=lambda i: lengths[i])
    limit = min(verifier.longest_sample(settings.max_seq_len), settings.max_batch_tokens)
    if lengths[index] > limit:
        raise UserError(
            f"{prepared / FILE}:{index + 1}: the sample has {lengths[index]} tokens, over"
            f" {limit} (the least of --max-seq-len {settings.max_seq_len}, --max-batch-tokens"
            f" {settings.max_batch_tokens} and the verifier's positions less one); raise the flag"
            " or prepare shorter samples with 01"
        )


def plan_work(
    settings: ExtractSettings, capture: Capture, output: Output, state: str, prepared: Path
) -> Work:
    """What is left to do in a folder that is in `state`, see Output.earlier_run: samples without
    hidden states too, which are tried again where there are more than --allow-missing."""
    out, verifier = output.folder, capture.verifier
    done: dict[int, Entry] = {}
    samples: dict[int, Sample] = {}
    if state == "none":
        plan, samples = batch_samples(settings, verifier, prepared)
    else:
        plan = read_plan(out)
        check_longest(settings, verifier, prepared, plan.lengths)
        done = finished_batches(out, plan, capture.form)
    todo = [Batch(n, indices) for n, indices in enumerate(plan.batches) if n not in done]
    if len(missing_samples(done)) > settings.allow_missing:
        todo += [Batch(n, [*entry.missing]) for n, entry in done.items() if entry.missing]
    complete = state == "complete" and not todo
    work = Work(capture, output, plan, done, todo, samples, settings.max_batch_tokens, complete)
    indices = {i for batch in work.probed for i in batch.indices}
    if not todo and work.has_head:  # nothing to do
        return work
    if state != "none":
        found = read_samples(prepared, settings.max_samples, verifier.vocab_size, indices)
        samples = {s.index: s for s in found}
        lengths = {i: len(s.input_ids) for i, s in samples.items()}
        wrong = next((i for i in sorted(indices) if lengths.get(i) != plan.lengths[i]), None)
        if wrong is not None:
            raise UserError(
                f"{out / LENGTHS}: is damaged, {prepared / FILE}:{wrong + 1} has not"
                f" {plan.lengths[wrong]} tokens; --overwrite makes the folder again"
            )
    return replace(work, samples={i: samples[i] for i in sorted(indices)})


def check_plan(settings: ExtractSettings, weights: Weights, work: Work) -> None:
    """Print what is known before the load, a line per topic, and check memory; UserError where
    the run could not succeed."""
    capture, verifier, tp = work.capture, work.capture.verifier, settings.tp_size
    need = memory_needed(capture, weights, tp, settings.max_batch_tokens)
    on_cpu = cpu_vllm()
    found = [] if on_cpu else gpus()
    lines = {
        "verifier": f"{verifier.architecture}, {verifier.num_layers} layers, hidden"
        f" {verifier.hidden_size}, vocabulary {verifier.vocab_size}, {capture.verifier_dtype}",
        "layers": f"{' '.join(map(str, capture.layers))} (output of the layer, from 0)",
        "weights": f"{weights.size / GB:.1f} GB in {weights.files} files,"
        f" {need.weights / GB:.1f} GB per rank at TP={tp}",
        "memory/rank": f"about {need.vllm / GB:.1f} GB: weights {need.weights / GB:.1f}, KV cache"
        f" {need.kv_cache / GB:.2f}, activations about {need.activations / GB:.1f}; capture"
        f" {need.capture / GB:.2f} on rank 0",
        "host memory": f"{need.host / GB:.2f} GB of buffers on rank 0",
    }
    for g in found:
        users = f", used by {'; '.join(g.holders)}" if g.holders else ""
        lines[f"GPU {g.index}"] = (
            f"{g.name}, {g.free / GB:.1f} of {g.total / GB:.1f} GB free{users}"
        )
    if verifier.window:
        lines["window"] = (
            f"{verifier.window} tokens in every layer; vLLM serves a draft under it too, and 04"
            " trains it over whole samples: on longer ones it will be accepted less"
        )
    for name, text in (lines | work_lines(settings, work)).items():
        log(f"  {name:<14} {text}")
    if settings.dry_run and not weights.here:  # a plan made elsewhere
        log(
            f"  the weights of {verifier.path} are not here: neither they nor this machine's memory"
            " are checked"
        )
        return
    if found:
        check_gpus(found, need, tp, settings.gpu_memory_utilization, settings.engine_args)
    elif not on_cpu:
        log("  no NVIDIA GPU is visible here: its memory is not checked")
    check_host(need, on_cpu, tp)


def work_lines(settings: ExtractSettings, work: Work) -> dict[str, str]:
    """The plan's lines about batches, disk, and, on a resume, time."""
    plan, done, out = work.plan, work.done, work.out
    fill = 100 * plan.tokens / (len(plan.batches) * settings.max_batch_tokens)
    count = f"{len(plan.batches)} forward pass{'es' if len(plan.batches) > 1 else ''}"
    lines = {
        "work": f"{len(plan.lengths)} samples, {plan.tokens} tokens in {count} of at most"
        f" {settings.max_batch_tokens} tokens ({fill:.0f} % full)"
        + (f"; {len(done)} are done" if done else ""),
        "disk": f"{work.todo_bytes / GB:.2f} GB in {work.capture.form.dtype} to write,"
        f" {free_space(out) / GB:.1f} GB free",
    }
    if not work.has_head:
        lines["head"] = f"{work.head_bytes / GB:.2f} GB in {work.head_folder / HEAD_FILE}"
    if done:
        finished = sum(plan.lengths[i] for entry in done.values() for i in entry.checksums)
        rate = finished / max(1e-9, sum(entry.seconds for entry in done.values()))
        left = (plan.tokens - finished) / max(1e-9, rate)
        lines["time"] = f"about {duration(left)} at {rate:.0f} tok/s so far"
    if settings.num_shards > 1:
        lines["shard"] = f"{settings.shard_index} of {settings.num_shards} -> {out}"
    return lines
