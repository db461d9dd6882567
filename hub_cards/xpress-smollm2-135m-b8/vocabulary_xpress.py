"""The tokens that a drafter can draft: all of the target's, or the D that its texts use most.

A block's base logits are a product with the target's whole head, most of it for tokens that are hardly ever written. With
a draft vocabulary (EAGLE-3, Li et al. 2025) draft logits have D columns; the target verifies over its whole vocabulary, so
a token outside is never lost, it is only never drafted.

Shapes: D draft tokens, V vocabulary, H hidden.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel


class DraftVocabulary:
    """
    What the columns of draft logits stand for.

    Args:
        size (`int`): V, of the target.
        ids_D (`torch.LongTensor`, *optional*): The target's ids of the columns, ascending; all V where omitted.
    """

    def __init__(self, size: int, ids_D: torch.LongTensor | None = None):
        self.size, self.ids_D = size, ids_D

    @classmethod
    def from_offsets(cls, size: int, d2t_D: torch.LongTensor) -> "DraftVocabulary":
        """Of ids less their columns, as EAGLE-3 and speculators keep them."""
        return cls(size, d2t_D + torch.arange(len(d2t_D), device=d2t_D.device))

    def __len__(self) -> int:
        return self.size if self.ids_D is None else len(self.ids_D)

    def to(self, device: torch.device) -> "DraftVocabulary":
        return self if self.ids_D is None else DraftVocabulary(self.size, self.ids_D.to(device))

    def tokens(self, columns: torch.LongTensor) -> torch.LongTensor:
        """The target's ids of columns."""
        return columns if self.ids_D is None else self.ids_D[columns]

    def columns(self, tokens: torch.LongTensor) -> tuple[torch.LongTensor, torch.BoolTensor]:
        """The columns of the target's ids, and which of them there are; where there is none, some column."""
        if self.ids_D is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        columns = torch.searchsorted(self.ids_D, tokens.contiguous()).clamp_max(len(self.ids_D) - 1)
        return columns, self.ids_D[columns] == tokens

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., D]` over the target's vocabulary `[..., V]`, `-inf` where there is no column."""
        if self.ids_D is None:
            return logits
        return logits.new_full((*logits.shape[:-1], self.size), -torch.inf).index_copy_(-1, self.ids_D, logits)

    def head(self, target: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
        """The target's output head on these tokens: its module, or a copy of their rows where it is a plain matrix."""
        module = target.get_output_embeddings()
        if self.ids_D is None:
            return module
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        if type(module) is not nn.Linear or type(module.weight.data) is not torch.Tensor or hooked:
            # Quantised, adapted, offloaded, sharded: only the module knows how.
            return lambda h: (logits := module(h)).index_select(-1, self.ids_D.to(logits.device))
        ids_D, bias = self.ids_D.to(module.weight.device), module.bias
        rows_DH, bias_D = module.weight.detach()[ids_D], None if bias is None else bias.detach()[ids_D]
        return lambda h: F.linear(h, rows_DH, bias_D)
