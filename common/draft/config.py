"""The draft's shape: what decides its architecture, from --draft-shape and the verifier."""

from dataclasses import dataclass
from typing import Any

from common.errors import UserError, nearest
from common.verifier.config import Verifier

SHAPE_KEYS = (
    "hidden_size",
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
    norm_before_fc: bool = False  # one norm over all aux layers
    fc_norm: bool = False  # one norm per aux layer
    norm_output: bool = False

    @property
    def query_size(self) -> int:
        """Of all heads' queries side by side."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Of all heads' keys, or values, side by side."""
        return self.num_key_value_heads * self.head_dim


def draft_shape(
    given: dict[str, Any],
    verifier: Verifier,
    num_aux_layers: int,
    draft_vocab_size: int,
    **norms: bool,
) -> DraftShape:
    """Return the shape: `given` (keys of SHAPE_KEYS) where it says, the verifier's otherwise.

    UserError naming the key that is unknown or whose value cannot be. The rotary embedding is
    always the plain one, so that nothing of a verifier's YaRN is inherited by training or by the
    server.
    """
    check_keys(given, verifier)
    rope = verifier.text.get("rope_parameters") or {}
    values: dict[str, Any] = {"rms_norm_eps": verifier.rms_norm_eps, "rope_theta": 10000.0}
    values |= {k: v for k, v in {**verifier.text, **rope}.items() if k in SHAPE_KEYS and v}
    values |= given
    heads = checked_number(values, "num_attention_heads", int)
    values.setdefault("num_key_value_heads", heads)
    values.setdefault("head_dim", verifier.hidden_size // heads)
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    shape = DraftShape(
        hidden_size=verifier.hidden_size,
        **{name: checked_number(values, name, int) for name in sizes},
        rope_theta=float(checked_number(values, "rope_theta", int, float)),
        rms_norm_eps=float(checked_number(values, "rms_norm_eps", int, float)),
        num_aux_layers=num_aux_layers,
        draft_vocab_size=draft_vocab_size,
        vocab_size=verifier.vocab_size,
        **norms,
    )
    if shape.head_dim % 2 or not 0 < shape.rms_norm_eps < 1 or not 1 < shape.rope_theta < 1e12:
        raise UserError(
            "--draft-shape: needs an even head_dim, 0 < rms_norm_eps < 1, rope_theta > 1"
        )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise UserError(
            f"--draft-shape: {shape.num_attention_heads} heads are no multiple of"
            f" {shape.num_key_value_heads} key/value heads"
        )
    if shape.hidden_size % shape.num_attention_heads:
        raise UserError(
            f"--draft-shape: hidden_size {shape.hidden_size} is no multiple of num_attention_heads"
            f" {shape.num_attention_heads}, which transformers' configuration of a draft asks for"
        )
    return shape


def check_keys(given: dict[str, Any], verifier: Verifier) -> None:
    """UserError where --draft-shape has an unknown key, or another hidden size."""
    unknown = [k for k in given if k not in SHAPE_KEYS]
    if unknown:
        raise UserError(
            f"--draft-shape: unknown key {unknown[0]}"
            f"{nearest(unknown[0], list(SHAPE_KEYS)) or '; known are ' + ', '.join(SHAPE_KEYS)}"
        )
    if given.get("hidden_size", verifier.hidden_size) != verifier.hidden_size:
        raise UserError(
            f"--draft-shape: hidden_size {given['hidden_size']} must be the verifier's"
            f" {verifier.hidden_size}, whose embedding and head the draft shares"
        )


def checked_number(values: dict[str, Any], name: str, *kinds: type) -> Any:
    """The value, of one of the kinds; UserError for another, or a number that is no size."""
    value: Any = values.get(name)
    if type(value) not in kinds or value < (1 if kinds == (int,) else 0):
        what = "a whole number of at least 1" if kinds == (int,) else "a number over 0"
        raise UserError(f"--draft-shape: {name} must be {what}, is {value!r}")
    return value


def check_on_gpu(shape: DraftShape, float8: bool) -> None:
    """UserError where the GPU's attention kernels, or cuBLAS in float8, do not take the shape."""
    s = shape
    if s.head_dim < 16:
        raise UserError(
            f"--draft-shape: head_dim {s.head_dim} is too small for a GPU; use 16 or more"
        )
    sizes = {
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_attention_heads * head_dim": s.query_size,
        "num_key_value_heads * head_dim": s.key_size,
    }
    for name, size in sizes.items():
        if float8 and size % 16:
            raise UserError(f"--float8: {name} {size} is no multiple of 16; train without")


def training_memory(
    shape: DraftShape, itemsize: int, world: int, optimizer_tensors: int, train_lm_head: bool
) -> int:
    """Bytes on the device that every step needs at least, activations left out: float32 weights;
    gradients and optimizer state of what is trained, the latter spread over `world` ranks; in the
    compute dtype, of `itemsize`, a copy, and the verifier's embedding and head.

    Args:
        optimizer_tensors: that the optimizer keeps per parameter.
    """
    count = parameter_count(shape)
    trained = count if train_lm_head else count - shape.hidden_size * shape.draft_vocab_size
    copy = itemsize if itemsize < 4 else 0
    draft = count * (4 + copy) + trained * (4 + 4 * optimizer_tensors / world)
    return round(draft) + 2 * shape.vocab_size * shape.hidden_size * itemsize


def parameter_count(shape: DraftShape) -> int:
    """Parameters of the draft, norms left out."""
    s = shape
    fc = s.num_aux_layers * s.hidden_size**2
    layer = 2 * s.hidden_size * (s.query_size + 2 * s.key_size) + s.query_size * s.hidden_size
    layer += 3 * s.hidden_size * s.intermediate_size
    return fc + layer + s.hidden_size * s.draft_vocab_size


def flops_of_step(
    shape: DraftShape, tokens: int, queries: int, losses: list[int], train_lm_head: bool
) -> int:
    """Floating-point operations of one step, forward and backward, attention scores left out.

    Args:
        tokens: of the rows; fc and depth-0 keys and values.
        queries: query positions, which run at every depth.
        losses: per depth, the rows of the head.
    """
    s = shape
    keys_values = 2 * s.hidden_size * 2 * s.key_size
    queries_mlp = 3 * s.hidden_size * s.query_size + 3 * s.hidden_size * s.intermediate_size
    # a norm before fc takes a gradient from fc's input
    fc = (6 if s.norm_before_fc or s.fc_norm else 4) * s.num_aux_layers * s.hidden_size**2
    total = tokens * (fc + 6 * keys_values)
    total += 6 * queries * (len(losses) * queries_mlp + (len(losses) - 1) * keys_values)
    head = s.hidden_size * s.draft_vocab_size
    head_products = (3 if train_lm_head else 2) * sum(losses) + max(losses, default=0)
    return total + 2 * head_products * head
