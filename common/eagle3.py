"""The EAGLE-3 draft: one decoder layer over the verifier's states, and its TTT step.

Architecture of speculators 0.9 (models/eagle3) and vLLM's llama_eagle3, with the same
parameter names; training-time test after EAGLE-3 (arXiv 2503.01840, section 3.2).

Shape suffixes: T tokens of a packed row, N columns computed at a depth, H hidden size,
A aux layers, h heads, g key/value heads, d head_dim, D draft vocabulary, V verifier's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common.draft_shape import DraftShape


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed and returned in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)


class RMSNorm(nn.Module):
    """RMSNorm computed in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections of the first layer; its input is [embedding, hidden] of 2H."""

    def __init__(self, s: DraftShape):
        super().__init__()
        q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.q_proj = nn.Linear(2 * s.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(2 * s.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * s.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, s.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, s: DraftShape):
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
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

    def fuse(self, aux_TAH: torch.Tensor) -> torch.Tensor:
        """Aux hidden states [T, A*H] → [T, H]."""
        if self.shape.norm_before_fc:
            aux_TAH = self.input_norm(aux_TAH)
        return self.fc(aux_TAH)


@torch.no_grad()
def initialize(draft: Eagle3Draft, head_DH: torch.Tensor) -> None:
    """Random weights from torch's generator; the head starts as the verifier's rows [D, H]."""
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02)
    draft.lm_head.weight.copy_(head_DH)


# ---------------------------------------------------------------- attention


def rotate(x_Nhd: torch.Tensor, positions_N: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding, halves convention (Llama), computed in float32."""
    half = x_Nhd.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float32, device=x_Nhd.device) / half
    angle_N1d = positions_N.float()[:, None, None] * theta**-exponent
    cos, sin = angle_N1d.cos(), angle_N1d.sin()
    a, b = x_Nhd[..., :half].float(), x_Nhd[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_Nhd.dtype)


def ttt_attention(
    q_Nhd: torch.Tensor,
    k_Thd: torch.Tensor,
    v_Thd: torch.Tensor,
    own_k: list[torch.Tensor],
    own_v: list[torch.Tensor],
    places_N: torch.Tensor,
    lengths: list[int],
    counts: list[int],
) -> torch.Tensor:
    """Attention of one depth: causal over depth-0 keys of the sample, plus the column's own.

    Column t at depth j sees the depth-0 keys s <= t of its sample and its own keys of
    depths 1..j; no other column's deeper keys (the mask's base block and diagonals):

        depth-0 keys   depth-1   depth-2
        1 0 0          1 0 0     1 0 0
        1 1 0          0 1 0     0 1 0
        1 1 1          0 0 1     0 0 1

    Args:
        q_Nhd: queries of the columns, rotated.
        k_Thd, v_Thd: depth-0 keys and values of all tokens, key heads repeated to h.
        own_k, own_v: keys and values [N, h, d] of these columns at depths 1..j.
        places_N: each column's token, counted from the start of its sample.
        lengths: tokens of each sample (they sum to T).
        counts: columns of each sample (they sum to N).

    Returns:
        [N, h, d].
    """
    scale, out_dtype = q_Nhd.shape[-1] ** -0.5, q_Nhd.dtype
    if q_Nhd.device.type == "cpu":
        # oneDNN compiles a kernel for every new shape of a bfloat16 product, which costs more
        # than these small products; float32 ones need none.
        q_Nhd, k_Thd, v_Thd = q_Nhd.float(), k_Thd.float(), v_Thd.float()
        own_k, own_v = [k.float() for k in own_k], [v.float() for v in own_v]
    # split, not slices: its gradient is one concatenation
    k_samples, v_samples = k_Thd.split(lengths), v_Thd.split(lengths)
    own = [(k.split(counts), v.split(counts)) for k, v in zip(own_k, own_v, strict=True)]
    parts = []
    for n, (q_nhd, place_n) in enumerate(
        zip(q_Nhd.split(counts), places_N.split(counts), strict=True)
    ):
        if len(q_nhd) == 0:
            continue
        k_hsd, v_hsd = k_samples[n].transpose(0, 1), v_samples[n].transpose(0, 1)
        score_hns = (q_nhd.transpose(0, 1) @ k_hsd.transpose(1, 2)).float()
        later_ns = torch.arange(lengths[n], device=q_Nhd.device) > place_n[:, None]
        score_hns = score_hns.masked_fill(later_ns, float("-inf"))
        diagonals = [(q_nhd.float() * k[n].float()).sum(-1).T[..., None] for k, _ in own]
        p_hns = torch.softmax(torch.cat([score_hns, *diagonals], -1) * scale, -1)
        p_hns = p_hns.to(v_hsd.dtype)
        out_hnd = p_hns[..., : lengths[n]] @ v_hsd
        for j, (_, v) in enumerate(own):
            out_hnd = out_hnd + p_hns[..., lengths[n] + j, None] * v[n].transpose(0, 1)
        parts.append(out_hnd.transpose(0, 1))
    return torch.cat(parts).to(out_dtype)


