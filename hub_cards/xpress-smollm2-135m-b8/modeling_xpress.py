"""The drafter's weights: the DFlash backbone and, where the config names one, a refiner.

The backbone denoises a block in one pass: queries come from the block's slots, keys and values from the target's
context features and from the block, which sees itself in both directions. Token embedding and output head are the
target's, borrowed at every call and never stored. Knows nothing of decoding or training.

Shapes: N rows, S new context positions, B slots of a block, T visible positions (cached, new, block), H hidden.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import output_capturing

from .configuration_xpress import XPressDrafterConfig, default_target_layer_ids
from .refiner_xpress import CausalMixer, MarkovHead, XPressHead
from .vocabulary_xpress import DraftVocabulary


class XPressAttention(Qwen3Attention):
    # As Qwen3, except that keys and values also come from the context, and a block sees itself in both directions.
    def __init__(self, config: XPressDrafterConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        N, B, _ = hidden_states.shape
        kv_states = torch.cat([context_hidden_states, hidden_states], dim=1)
        query = self.q_norm(self.q_proj(hidden_states).view(N, B, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(kv_states).view(N, kv_states.shape[1], -1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(kv_states).view(N, kv_states.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        query = query * cos[..., -B:, :] + rotate_half(query) * sin[..., -B:, :]
        key = key * cos + rotate_half(key) * sin
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, is_causal=False, **kwargs
        )
        return self.o_proj(output.reshape(N, B, -1).contiguous()), weights


class XPressDecoderLayer(Qwen3DecoderLayer):
    # As Qwen3, except that the attention reads the context, which skips this layer's input norm.
    def __init__(self, config: XPressDrafterConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = XPressAttention(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, context_hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), context_hidden_states, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class XPressPreTrainedModel(PreTrainedModel):
    config_class = XPressDrafterConfig
    config: XPressDrafterConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["XPressDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = False  # blocks need a mask in training

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, CausalMixer):
            init.zeros_(module.L)


class XPressModel(XPressPreTrainedModel):
    """
    A DFlash backbone with an optional refiner (`xpress_head` or `markov_head`), built from an `XPressDrafterConfig`.

    `XPressDrafterModel` of the generation room is this model with decoding; load that one.
    """

    def __init__(self, config: XPressDrafterConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([XPressDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.refiner_type == "xpress":
            self.xpress_head = XPressHead(config)
        elif config.refiner_type == "markov":
            self.markov_head = MarkovHead(config)
        if config.draft_vocab_size is not None:  # ids less their columns, as EAGLE-3 keeps them
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def refiner(self) -> XPressHead | MarkovHead | None:
        if self.config.refiner_type is None:
            return None
        return self.xpress_head if self.config.refiner_type == "xpress" else self.markov_head

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that can be drafted, on the drafter's device."""
        if self.config.draft_vocab_size is None:
            return DraftVocabulary(self.config.vocab_size)
        return DraftVocabulary.from_offsets(self.config.vocab_size, self.d2t)

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        *,
        mask_token_id: int,
        num_hidden_layers: int = 5,
        target_layer_ids: Sequence[int] | None = None,
        draft_token_ids: Sequence[int] | None = None,
        **config_kwargs,
    ) -> "XPressModel":
        """
        A fresh drafter whose shapes, rotary positions and vocabulary are those of `target`.

        Args:
            target (`PreTrainedModel`): The model to draft for; nothing of it is stored.
            mask_token_id (`int`): A token that text never holds, inside the target's embedding.
            num_hidden_layers (`int`): Drafter layers.
            target_layer_ids (`Sequence[int]`, *optional*): Layers to read; the DFlash spread where omitted.
            draft_token_ids (`Sequence[int]`, *optional*): The tokens that can be drafted; all where omitted.
            config_kwargs: Further fields of `XPressDrafterConfig`: `block_size`, `xpress_rank`, ...
        """
        text = target.config.get_text_config(decoder=True)
        layer_ids = target_layer_ids or default_target_layer_ids(num_hidden_layers, text.num_hidden_layers)
        shapes = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": text.num_key_value_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            "rms_norm_eps": text.rms_norm_eps,
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": config_kwargs.pop("rope_parameters", None) or _whole_head_rope(text.rope_parameters),
        }
        ids_D = None if draft_token_ids is None else torch.tensor(sorted(draft_token_ids))
        if ids_D is not None:
            config_kwargs["draft_vocab_size"] = len(ids_D)
        config = XPressDrafterConfig(
            **{**shapes, "trained_length": 0, **config_kwargs},
            mask_token_id=mask_token_id,
            num_hidden_layers=num_hidden_layers,
            target_layer_ids=list(layer_ids),
            num_target_layers=text.num_hidden_layers,
            target_fingerprint=embedding_fingerprint(target),
        )
        drafter = cls(config)
        if ids_D is not None:
            drafter.d2t.copy_(ids_D - torch.arange(len(ids_D)))
            drafter.check_vocabulary()
        elif config.draft_vocab_size is not None and drafter.device.type != "meta":
            raise ValueError(
                f"`draft_vocab_size` is {config.draft_vocab_size} without `draft_token_ids`, expected those ids: nobody else knows "
                "which tokens the target uses most."
            )
        return drafter

    def check_vocabulary(self) -> None:
        """Raises unless the draft vocabulary is one of the target's."""
        ids_D = self.vocabulary.ids_D
        if ids_D is None or ids_D.device.type == "meta":
            return
        if (ids_D.diff() < 1).any() or ids_D[0] < 0 or ids_D[-1] >= self.config.vocab_size:
            raise ValueError(
                f"the draft vocabulary `d2t` is {ids_D[:4].tolist()} to {ids_D[-4:].tolist()}, expected ascending token ids from 0 "
                f"to `vocab_size` - 1 = {self.config.vocab_size - 1}."
            )

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        r"""
        Denoises blocks; returns the normed states of all slots `[N, B, H]` as `last_hidden_state`, ready for the
        target's head. The contract of Transformers' own DFlash assistants, so that their generator runs this model.

        Args:
            noise_embeds (`[N, B, H]`): Target embeddings of the anchor, then of B - 1 mask tokens. In training
                several blocks lie end to end.
            context_hidden_states (`[N, S, H * taps]`): `context_features` of the positions not in `cache` yet.
            position_ids (`[N, S + B]`, *optional*): Absolute positions of context and block; counted on from the
                cache where omitted.
            attention_mask (*optional*): `[N, T]` with 0 at padding, or `[N, 1, B, T]` (True or 0.0: visible), or a
                flex `BlockMask`. Without one every slot sees everything.
            cache (`Cache`, *optional*): Takes keys and values of context and block; the caller crops the block.
        """
        cache = kwargs.pop("past_key_values", cache)  # its name in Transformers' own generator before 5.24
        context = self.hidden_norm(self.fc(context_hidden_states))
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            length = context.shape[1] + noise_embeds.shape[1]
            position_ids = torch.arange(start, start + length, device=noise_embeds.device)[None]
        attention_mask = self._expand_mask(attention_mask, noise_embeds)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                context,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                cache=cache,
                **kwargs,
            )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def _expand_mask(self, mask, noise_embeds: torch.Tensor):
        """
        A padding mask `[N, T]` as one that attention takes, which is added: True becomes 0.0, here once for all layers.
        Its rows lie a multiple of 16 numbers apart, else CUDA's memory-efficient SDPA copies it, in every layer.
        """
        if not isinstance(mask, torch.Tensor):
            return mask
        if mask.dim() == 2:
            mask = mask.bool()[:, None, None, :].expand(-1, 1, noise_embeds.shape[1], -1)
        if mask.dtype == torch.bool:
            kind = noise_embeds.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else noise_embeds.dtype
            T = mask.shape[-1]
            shape = (*mask.shape[:-1], T + -T % 16)
            numbers = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=mask.device)[..., :T]
            mask = numbers.masked_fill_(mask, 0.0)
        return mask


