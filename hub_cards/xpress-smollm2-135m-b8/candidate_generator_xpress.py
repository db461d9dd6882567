"""Proposing: block diffusion and refinement, or prompt lookup, behind Transformers' `CandidateGenerator` contract.

Runs unchanged inside Transformers' assisted loop and inside ours (`decoding_xpress`). It holds what drafting needs
for one sequence: the drafter's context (projected target features of all verified positions).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation import CandidateGenerator, LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.utils import ModelOutput

from .modeling_xpress import XPressModel, base_logits, context_features, states_to_keep
from .jacobi_xpress import Draft, resolve_block, resolve_left_to_right, shorten
from .lookup_xpress import look_up


# Processors that treat every row of scores alone, whatever the tokens before it: they may shape drafts, and may be
# called on all rows of a block at once. Exact types: a subclass may look at the tokens.
ROW_WISE = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.LogitNormalization,
    processors.InfNanRemoveLogitsProcessor,
)


def row_wise(logits_processor: LogitsProcessorList) -> LogitsProcessorList:
    """Those of the processors that judge every row of scores alone."""
    return LogitsProcessorList([p for p in logits_processor if type(p) in ROW_WISE])


@dataclass
class DraftContext:
    """What the drafter knows of a sequence: `ids` `[1, n]`, of which `cache` holds the first, `pending` the rest."""

    ids: torch.LongTensor
    cache: DynamicCache = field(default_factory=DynamicCache)
    pending: list[torch.Tensor] = field(default_factory=list)  # features [1, m, H * taps] not yet projected, by round

    def append(self, features: torch.Tensor, ids: torch.LongTensor):
        self.pending.append(features)
        self.ids = torch.cat([self.ids, ids], dim=1)

    def crop(self, length: int):
        """Forgets all but the first `length` positions."""
        surplus = self.ids.shape[1] - length
        if surplus <= 0:
            return
        pending = sum(features.shape[1] for features in self.pending)
        if pending:
            self.pending = [torch.cat(self.pending, dim=1)[:, : max(pending - surplus, 0)]]
        if surplus > pending:
            self.cache.crop(pending - surplus)
        self.ids = self.ids[:, :length]


# The context drafted with, by the target cache it belongs to: a second turn on that cache drafts as well as a cold run.
_CONTEXTS: "weakref.WeakKeyDictionary[Any, tuple[weakref.ref, DraftContext]]" = weakref.WeakKeyDictionary()


class XPressCandidateGenerator(CandidateGenerator):
    """
    Drafts a block per round from the target's own hidden states.

    Args:
        drafter (`XPressModel`): The drafter.
        target (`PreTrainedModel`): The model drafted for; its embedding and head are called as modules.
        generation_config (`GenerationConfig`): `do_sample` and `max_length` are read; and with `prompt_lookup_num_tokens`, a
            round copies up to that many tokens in the place of drafting where the last `max_matching_ngram_size` (2 where
            omitted) or more came before. Unlike upstream, which goes down to one token.
        logits_processor (`LogitsProcessorList`, *optional*): The target's. The row-wise ones shape drafts too.
        num_passes (`int`, *optional*): Jacobi passes K; the drafter's own where omitted.
        shortlist_size (`int`, *optional*): Base tokens refined per slot, 0 for all; the drafter's own where omitted.
        confidence_threshold (`float`, *optional*): A draft ends behind the slot up to which all is kept with less than this
            probability, by the drafter's estimate (`shorten`); 0 for whole blocks; the drafter's own where omitted.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: XPressModel,
        target,
        generation_config,
        logits_processor: LogitsProcessorList | None = None,
        num_passes: int | None = None,
        shortlist_size: int | None = None,
        confidence_threshold: float | None = None,
    ):
        config = drafter.config
        self.drafter, self.target = drafter, target
        self.block_size, self.layer_ids = config.block_size, config.target_layer_ids
        self.vocabulary = drafter.vocabulary
        self.head = self.vocabulary.head(target)
        self.num_passes = config.xpress_num_passes if num_passes is None else num_passes
        self.shortlist_size = config.xpress_topc if shortlist_size is None else shortlist_size
        self.threshold = config.confidence_threshold if confidence_threshold is None else confidence_threshold
        self.max_length = generation_config.max_length
        self.sample = bool(generation_config.do_sample)
        self.lookup_length = generation_config.prompt_lookup_num_tokens or 0
        self.ngram_size = generation_config.max_matching_ngram_size or 2
        self.warp = self._warp(logits_processor or LogitsProcessorList())
        self.model_kwargs_overrides = {"output_hidden_states": states_to_keep(self.layer_ids)}
        self.context: DraftContext | None = None
        self.prompt_seen = False
        self.last_draft: Draft | None = None

    def _warp(self, logits_processor: LogitsProcessorList) -> Callable[[torch.Tensor], torch.Tensor] | None:
        warpers = row_wise(logits_processor)
        if not warpers:
            return None
        no_ids = torch.empty((1, 0), dtype=torch.long)
        return lambda scores: warpers(no_ids, scores)

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        The sequence with the block's draft tokens behind it, and the scores they were drawn from.

        Args:
            input_ids (`[1, n]`): All tokens so far; the last one is the anchor.
            model_kwargs (`dict`): Of the target's next forward; `attention_mask` and `position_ids` are read.
            model_outputs (`ModelOutput`): The target's last forward, with `hidden_states`.
            is_first_iteration (`bool`): Nothing has run yet: no candidates.
            n_last_matches (`int`): Draft tokens of the last round that were kept.

        Returns:
            `[1, n + P]` and `[1, P, V]`; fewer draft tokens where `max_length` is near or confidence ends. No scores when
            greedy, nor of copied tokens.
        """
        if is_first_iteration:
            return input_ids, None
        self.observe(input_ids, model_outputs, n_last_matches, model_kwargs.get("attention_mask"))
        room = self.max_length - input_ids.shape[1] - 1
        if room <= 0:
            return input_ids, None
        self.last_draft = self.copy(input_ids, model_kwargs.get("attention_mask")) if self.lookup_length else None
        if self.last_draft is None:
            h = self.draft(input_ids, self._anchor_position(input_ids, model_kwargs))
            self.last_draft = self.refine(h, self.guess(h), input_ids)
        tokens = self.last_draft.tokens[:, :room].to(input_ids.device)
        scores = None if self.last_draft.scores is None else self.last_draft.scores[:, :room]
        return torch.cat([input_ids, tokens], dim=1), scores

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing adapts: a block's length is the drafter's."""

    def observe(self, input_ids, model_outputs, n_last_matches: int, attention_mask=None):
        """Takes in the features of the positions verified last. Padding is left out, as if it had never been."""
        features = context_features(model_outputs.hidden_states, self.layer_ids)
        # The prompt's forward holds verified positions only; a later one the anchor, the kept and the rejected drafts.
        count = n_last_matches + 1 if self.prompt_seen else features.shape[1]
        self.prompt_seen = True
        features, ids = features[:, :count], input_ids[:, -1 - count : -1]
        if attention_mask is not None:
            real = attention_mask[0, -1 - count : -1].bool()
            features, ids = features[:, real.to(features.device)], ids[:, real.to(ids.device)]
        self.head_dtype = features.dtype
        if self.context is None:
            self.context = DraftContext(ids[:, :0])
        self.context.append(features.to(device=self.drafter.device, dtype=self.drafter.dtype), ids)

    def copy(self, input_ids: torch.LongTensor, attention_mask=None) -> Draft | None:
        """What the text, padding left out, has behind its last tokens, if they came before."""
        ids_n = input_ids[0]
        if attention_mask is not None:
            ids_n = ids_n[attention_mask[0, -len(ids_n) :].bool().to(ids_n.device)]
        tokens = look_up(ids_n, self.ngram_size, self.lookup_length)
        return None if tokens is None else Draft(tokens[None], None, 0, copied=True)

    def draft(self, input_ids: torch.LongTensor, anchor_position: torch.Tensor) -> torch.Tensor:
        """One denoising pass of the block behind `input_ids`: its normed states `[1, B, H]`."""
        device, context = self.drafter.device, self.context
        # Nothing may have been verified since the last draft.
        nothing = torch.empty((1, 0, self.drafter.fc.in_features), device=device, dtype=self.drafter.dtype)
        features = torch.cat([nothing, *context.pending], dim=1)
        positions = torch.arange(-features.shape[1], self.block_size, device=device) + anchor_position.to(device)
        h = self.drafter(
            noise_embeds=self._noise_embeds(input_ids[:, -1:]).to(device=device, dtype=self.drafter.dtype),
            context_hidden_states=features,
            position_ids=positions[None],
            cache=context.cache,
        ).last_hidden_state
        context.cache.crop(-self.block_size)
        context.pending = []
        return h

    def guess(self, h: torch.Tensor) -> torch.Tensor:
        """The base logits of the draft slots `[1, P, D]`, by the target's own head: still the backbone's drafting."""
        return base_logits(self.target, h[:, 1:].to(self.head_dtype), self.head).to(h.device)

    def refine(self, h: torch.Tensor, base: torch.Tensor, input_ids: torch.LongTensor) -> Draft:
        """The block's draft tokens from its states and base logits, by the refiner's own way, as far as they are likely."""
        anchor, predecessor = input_ids[:, -1].to(h.device), input_ids[:, -2:][:, 0].to(h.device)
        how = {"sample": self.sample, "warp": self.warp, "vocabulary": self.vocabulary, "threshold": self.threshold}
        if self.drafter.config.refiner_type == "markov":
            draft = resolve_left_to_right(self.drafter.refiner, base, anchor, **how)
        else:
            how["shortlist_size"] = self.shortlist_size
            draft = resolve_block(self.drafter.refiner, h, base, predecessor, anchor, self.num_passes, **how)
        return shorten(draft, self.threshold) if self.threshold > 0 else draft

    def _noise_embeds(self, anchor: torch.LongTensor) -> torch.Tensor:
        """Target embeddings of the anchor and of B - 1 mask tokens `[1, B, H]`."""
        mask = anchor.new_full((1, self.block_size - 1), self.drafter.config.mask_token_id)
        noise_ids = torch.cat([anchor, mask], dim=1)
        if self.target.device.type != "meta":  # offloaded: its hooks move the ids
            noise_ids = noise_ids.to(self.target.device)
        return self.target.get_input_embeddings()(noise_ids)

    def _anchor_position(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        """The anchor's position, padding not counted."""
        positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
        if positions is not None and positions.dim() == 2:
            return positions[0, -1]
        return mask[0].sum() - 1 if mask is not None else torch.tensor(input_ids.shape[1] - 1)

    def recall(self, target_cache, prefix_ids: torch.LongTensor) -> bool:
        """Takes up the context of an earlier call on this target cache; whether it fits `prefix_ids` `[1, n]`."""
        drafter, context = _CONTEXTS.pop(target_cache, (None, None))
        length = prefix_ids.shape[1]
        if drafter is None or drafter() is not self.drafter or not torch.equal(context.ids[:, :length], prefix_ids):
            return False
        context.crop(length)
        self.context = context
        return True

    def remember(self, target_cache, input_ids, model_outputs, n_last_matches: int, attention_mask=None):
        """Keeps the context for a later call on this target cache, for as long as the cache lives."""
        self.observe(input_ids, model_outputs, n_last_matches, attention_mask)
        _CONTEXTS[target_cache] = (weakref.ref(self.drafter), self.context)