# ---------------------------------------------------------------- the step


@dataclass
class PackedRow:
    """Samples packed end to end; nothing is shifted across their borders.

    aux_TAH [T, A*H], last_TH [T, H] (final layer before the final norm), ids_T int64 [T],
    positions_T int64 [T] (from 0 in each sample), starts: first token of each sample,
    table: bool [depths, T] of common.loss_table; columns: per depth, ascending, the columns
    to compute (at least loss_table.needed_columns; each depth's contain the next's).
    """

    aux_TAH: torch.Tensor
    last_TH: torch.Tensor
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    starts: list[int]
    table: torch.Tensor
    columns: list[torch.Tensor]


def ttt_states(
    draft: Eagle3Draft, embed_VH: torch.Tensor, row: PackedRow, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run the draft at all depths; return per depth (columns N_k, states [N_k, H]).

    `dtype` is that of the activations (the caller's autocast dtype, or the parameters').
    The states are those before the output norm. Depth 0 makes keys and values for every
    token; everything else runs for the row's columns alone.
    """
    s, layer = draft.shape, draft.layer
    attn = layer.self_attn
    repeat = s.num_attention_heads // s.num_key_value_heads
    T = len(row.ids_T)
    device = row.ids_T.device
    borders = torch.tensor([*row.starts, T])
    lengths = borders.diff().tolist()

    def heads(x: torch.Tensor, count: int, times: int) -> torch.Tensor:
        """[N, count*d] → [N, count*times, d]"""
        x = x.view(len(x), count, s.head_dim)
        return x.repeat_interleave(times, dim=1) if times > 1 else x

    def keys_values(x_N2H: torch.Tensor, positions_N: torch.Tensor):
        g = s.num_key_value_heads
        k_Ngd = rotate(heads(attn.k_proj(x_N2H), g, 1), positions_N, s.rope_theta)
        k_Nhd = k_Ngd.repeat_interleave(repeat, dim=1) if repeat > 1 else k_Ngd
        return k_Nhd, heads(attn.v_proj(x_N2H), g, repeat)

    def layer_input(ids_N: torch.Tensor, hidden_NH: torch.Tensor):
        """Return (input of the projections [N, 2H], residual [N, H])."""
        normed_NH = layer.hidden_norm(hidden_NH)
        embedded_NH = layer.input_layernorm(F.embedding(ids_N, embed_VH).to(normed_NH.dtype))
        x_N2H = torch.cat([embedded_NH, normed_NH], -1)
        return x_N2H, normed_NH if s.norm_before_residual else hidden_NH

    hidden_TH = draft.fuse(row.aux_TAH.to(dtype))
    # Column t takes token t+1; a row's or sample's last column has none and is never needed.
    following_T = row.ids_T[torch.arange(1, T + 1, device=device).clamp(max=T - 1)]
    x_T2H, residual_TH = layer_input(following_T, hidden_TH)
    k_Thd, v_Thd = keys_values(x_T2H, row.positions_T)

    own_k: list[torch.Tensor] = []
    own_v: list[torch.Tensor] = []
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    for k, columns_N in enumerate(c.to(device) for c in row.columns):
        if len(columns_N) == 0:
            break
        if k == 0:
            x_N2H, residual_NH = x_T2H[columns_N], residual_TH[columns_N]
        else:
            before_N, out_NH = states[-1]
            kept = torch.searchsorted(before_N, columns_N)  # depth k's are part of k-1's
            tokens_N = (columns_N + 1 + k).clamp(max=T - 1)
            hidden_NH = draft.norm(out_NH) if s.norm_output else out_NH
            own_k = [x[kept] for x in own_k]
            own_v = [x[kept] for x in own_v]
            x_N2H, residual_NH = layer_input(row.ids_T[tokens_N], hidden_NH[kept])
            k_Nhd, v_Nhd = keys_values(x_N2H, row.positions_T[columns_N] + k)
            own_k.append(k_Nhd)
            own_v.append(v_Nhd)
        q_Nhd = heads(attn.q_proj(x_N2H), s.num_attention_heads, 1)
        q_Nhd = rotate(q_Nhd, row.positions_T[columns_N] + k, s.rope_theta)
        counts = torch.searchsorted(row.columns[k], borders).diff().tolist()
        places_N = row.positions_T[columns_N]
        with torch.autocast(device.type, enabled=False):
            mixed_Nhd = ttt_attention(q_Nhd, k_Thd, v_Thd, own_k, own_v, places_N, lengths, counts)
        hidden_NH = residual_NH + attn.o_proj(mixed_Nhd.flatten(1))
        hidden_NH = hidden_NH + layer.mlp(layer.post_attention_layernorm(hidden_NH))
        states.append((columns_N, hidden_NH))
    return states
