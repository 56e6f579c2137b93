"""`speculators train` with its own flags, on torch 2.11 too.

python benchmarks/peer_trainer.py --speculator-type eagle3 --data-path LAYOUT ...

torch 2.11's dynamo cannot trace its fused loss (two autotuned kernels share a list), so the loss
runs outside the compiled graph, as in benchmarks/peer_training.py.
"""

import runpy

import speculators.losses.fused as fused
import torch

if __name__ == "__main__":
    fused.fused_kl_div_loss = torch._dynamo.disable(fused.fused_kl_div_loss)
    runpy.run_module("speculators.train", run_name="__main__", alter_sys=True)