def _whole_head_rope(rope: dict) -> dict:
    """A target's rotary parameters for a drafter, which turns whole heads."""
    if "rope_theta" not in rope:  # one entry per kind of layer
        rope = rope["full_attention"]
    if "long_factor" in rope and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"the target turns {rope['partial_rotary_factor']} of each head, by {len(rope['long_factor'])} factors, but a "
            "drafter turns whole heads, for which those are too few: expected `rope_parameters` of its own, such as "
            f"{{'rope_type': 'default', 'rope_theta': {rope['rope_theta']}}}."
        )
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}


# Before 5.23, Transformers counted selected states from the first layer; there, all of them are asked for.
_SELECTS_STATES = hasattr(output_capturing, "selected_hidden_states")


def states_to_keep(target_layer_ids: Sequence[int]) -> list[int] | bool:
    """The `output_hidden_states` of a target's forward for `context_features`: only the tapped layers' where possible."""
    return [i + 1 for i in target_layer_ids] if _SELECTS_STATES else True


@torch.no_grad()
def embedding_fingerprint(target: PreTrainedModel, samples: int = 8) -> list[float] | None:
    """Norms of some rows of the target's embedding, evenly spread: alike after fine-tuning, not for another model."""
    if target.device.type == "meta":
        return None
    ids = torch.linspace(0, target.config.get_text_config(decoder=True).vocab_size - 1, samples, device=target.device)
    norms = target.get_input_embeddings()(ids.long()).float().norm(dim=-1)
    return [float(f"{norm:.4g}") for norm in norms.tolist()]


def context_features(hidden_states: Sequence[torch.Tensor], target_layer_ids: Sequence[int]) -> torch.Tensor:
    """The target states that the drafter reads `[N, S, H * taps]`: `hidden_states[i + 1]` is layer i's output."""
    taps = [hidden_states[i + 1] for i in target_layer_ids]
    return torch.cat([tap.to(taps[0].device) for tap in taps], dim=-1)


def base_logits(target: PreTrainedModel, h: torch.Tensor, head: Callable | None = None) -> torch.Tensor:
    """The target's head on drafter states `[..., H]`, with the target's own scale and soft-cap: `[..., V]`, or as many
    columns as `head` has, which `DraftVocabulary.head` made of it.

    Flattened first: a vocabulary product on a non-contiguous slice makes PyTorch copy the weight for every row.
    """
    config = target.config.get_text_config(decoder=True)
    head = target.get_output_embeddings() if head is None else head
    logits = head(h.reshape(-1, h.shape[-1]).contiguous())
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits.view(*h.shape[:-1], logits.shape[-1])


__all__ = ["XPressModel", "XPressPreTrainedModel"]
