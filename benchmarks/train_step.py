"""Time one training step of 04 at a draft's shape, on random states; prints one JSON line.

python benchmarks/train_step.py            # Kimi-K2.5's draft, rows of 8192, 3 depths, CUDA
python benchmarks/train_step.py --profile      # and where a step's time goes, by kernel group
python benchmarks/train_step.py --plain-merge  # without attention_kernel.py, by torch.compile
python benchmarks/train_step.py --device cpu --hidden-size 576 --intermediate-size 1536 \
    --heads 9 --head-dim 64 --vocab-size 49152 --draft-vocab-size 8192   # SmolLM2's draft, a CPU
"""

import argparse
import contextlib
import fcntl
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from common.draft.config import DraftShape, flops_of_step
from common.draft.linear_products import LinearProducts
from common.draft.model import Eagle3Draft, initialize
from common.draft.packed_row import PackedRow, make_row
from common.training.optimizers import make_optimizers
from common.training.step import Target, Trainer
from common.verifier.head import HeadFacts

# By a part of the kernel's name, first match.
GROUPS = {
    "attention": ("flex", "own_keys"),
    "float8 casts": ("cast_kernel", "amax_kernel"),
    "matrix products": ("nvjet", "gemm", "cutlass", "xmma"),
    "compiled regions": ("triton",),
    "optimizer, clipping": ("multi_tensor", "adam", "foreach"),
    "copies": ("memcpy", "memset", "copy"),
    "indexing": ("index", "gather", "scatter", "sort"),
}


