"""Hooks on the draft inside vLLM's workers, which record its inputs and outputs.

Part of the worker extension (common/worker.py), so that every worker imports this.
"""

from typing import Any

import torch


class ServingMethods:
    """Worker methods that record what goes through the draft; rank 0 returns it."""

    rank: int  # vLLM's worker has both
    model_runner: Any

    def record_draft(self) -> None:
        """Record from now on."""
        draft = draft_model(self.model_runner)
        inner = draft.model
        # norm_before_fc (one) and fc_norm (one per layer) come before fc: record what they get.
        norms = getattr(inner, "fc_norm", None)
        targets = list(norms) if norms else [getattr(inner, "input_norm", None) or inner.fc]
        self._draft_inputs: list[list[torch.Tensor]] = [[] for _ in targets]
        self._draft_passes: list[tuple[torch.Tensor, torch.Tensor]] = []

        def record_output(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._draft_passes.append((ids.cpu().clone(), out[0].detach().float().cpu().clone()))

        def record_input(target: Any, inputs: list[torch.Tensor]) -> Any:
            return target.register_forward_pre_hook(
                lambda _module, args: inputs.append(args[0].detach().float().cpu().clone())
            )

        self._draft_hooks = [
            record_input(t, xs) for t, xs in zip(targets, self._draft_inputs, strict=True)
        ]
        self._draft_hooks.append(draft.register_forward_hook(record_output, with_kwargs=True))

    def recorded_draft(
        self,
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]] | None:
        """Stop recording. (what entered `fc` [tokens, aux layers x H] of each forward pass,
        (token ids, states after the output norm [tokens, H]) of each); None but on rank 0."""
        for hook in self._draft_hooks:
            hook.remove()
        aux = [torch.cat(parts, -1) for parts in zip(*self._draft_inputs, strict=True)]
        return (aux, self._draft_passes) if self.rank == 0 else None


def draft_model(model_runner: Any) -> Any:
    """The draft inside vLLM's model runner (V1: `drafter`, V2: `speculator`)."""
    for name in ("drafter", "speculator"):
        model = getattr(getattr(model_runner, name, None), "model", None)
        if model is not None:
            return model
    raise RuntimeError(f"no draft in {type(model_runner).__name__}")
