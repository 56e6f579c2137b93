"""Time speculators' own EAGLE-3 training step at a draft's shape; prints one JSON line.

python benchmarks/peer_training.py       # Kimi-K2.5's draft, rows of 8192, 3 depths, CUDA

As its trainer runs it: one packed row, flex attention and the fused loss, clip, fused AdamW, in
pure bfloat16, head frozen. The row is that of benchmarks/train_step.py.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.processes import show
from benchmarks.train_step import add_shape, random_row, shape_of, timed_alone
from common.draft.export import speculators_config
from common.verifier.config import Verifier


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    add_shape(p)
    a = p.parse_args()
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch

    from benchmarks.peer_trainer import leave_loss_uncompiled

    leave_loss_uncompiled()
    torch.manual_seed(0)
    shape = shape_of(a)
    verifier = Verifier("none", {}, {}, 61, a.hidden_size, a.vocab_size, 1e-6, 8192, ())
    config = speculators_config(shape, verifier, [2, 30, 58], a.ttt_steps)
    config.transformer_layer_config._attn_implementation = "simple_flex_attention"
    with torch.device(a.device):
        model: Any = Eagle3DraftModel(config)
        model.to(torch.bfloat16)
    frozen = (model.lm_head, model.verifier_lm_head, model.embed_tokens)
    with torch.no_grad():
        for module in frozen:
            module.weight.normal_(0, 0.02).requires_grad_(False)
    model.t2d.copy_(torch.arange(a.vocab_size) < a.draft_vocab_size)
    trained = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    loss_config = resolve_loss_config("kl_div", "fused")
    batches = []
    for n in range(3):
        row, mask = random_row(a, n, torch.bfloat16)
        batch = {
            "input_ids": row.ids_T,
            "hidden_states": row.states_TLH[:, :-1].flatten(1),
            "verifier_last_hidden_states": row.states_TLH[:, -1],
            "loss_mask": mask,
            "position_ids": row.positions_T,
            "lengths": torch.tensor([len(mask)]),
        }
        batch = shift_batch(batch)
        del batch["lengths"]
        batch["document_ids"] = row.sample_T[: len(batch["input_ids"])]
        # its collate function fills the position that the shift lost: its mask wants full rows
        for k, v in batch.items():
            filling = v.new_full(
                (a.tokens - len(v), *v.shape[1:]), -1 if k == "document_ids" else 0
            )
            batch[k] = torch.cat([v, filling])
        batches.append({k: v[None].to(a.device) for k, v in batch.items()})

    def step(n: int) -> tuple[float, float]:
        """(seconds, loss)"""
        torch.cuda.synchronize()
        started = time.perf_counter()
        _, loss, _ = model(
            **batches[n % len(batches)], ttt_steps=a.ttt_steps, loss_config=loss_config
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - started, float(loss)

    for n in range(a.warm_up):
        step(n)
    with timed_alone(a.together):
        times, losses = zip(*[step(n) for n in range(a.steps)], strict=True)
    median = sorted(times)[len(times) // 2]
    show(
        what="speculators' step",
        tokens=a.tokens,
        ttt_steps=a.ttt_steps,
        step_s=round(median, 4),
        tok_s=round(a.tokens / median),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1),
        loss=round(losses[-1], 3),
        torch=torch.__version__,
    )


if __name__ == "__main__":
    main()
