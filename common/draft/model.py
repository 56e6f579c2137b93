"""The EAGLE-3 draft: one decoder layer over the verifier's states, and its TTT step.

Architecture of speculators 0.9 (models/eagle3) and vLLM's llama_eagle3, with the same
parameter names; training-time test after EAGLE-3 (arXiv 2503.01840, section 3.2).

Shape suffixes: T tokens of a packed row, N query positions computed, H hidden size, A aux layers,
h heads, g key/value heads, d head_dim, Q = h*d, K = g*d, I intermediate size, D draft
vocabulary, V verifier's.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common.draft.attention import TTTAttention, rope_table, rotate
from common.draft.compiled import region
from common.draft.config import DraftShape
from common.draft.linear_products import LinearProducts
from common.draft.packed_row import PackedRow
from common.verifier.logits import rms_norm

rms_norm_region = region(rms_norm)


class RMSNorm(nn.Module):
    """See rms_norm; a shape [..., size] stays."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm_region(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections; of queries, keys and values from [embedding, hidden] of 2H."""

    def __init__(self, s: DraftShape):
        super().__init__()
        self.q_proj = nn.Linear(2 * s.hidden_size, s.query_size, bias=False)
        self.k_proj = nn.Linear(2 * s.hidden_size, s.key_size, bias=False)
        self.v_proj = nn.Linear(2 * s.hidden_size, s.key_size, bias=False)
        self.o_proj = nn.Linear(s.query_size, s.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU, [N, H] to [N, H]."""

    def __init__(self, s: DraftShape):
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, linears: LinearProducts, x_NH: torch.Tensor) -> torch.Tensor:
        gate_up = linears.products(x_NH, self.gate_proj, self.up_proj)
        return linears.product(swiglu(*gate_up), self.down_proj)


@region
def swiglu(gate_NI: torch.Tensor, up_NI: torch.Tensor) -> torch.Tensor:
    return F.silu(gate_NI) * up_NI


class Layer(nn.Module):
    """The decoder layer's parameters; ttt_states runs it."""

    def __init__(self, s: DraftShape):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)  # of the hidden state
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)


class Eagle3Draft(nn.Module):
    """Parameters of the draft. The embedding [V, H] is the verifier's, frozen, kept outside."""

    def __init__(self, shape: DraftShape):
        super().__init__()
        s = self.shape = shape
        if s.fc_norm:
            norms = [RMSNorm(s.hidden_size, s.rms_norm_eps) for _ in range(s.num_aux_layers)]
            self.fc_norm = nn.ModuleList(norms)
        if s.norm_before_fc:
            self.input_norm = RMSNorm(s.num_aux_layers * s.hidden_size, s.rms_norm_eps)
        self.fc = nn.Linear(s.num_aux_layers * s.hidden_size, s.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(s)])
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.lm_head = nn.Linear(s.hidden_size, s.draft_vocab_size, bias=False)

    @property
    def layer(self) -> Layer:
        """The one decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def fuse(self, linears: LinearProducts, aux_TAH: torch.Tensor) -> torch.Tensor:
        """Aux hidden states [T, A*H] → [T, H]."""
        if self.shape.norm_before_fc:
            aux_TAH = self.input_norm(aux_TAH)
        if self.shape.fc_norm:
            parts = aux_TAH.chunk(self.shape.num_aux_layers, -1)
            aux_TAH = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], -1)
        return linears.product(aux_TAH, self.fc)


@torch.no_grad()
def initialize(draft: Eagle3Draft, head_DH: torch.Tensor) -> None:
    """Random weights from torch's generator; the head starts as the verifier's rows [D, H]."""
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02)
    draft.lm_head.weight.copy_(head_DH)


# ---------------------------------------------------------------- the step


@region
def layer_input(
    embedded_NH: torch.Tensor,
    hidden_NH: torch.Tensor,
    embedding_norm_H: torch.Tensor,
    hidden_norm_H: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normed embedding and hidden state side by side [N, 2H], the latter [N, H])."""
    normed_NH = rms_norm(hidden_NH, hidden_norm_H, eps)
    embedded_NH = rms_norm(embedded_NH, embedding_norm_H, eps)
    return torch.cat([embedded_NH, normed_NH], -1), normed_NH


def ttt_states(
    draft: Eagle3Draft, linears: LinearProducts, embed_VH: torch.Tensor, row: PackedRow
) -> list[torch.Tensor]:
    """Run the draft at all depths; return each depth's states at the row's query positions, [N, H].

    The states are those before the output norm, in the compute dtype. Depth 0 makes
    keys and values for every token; everything else runs at the query positions alone.
    """
    s, layer, attn = draft.shape, draft.layer, draft.layer.self_attn
    h, g, d = s.num_attention_heads, s.num_key_value_heads, s.head_dim
    query_N = row.query_N
    positions_N = row.positions_T[query_N]

    def inputs(ids_N: torch.Tensor, hidden_NH: torch.Tensor):
        """Return (input of the projections [N, 2H], residual [N, H])."""
        norms = layer.input_layernorm.weight, layer.hidden_norm.weight
        x_N2H, normed_NH = layer_input(embed_VH[ids_N], hidden_NH, *norms, s.rms_norm_eps)
        return x_N2H, normed_NH if s.norm_before_residual else hidden_NH

    def keys_values(k_NK: torch.Tensor, v_NK: torch.Tensor, rope_N2d: torch.Tensor):
        """Return (rotated keys, values), [N, g, d]."""
        return rotate(k_NK.view(-1, g, d), rope_N2d), v_NK.view(-1, g, d)

    # Position t takes token t+1; a row's or sample's last position has none and is never needed.
    following_T = row.ids_T.roll(-1)
    x_T2H, residual_TH = inputs(following_T, draft.fuse(linears, row.aux(linears.dtype)))
    rope_T2d = rope_table(row.positions_T, d, s.rope_theta)
    k_TK, v_TK = linears.products(x_T2H, attn.k_proj, attn.v_proj)
    attention = TTTAttention(row, *keys_values(k_TK, v_TK, rope_T2d))
    q_NQ = linears.product(x_T2H[query_N], attn.q_proj)
    residual_NH = residual_TH[query_N]
    states: list[torch.Tensor] = []
    for k in range(len(row.losses)):
        rope_N2d = rope_table(positions_N + k, d, s.rope_theta)
        if k > 0:
            before_NH = draft.norm(states[-1]) if s.norm_output else states[-1]
            x_N2H, residual_NH = inputs(row.tokens_KN[k], before_NH)
            q_NQ, k_NK, v_NK = linears.products(x_N2H, attn.q_proj, attn.k_proj, attn.v_proj)
            attention.add_own(*keys_values(k_NK, v_NK, rope_N2d))
        mixed_Nhd = attention(rotate(q_NQ.view(-1, h, d), rope_N2d))
        hidden_NH = residual_NH + linears.product(mixed_Nhd.flatten(1), attn.o_proj)
        normed_NH = layer.post_attention_layernorm(hidden_NH)
        states.append(hidden_NH + layer.mlp(linears, normed_NH))
    return states
