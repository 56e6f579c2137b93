"""The draft as a speculators checkpoint, which vLLM loads as it is."""

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.artifacts import fsync_folder
from common.draft.config import DraftShape
from common.draft.model import Eagle3Draft
from common.errors import UserError, again, one_line
from common.manifest import DRAFT
from common.verifier.config import Verifier


def serving_layer_ids(layers: list[int]) -> list[int]:
    """Our layer i (the stream after layer i) is vLLM's and speculators' id i + 1 (the stream
    entering layer i + 1). This is the only place where the two conventions meet."""
    return [i + 1 for i in layers]


def speculators_config(shape: DraftShape, verifier: Verifier, aux_layers: list[int], depths: int):
    """Build the Eagle3SpeculatorConfig; the verifier is named by its path or hub name."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    path = Path(verifier.path)
    layer = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=verifier.max_positions or 4096,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    layer._attn_implementation = "eager"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocab_size,
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        eagle_aux_hidden_state_layer_ids=serving_layer_ids(aux_layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depths)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(path.resolve()) if path.is_dir() else verifier.path,
                architectures=[verifier.architecture],
            ),
        ),
    )


def speculators_draft(
    shape: DraftShape, verifier: Verifier, aux_layers: list[int], depths: int, dtype: torch.dtype
):
    """The draft as speculators' Eagle3DraftModel, without memory; UserError where the speculators
    installed cannot hold one of this shape."""
    try:
        from speculators.models.eagle3 import Eagle3DraftModel

        config = speculators_config(shape, verifier, aux_layers, depths)
        with torch.device("meta"):
            model = Eagle3DraftModel(config).to(dtype)  # type: ignore[arg-type]
    except (ImportError, TypeError, ValueError) as e:
        raise UserError(
            f"speculators cannot make this draft ({one_line(e, 200)}); install the version in"
            " requirements.txt"
        ) from None
    with torch.device("meta"):
        ours = {name: p.shape for name, p in Eagle3Draft(shape).named_parameters()}
    theirs = {name: p.shape for name, p in model.named_parameters()}
    differing = [name for name, size in ours.items() if theirs.get(name) != size]
    if differing:
        raise UserError(
            f"speculators has {differing[0]} in another size or not at all; install the version in"
            " requirements.txt"
        )
    return model


def export_draft(
    folder: Path,
    shape: DraftShape,
    weights: dict[str, torch.Tensor],
    verifier: Verifier,
    aux_layers: list[int],
    depths: int,
    d2t: torch.Tensor,
    t2d: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Write config.json and model.safetensors through speculators, complete or not at all.

    The embedding is the verifier's and is left out: the server shares its own.
    """
    model = speculators_draft(shape, verifier, aux_layers, depths, dtype)
    tensors = {k: v.detach().to("cpu", dtype) for k, v in weights.items()}
    if shape.draft_vocab_size < shape.vocab_size:  # vLLM loads no map of a whole vocabulary
        tensors |= {"d2t": d2t, "t2d": t2d}
    model.load_state_dict(tensors, strict=False, assign=True)
    partial = folder / ".export.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial, state_dict=tensors)
        # safetensors writes for its user alone; a server may be another
        (partial / "model.safetensors").chmod((partial / "config.json").stat().st_mode)
        for name in DRAFT:
            with open(partial / name, "rb") as f:
                os.fsync(f.fileno())
            os.replace(partial / name, folder / name)
        fsync_folder(folder)
    except OSError as e:  # it may name the file in site-packages that a copy is made of, or none
        raise OSError(e.errno, e.strerror, str(folder)) from None
    except SafetensorError as e:  # an I/O error in safetensors' own words
        raise UserError(
            f"{folder}: cannot write the checkpoint ({e}); free space, then {again()}"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