def add_shape(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", default="cuda")
    p.add_argument("--hidden-size", type=int, default=7168)
    p.add_argument("--intermediate-size", type=int, default=18432)
    p.add_argument("--heads", type=int, default=64)
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--vocab-size", type=int, default=163840)
    p.add_argument("--draft-vocab-size", type=int, default=32000)
    p.add_argument("--tokens", type=int, default=8192, help="of a packed row")
    p.add_argument("--sample-tokens", type=int, default=512)
    p.add_argument("--loss-share", type=float, default=0.72, help="of a sample, at its end")
    p.add_argument("--ttt-steps", type=int, default=3)
    p.add_argument("--rule", default="answer")
    p.add_argument("--warm-up", type=int, default=4)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--together", nargs=2, metavar=("DIR", "COUNT"), help="see timed_alone")


@contextlib.contextmanager
def timed_alone(together: list[str] | None) -> Iterator[None]:
    """For COUNT processes that share a GPU's memory and the minutes of compiling: wait until all
    have warmed up (each leaves a file in DIR), then for this one's turn on the idle GPU."""
    if together is None:
        yield
        return
    torch.cuda.synchronize()
    folder, count = Path(together[0]), int(together[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.ready").touch()
    started = time.monotonic()
    while len(list(folder.glob("*.ready"))) < count:
        if time.monotonic() > started + 300:
            raise SystemExit(f"{folder}: the others do not come up")
        time.sleep(0.1)
    with open(folder / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def shape_of(a: argparse.Namespace) -> DraftShape:
    return DraftShape(
        a.hidden_size, a.intermediate_size, a.heads, a.heads, a.head_dim, 1e6, 1e-6, 3,
        a.draft_vocab_size, a.vocab_size, norm_before_residual=True,
    )  # fmt: skip


def random_row(
    a: argparse.Namespace, seed: int, dtype: torch.dtype
) -> tuple[PackedRow, torch.Tensor]:
    """(row, loss mask [T]): samples of a.sample_tokens whose last part carries loss, its
    length another one for every seed."""
    torch.manual_seed(seed)
    lengths = [a.sample_tokens] * (a.tokens // a.sample_tokens)
    position_T = torch.arange(a.tokens) % a.sample_tokens
    mask = position_T >= a.sample_tokens * (1 - a.loss_share) + 8 * (seed - 1)
    states = torch.randn(a.tokens, 4, a.hidden_size, dtype=dtype)
    ids = torch.randint(0, a.vocab_size, (a.tokens,))
    return make_row(states, None, ids, mask, lengths, a.ttt_steps, a.rule), mask


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    add_shape(p)
    p.add_argument("--train-lm-head", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--optimizer", default="adamw")
    p.add_argument("--float8", action="store_true")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--plain-merge", action="store_true", help="own keys by merge_own_keys_plain")
    a = p.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    if a.plain_merge:
        from common.draft import attention, attention_kernel

        attention_kernel.merge_own_keys = attention.merge_own_keys_plain
    dtype = torch.bfloat16
    shape = shape_of(a)
    with torch.device(a.device):
        head = torch.randn(a.vocab_size, a.hidden_size, dtype=dtype) * 0.02
        tokens = torch.arange(a.draft_vocab_size)
        target = Target(
            HeadFacts("bfloat16", False, 1e-6),
            bias_V=None,
            bias_D=None,
            embed_VH=torch.randn(a.vocab_size, a.hidden_size, dtype=dtype),
            head_VH=head,
            head_DH=head[tokens],
            norm_H=torch.ones(a.hidden_size),
            token_D=tokens,
        )
        draft = Eagle3Draft(shape)
        initialize(draft, target.head_DH)
    draft.lm_head.weight.requires_grad_(a.train_lm_head)
    optimizers = make_optimizers(draft, a.optimizer, 1e-4, 0.0, 1)
    trainer = Trainer(draft, target, LinearProducts(dtype, a.float8), optimizers, 1.0)
    rows = [random_row(a, n, dtype)[0].to(a.device) for n in range(min(3, a.warm_up + a.steps))]
    at_start = psutil.Process().memory_info().rss

    def step(n: int) -> tuple[float, float]:
        """Seconds of a step (its sums were read, so the device has finished), and of its launch."""
        started = time.perf_counter()
        row = rows[n % len(rows)]
        counts = [one.real for one in row.losses]
        sums = trainer.step(iter([row]), 1, [1 / c for c in counts], 1e-4)
        launched = time.perf_counter() - started
        sums.metrics(n, counts)
        return time.perf_counter() - started, launched

    started = time.perf_counter()
    for n in range(a.warm_up):
        step(n)
    warm_up = time.perf_counter() - started
    with timed_alone(a.together):
        times, launches = zip(*[step(n) for n in range(a.steps)], strict=True)
        if a.profile:
            profile(step)
    flops = []
    for row in rows:
        losses = [one.real for one in row.losses]
        flops.append(flops_of_step(shape, a.tokens, len(row.query_N), losses, a.train_lm_head))
    rates = sorted(flops[n % len(rows)] / seconds for n, seconds in enumerate(times))
    median = sorted(times)[len(times) // 2]
    found = {
        "what": "train_step",
        "tokens": a.tokens,
        "ttt_steps": a.ttt_steps,
        "rule": a.rule,
        "train_lm_head": a.train_lm_head,
        "optimizer": a.optimizer,
        "float8": a.float8,
        "plain_merge": a.plain_merge,
        "queries": len(rows[0].query_N),
        "warm_up_s": round(warm_up, 1),
        "step_s": round(median, 4),
        "launch_s": round(sorted(launches)[len(launches) // 2], 4),
        "tok_s": round(a.tokens / median),
        "tflops": round(rates[len(rates) // 2] / 1e12, 1),
        "torch": torch.__version__,
    }
    if a.device == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found |= {"peak_gb": round(peak / 1e9, 2), "at_start_gb": round(at_start / 1e9, 2)}
    print(json.dumps(found), flush=True)


def profile(step) -> None:
    """Print a step's milliseconds by group of kernels, those idle, and the longest kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    count = 3
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        for n in range(count):
            step(n)
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        name, ms = event.key.lower(), event.self_device_time_total / 1000 / count
        group = next((g for g, parts in GROUPS.items() if any(x in name for x in parts)), "others")
        groups[group] += ms
        kernels[event.key[:90]] += ms
    ranges = [e.time_range for e in seen.events() if e.device_type == DeviceType.CUDA]
    busy, end = 0.0, 0.0
    for one in sorted(ranges, key=lambda x: x.start):
        busy += max(0.0, one.end - max(one.start, end))
        end = max(end, one.end)
    groups["idle"] = (end - min(x.start for x in ranges) - busy) / 1000 / count
    print(json.dumps({k: round(v, 2) for k, v in sorted(groups.items(), key=lambda x: -x[1])}))
    for name, ms in sorted(kernels.items(), key=lambda x: -x[1])[:40]:
        print(f"{ms:8.2f} ms  {name}")


if __name__ == "__main__":
    main()
