"""The draft's shape: what decides its architecture, from --draft and the verifier."""

from dataclasses import dataclass

from common.cli import UserError, nearest
from common.verifier import Verifier

SHAPE_KEYS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class DraftShape:
    """Everything that decides the draft's architecture."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    num_aux_layers: int
    draft_vocab_size: int
    vocab_size: int
    norm_before_residual: bool = True
    norm_before_fc: bool = False
    norm_output: bool = False


def draft_shape(
    given: dict, verifier: Verifier, num_aux_layers: int, draft_vocab_size: int, **norms: bool
) -> DraftShape:
    """Return the shape: `given` (keys of SHAPE_KEYS) where it says, the verifier's otherwise.

    The rotary embedding is always the plain one, so that nothing of a verifier's YaRN is
    inherited by training or by the server.
    """
    unknown = [k for k in given if k not in SHAPE_KEYS]
    if unknown:
        raise UserError(f"--draft: unknown key {unknown[0]}{nearest(unknown[0], list(SHAPE_KEYS))}")
    text = verifier.text
    rope = text.get("rope_parameters") or {}
    heads = int(given.get("num_attention_heads") or text["num_attention_heads"])
    theta = given.get("rope_theta") or text.get("rope_theta") or rope.get("rope_theta") or 10000.0
    shape = DraftShape(
        hidden_size=verifier.hidden_size,
        intermediate_size=int(given.get("intermediate_size") or text["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(given.get("num_key_value_heads") or heads),
        head_dim=int(given.get("head_dim") or verifier.hidden_size // heads),
        rope_theta=float(theta),
        rms_norm_eps=float(given.get("rms_norm_eps") or verifier.rms_norm_eps),
        num_aux_layers=num_aux_layers,
        draft_vocab_size=draft_vocab_size,
        vocab_size=verifier.vocab_size,
        **norms,
    )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise UserError(
            f"--draft: {shape.num_attention_heads} heads are no multiple of"
            f" {shape.num_key_value_heads} key/value heads"
        )
    return shape


def parameter_count(shape: DraftShape) -> int:
    """Parameters of the draft, norms left out."""
    s = shape
    q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    fc = s.num_aux_layers * s.hidden_size**2
    layer = 2 * s.hidden_size * (q + 2 * kv) + q * s.hidden_size
    layer += 3 * s.hidden_size * s.intermediate_size
    return fc + layer + s.hidden_size * s.draft_vocab_size


def flops_a_token(shape: DraftShape, depths: int) -> int:
    """Floating-point operations of training on a token, forward and backward, as if every
    token carried loss at every depth; attention itself left out."""
    head = shape.hidden_size * shape.draft_vocab_size
    fc = shape.num_aux_layers * shape.hidden_size**2
    return 6 * (fc + depths * (parameter_count(shape) - fc)) + 2 * head
