"""The causal refiner (xPress, arXiv 2608.02438) and the Markov head (DSpark): logit biases from the previous tokens.

Both turn the block's independent guesses into dependent ones: `refined = base + w2(latents)`, where the latents of
slot k read only tokens of slots before k. The work is cut in three, so that what does not depend on the tokens is
done once per block: `begin_block`, then `latents` in every pass, then the readout `w2`.

Shapes: N rows, B slots of a block (slot 0 is the anchor), H hidden, R rank, V columns of draft logits (the vocabulary, or
the draft vocabulary), M width of the MLP.
`prev[k]` is the token before slot k: the predecessor for slot 0, the anchor for slot 1, then the draft tokens.
"""

import torch
import torch.nn.functional as F
from torch import nn


class CausalMixer(nn.Module):
    """Mixes the slots of a block per channel by a lower triangle, its diagonal included (as the released weights)."""

    def __init__(self, rank: int, block_size: int):
        super().__init__()
        self.L = nn.Parameter(torch.zeros(rank, block_size, block_size))  # channel, slot out, slot in

    def forward(self, x_NBR: torch.Tensor) -> torch.Tensor:
        x_RBN = x_NBR.permute(2, 1, 0)
        return torch.bmm(self.L.tril(), x_RBN).permute(2, 1, 0)


class GatedMLP(nn.Module):
    def __init__(self, rank: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(rank, width, bias=False)
        self.up_proj = nn.Linear(rank, width, bias=False)
        self.down_proj = nn.Linear(width, rank, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class XPressHead(nn.Module):
    """The causal refiner: a small network over the block, strictly causal in its tokens. No biases, no norms."""

    def __init__(self, config):
        super().__init__()
        rank = config.xpress_rank
        self.rank = rank
        self.w1 = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)  # reads hidden, summary, token, in this order
        self.mix = CausalMixer(rank, config.block_size)
        self.mlp = GatedMLP(rank, config.xpress_mlp_hidden)
        self.w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def begin_block(self, h_NBH: torch.Tensor) -> torch.Tensor:
        """The part of the latents that no token changes `[N, B, R]`: each slot's own state and the block's mean."""
        hidden_RR, summary_RR, _ = self.in_proj.weight.split(self.rank, dim=1)
        g_N1H = h_NBH.mean(dim=1, keepdim=True)
        return F.linear(self.down_h(h_NBH), hidden_RR) + F.linear(self.down_g(g_N1H), summary_RR)

    def latents(self, block_NBR: torch.Tensor, prev_NB: torch.LongTensor) -> torch.Tensor:
        """The latents `[N, B, R]` of all slots, given the token before each slot."""
        return self.mix_tokens(block_NBR, self.w1(prev_NB))

    def mix_tokens(self, block_NBR: torch.Tensor, embedded_NBR: torch.Tensor) -> torch.Tensor:
        """`latents`, given the rows of `w1` of the tokens before the slots."""
        token_RR = self.in_proj.weight[:, 2 * self.rank :]
        x_NBR = block_NBR + F.linear(embedded_NBR, token_RR)
        x_NBR = x_NBR + self.mix(x_NBR)
        return x_NBR + self.mlp(x_NBR)

    def forward(self, h_NBH: torch.Tensor, prev_NB: torch.LongTensor) -> torch.Tensor:
        """The logit bias `[N, B, V]` of every slot. Slot 0's is discarded by all callers."""
        return self.w2(self.latents(self.begin_block(h_NBH), prev_NB))


class MarkovHead(nn.Module):
    """The baseline: a bias from the one token before the slot, `w2(w1[prev])`; it does not read the hidden states."""

    def __init__(self, config):
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    @property
    def w1(self) -> nn.Embedding:
        return self.markov_w1

    @property
    def w2(self) -> nn.Linear:
        return self.markov_w2

    def begin_block(self, h_NBH: torch.Tensor) -> torch.Tensor:
        return h_NBH.new_zeros(())

    def latents(self, block: torch.Tensor, prev_NB: torch.LongTensor) -> torch.Tensor:
        return self.mix_tokens(block, self.w1(prev_NB))

    def mix_tokens(self, block: torch.Tensor, embedded_NBR: torch.Tensor) -> torch.Tensor:
        return embedded_NBR

    def forward(self, h_NBH: torch.Tensor, prev_NB: torch.LongTensor) -> torch.Tensor:
        return self.w2(self.latents(self.begin_block(h_NBH), prev_NB))


def previous_tokens(predecessor_N: torch.Tensor, anchor_N: torch.Tensor, tokens_NS: torch.Tensor) -> torch.Tensor:
    """`prev` `[N, B]` for all slots, from the draft tokens of slots 1..B-1 (the last one is nobody's predecessor)."""
    return torch.cat([predecessor_N[:, None], anchor_N[:, None], tokens_NS[:, :-1]], dim=1)
