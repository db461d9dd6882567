"""The decoding loop: draft a block, verify it in one target forward, commit its tokens one by one, repeat.

What a caller can see (sequences, scores, streamed tokens, calls of processors and stopping criteria, the returned
cache) is as if tokens had come one at a time, also where the end falls inside a block. Transformers' own assisted loop
looks at the ends of blocks only, and is wrong on a supplied cache; hence this one.

Shapes: P draft tokens of a round, T = P + 1 verified positions, V vocabulary.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from .modeling_xpress import XPressModel
from .acceptance_xpress import verify
from .candidate_generator_xpress import XPressCandidateGenerator, row_wise
from .pairing_xpress import (
    check_call,
    check_options,
    check_pair,
    check_prefix,
    real_tokens,
    warn_of_another_target,
    warn_of_length,
)
from .statistics_xpress import DraftingStatistics, Round, timed, tracked


logger = logging.get_logger(__name__)

# Transformers 5.24 renamed the cache's argument and output field.
_PREPARE = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _PREPARE else "past_key_values"

USELESS_TAU, USELESS_ROUNDS = 1.05, 32


@dataclass
class XPressGenerateOutput(GenerateDecoderOnlyOutput):
    """As `GenerateDecoderOnlyOutput`, with `drafting`: the call's `DraftingStatistics`."""

    drafting: DraftingStatistics | None = None


@torch.no_grad()
def assisted_decoding(
    target,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config,
    drafter: XPressModel,
    synced_gpus: bool = False,
    streamer=None,
    num_passes: int | None = None,
    shortlist_size: int | None = None,
    confidence_threshold: float | None = None,
    **model_kwargs,
) -> XPressGenerateOutput | torch.LongTensor:
    """
    Decodes one sequence with a drafter; the decoding method that `generate` calls. Same text as without it.

    Args:
        target (`PreTrainedModel`): The model whose output is wanted.
        drafter (`XPressModel`): The drafter trained for it.
        num_passes (`int`, *optional*): Jacobi passes K for this call.
        shortlist_size (`int`, *optional*): Base tokens refined per slot for this call; 0 for all.
        confidence_threshold (`float`, *optional*): Where drafts end in this call; 0 for whole blocks.
        input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs:
            As `generate` prepares them.
    """
    cache = model_kwargs.get(CACHE)
    check_pair(drafter, target)
    warn_of_another_target(drafter, target)
    check_options(drafter, num_passes, shortlist_size, confidence_threshold)
    check_call(target, input_ids, generation_config, synced_gpus, cache, model_kwargs)
    generator = XPressCandidateGenerator(
        drafter, target, generation_config, logits_processor, num_passes, shortlist_size, confidence_threshold
    )
    loop = DecodingLoop(
        target, generator, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
    )
    sinks = (loop.statistics, *tracked())
    if generation_config.return_dict_in_generate or len(sinks) > 1:
        generator.copy = timed("draft", generator.copy, sinks, target.device)
        generator.draft = timed("draft", generator.draft, sinks, drafter.device)
        generator.guess = timed("draft", generator.guess, sinks, drafter.device)
        generator.refine = timed("refine", generator.refine, sinks, drafter.device)
        loop.forward = timed("verify", loop.forward, sinks, target.device)
        loop.run = timed("total", loop.run, sinks, target.device)
    with _past_recording(cache):
        loop.run(sinks)
    warn_of_length(drafter, generator.context.ids.shape[1] + 1)  # the last token, which was not fed
    own = DraftingStatistics(loop.statistics.own_rounds)
    if len(own.rounds) >= USELESS_ROUNDS and own.tau < USELESS_TAU:
        logger.warning_once(
            f"The drafter hardly helps: tau is {own.tau:.2f} tokens per round over {len(own.rounds)} rounds (1 is none "
            "accepted). Was it trained for this target?"
        )
    return loop.output() if generation_config.return_dict_in_generate else loop.ids


