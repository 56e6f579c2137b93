"""`speculators train` with its own flags, on torch 2.11 too.

python benchmarks/peer_trainer.py --speculator-type eagle3 --data-path LAYOUT ...
"""

import runpy

import speculators.losses.fused as fused
import torch


def leave_loss_uncompiled() -> None:
    """Run speculators' fused loss outside the compiled graph: torch 2.11's dynamo cannot trace
    its two autotuned kernels, which share a list."""
    fused.fused_kl_div_loss = torch._dynamo.disable(fused.fused_kl_div_loss)


if __name__ == "__main__":
    leave_loss_uncompiled()
    runpy.run_module("speculators.train", run_name="__main__", alter_sys=True)
