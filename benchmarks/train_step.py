"""Time one training step of 04 at a draft's shape, on random states; prints a JSON line.

python benchmarks/train_step.py            # Kimi-K2.5's draft, rows of 8192, 3 depths, CUDA
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from common.draft_shape import DraftShape, flops_of_step
from common.eagle3 import Eagle3Draft, initialize
from common.packed_row import PackedRow, make_row
from common.training import Trainer
from common.ttt_step import Teacher

WARM_UP = 4  # compiles for one length, then for any


def random_row(a: argparse.Namespace, seed: int, dtype: torch.dtype) -> PackedRow:
    """Samples of a.sample_tokens whose last part carries loss; every seed another length."""
    torch.manual_seed(seed)
    lengths = [a.sample_tokens] * (a.tokens // a.sample_tokens)
    places = torch.arange(a.tokens) % a.sample_tokens
    mask = places >= a.sample_tokens * (1 - a.loss_share) + 8 * seed
    states = torch.randn(a.tokens, 4, a.hidden_size, dtype=dtype)
    ids = torch.randint(0, a.vocab_size, (a.tokens,))
    return make_row(states, None, ids, mask, lengths, a.ttt_steps, a.rule)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
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
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--train-lm-head", action=argparse.BooleanOptionalAction, default=True)
    a = p.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    H, dtype = a.hidden_size, torch.bfloat16
    shape = DraftShape(
        H, a.intermediate_size, a.heads, a.heads, a.head_dim, 1e6, 1e-6, 3, a.draft_vocab_size,
        a.vocab_size, True, True,
    )  # fmt: skip
    with torch.device(a.device):
        head = torch.randn(a.vocab_size, H, dtype=dtype) * 0.02
        target = torch.arange(a.draft_vocab_size)
        teacher = Teacher(
            embed_VH=torch.randn(a.vocab_size, H, dtype=dtype),
            head_VH=head,
            head_DH=head[target],
            norm_H=torch.ones(H),
            eps=1e-6,
            target_D=target,
        )
        masters = Eagle3Draft(shape)
        initialize(masters, teacher.head_DH)
    masters.lm_head.weight.requires_grad_(a.train_lm_head)
    trained = [w for w in masters.parameters() if w.requires_grad]
    trainer = Trainer(masters, dtype, [torch.optim.AdamW(trained, lr=1e-4, fused=True)], 1.0)
    rows = [random_row(a, n, dtype).to(a.device) for n in range(3)]
    times = []
    for n in range(a.steps + WARM_UP):
        began = time.perf_counter()
        row = rows[n % len(rows)]
        counts = [one.real for one in row.losses]
        found = trainer.step(teacher, [row], [1 / c for c in counts], 1e-4).metrics(n, counts)
        if n >= WARM_UP:  # the loss was read: the device has finished
            times.append(time.perf_counter() - began)
    flops = flops_of_step(shape, a.tokens, len(row.columns_N), counts)
    median = sorted(times)[len(times) // 2]
    print(
        json.dumps(
            {
                "what": "train_step",
                "tokens": a.tokens,
                "ttt_steps": a.ttt_steps,
                "rule": a.rule,
                "train_lm_head": a.train_lm_head,
                "step_s": round(median, 4),
                "tok_s": round(a.tokens / median),
                "tflops": round(flops / median / 1e12, 1),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)
                if a.device == "cuda"
                else None,
                "loss": round(found["loss"], 3),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