class DecodingLoop:
    """The state of one sequence while it is decoded."""

    def __init__(
        self,
        target,
        generator: XPressCandidateGenerator,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config,
        streamer,
        model_kwargs: dict,
    ):
        self.target, self.generator, self.streamer = target, generator, streamer
        self.processor, self.criteria, self.config = logits_processor, stopping_criteria, generation_config
        self.all_row_wise = len(row_wise(logits_processor)) == len(logits_processor)
        self.ids, self.model_kwargs, self.cache = input_ids, model_kwargs, model_kwargs[CACHE]
        self.statistics = DraftingStatistics()
        self.recorded = dict.fromkeys(self._wanted(), ())
        self.stopped = False

    def run(self, sinks: tuple[DraftingStatistics, ...]):
        """Decodes to the end. Every round is reported to the sinks."""
        outputs, drafts, scores = self.prefill(), self.ids[:, :0], None
        while True:
            length, past = self.ids.shape[1], self.cache.get_seq_length() - drafts.shape[1] - 1
            try:
                self.commit(outputs, drafts[0], scores, past)
            finally:  # also when a streamer or a criterion raises: the cache holds the text so far, and no draft
                kept = self.ids.shape[1] - length
                self.cache.crop(kept - 1 - drafts.shape[1])
            self.model_kwargs = self.target._update_model_kwargs_for_generation(
                outputs, self.model_kwargs, num_new_tokens=kept
            )
            if length > self.prompt_length:
                last = self.generator.last_draft
                how = (last.passes, last.copied) if drafts.shape[1] else (0, False)
                for sink in sinks:
                    sink.rounds.append(Round(drafts.shape[1], kept - 1, *how))
            if self.stopped:
                break
            candidates, scores = self.generator.get_candidates(self.ids, self.model_kwargs, outputs, False, kept - 1)
            drafts = candidates[:, self.ids.shape[1] :]
            outputs = self.verify_forward(candidates)
        self.generator.remember(self.cache, self.ids, outputs, kept - 1, self.model_kwargs.get("attention_mask"))

    def prefill(self):
        """The prompt's forward: what is not in the cache yet, at least its last token."""
        self.prompt_length = length = self.ids.shape[1]
        cached, mask = int(self.cache.get_seq_length()), self.model_kwargs.get("attention_mask")
        whole = mask.shape[1] if mask is not None else getattr(self.config, "_mask_length", length)
        if whole > length or cached == 0:  # only the new tokens were passed, or all are new
            fed = length
        else:
            if cached >= length:
                check_prefix(self.cache, cached, length)
                self.cache.crop(-1)
                cached = length - 1
            fed = length - cached
        if cached:
            self._recover_context(cached if whole == length else 0, mask)
        inputs = self._inputs(self.ids, self.model_kwargs, fed, is_first_iteration=True)
        return self.forward(inputs, 1)

    def _recover_context(self, cached: int, mask):
        """The drafter's context for positions that the target's cache holds: remembered, or computed anew."""
        prefix = self.ids[:, :cached]
        if cached and self.generator.recall(self.cache, real_tokens(prefix, mask)):
            return
        if not cached:
            logger.warning_once(
                "The cache holds positions whose tokens were not passed, so the drafter cannot see them and drafts "
                "less well. Pass the whole sequence as `input_ids` with the cache."
            )
            return
        logger.info("The drafter has not seen the cache's %d positions: computing their features once more.", cached)
        kwargs = {key: self.model_kwargs.get(key) for key in ("position_ids", "attention_mask")}
        kwargs = {key: value[..., :cached] for key, value in kwargs.items() if value is not None}
        outputs = self.target(
            prefix, use_cache=False, logits_to_keep=1, **self.generator.model_kwargs_overrides, **kwargs
        )
        # As a prompt's forward: everything fed is verified, and the token after it stands where an anchor would.
        prefix_mask = None if mask is None else mask[:, : cached + 1]
        self.generator.observe(self.ids[:, : cached + 1], outputs, 0, prefix_mask)
        self.generator.prompt_seen = False

    def verify_forward(self, candidates: torch.LongTensor):
        """The target on the anchor and the draft tokens."""
        drafted = candidates.shape[1] - self.ids.shape[1]
        kwargs = self.model_kwargs
        if drafted:
            kwargs = self.target._update_model_kwargs_for_generation({}, dict(kwargs), num_new_tokens=drafted)
        return self.forward(self._inputs(candidates, kwargs, drafted + 1, is_first_iteration=False), drafted + 1)

    def forward(self, inputs: dict, num_logits: int):
        """One target forward whose outputs hold the tapped layers, or all of them where the caller wants them."""
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_logits
        if "hidden_states" not in self.recorded:
            inputs |= self.generator.model_kwargs_overrides
        return self.target(**inputs, return_dict=True)

    def _inputs(self, ids: torch.LongTensor, kwargs: dict, length: int, is_first_iteration: bool) -> dict:
        return self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=length, is_first_iteration=is_first_iteration, **kwargs
        )

    def commit(self, outputs, draft_P: torch.LongTensor, draft_scores, past: int):
        """Appends the round's tokens one by one until one is rejected or a criterion stops."""
        T = draft_P.shape[0] + 1
        logits_TV = outputs.logits[0, -T:].to(dtype=torch.float32, device=self.ids.device)
        for i, (token, scores_V) in enumerate(self.verified(logits_TV, draft_P, draft_scores)):
            self._record(outputs, i, T, past, logits_TV[i], scores_V)
            token = torch.tensor([token], device=self.ids.device)
            self.ids = torch.cat([self.ids, token[None]], dim=1)
            self.stopped = bool(self.criteria(self.ids, self.recorded.get("scores")).all())
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            if self.stopped:
                break
        if self.stopped and self.streamer is not None:
            self.streamer.end()

    def verified(self, logits_TV, draft_P, draft_scores) -> Iterator[tuple[int, torch.Tensor]]:
        """
        The round's tokens, each with the processed scores it was chosen from.

        Processors that look at the tokens before (and any that are not Transformers' own) are called once for every
        token, on the committed sequence, as in plain decoding; the others on all rows at once.
        """
        sample = bool(self.config.do_sample)
        draft_scores = None if draft_scores is None else draft_scores[0]
        if self.all_row_wise:
            scores_TV = self.processor(self.ids, logits_TV)
            for i, token in enumerate(verify(draft_P, draft_scores, scores_TV, sample)):
                yield token, scores_TV[i]
            return
        for i in range(logits_TV.shape[0]):
            scores_1V = self.processor(self.ids, logits_TV[i : i + 1])
            draft_scores_i = None if draft_scores is None else draft_scores[i : i + 1]
            token = verify(draft_P[i : i + 1], draft_scores_i, scores_1V, sample)[0]
            yield token, scores_1V[0]
            if i < draft_P.shape[0] and token != draft_P[i]:
                return

    def _wanted(self) -> list[str]:
        """The per-token records that the caller asked for."""
        if not self.config.return_dict_in_generate:
            return []
        flags = {
            "scores": self.config.output_scores,
            "logits": self.config.output_logits,
            "attentions": self.config.output_attentions,
            "hidden_states": self.config.output_hidden_states,
        }
        return [name for name, wanted in flags.items() if wanted]

    def _record(self, outputs, i: int, T: int, past: int, logits_V, scores_V):
        """Adds token i's records; the prompt's forward gives its states whole, as in plain decoding."""
        prompt = self.ids.shape[1] == self.prompt_length
        for name in self.recorded:
            if name == "scores":
                entry = scores_V[None]
            elif name == "logits":
                entry = logits_V[None]
            elif prompt:
                entry = outputs[name]
            elif name == "hidden_states":
                entry = tuple(state[:, i : i + 1] for state in outputs.hidden_states)
            else:
                entry = tuple(
                    self._attention_row(layer, weights, i, T, past) for layer, weights in enumerate(outputs.attentions)
                )
            self.recorded[name] += (entry,)

    def _attention_row(self, layer: int, weights: torch.Tensor, i: int, T: int, past: int) -> torch.Tensor:
        """Row i of a block's attention, over the keys that a forward of its token alone would have had."""
        if self.cache.layers[layer].is_compileable:  # static: always over all places
            return weights[:, :, i : i + 1]
        end = weights.shape[-1] - T + i + 1
        visible = past + i + 1
        if self.cache.layers[layer].is_sliding:
            visible = min(visible, self.cache.layers[layer].sliding_window)
        return weights[:, :, i : i + 1, end - visible : end]

    def output(self) -> XPressGenerateOutput:
        fields = dict(self.recorded)
        return XPressGenerateOutput(sequences=self.ids, drafting=self.statistics, **{CACHE: self.cache}, **fields)


class _past_recording:
    """Lets sliding-window layers keep what a rejected draft would have pushed out; their flags are put back after."""

    def __init__(self, cache):
        self.cache = cache

    def __enter__(self):
        self.flags = [(layer, layer.record_past) for layer in self.cache.layers if hasattr(layer, "record_past")]
        self.cache.activate_past_recording()

    def __exit__(self, *error):
        for layer, flag in self.flags:
            layer.record_past = flag
