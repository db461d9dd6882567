"""The rig: tiny targets, their plain output, and drafters made by hand that are right exactly as often as a test says.

A random drafter is hardly ever right, so on its own it leaves most of the decoding loop unused. The oracle is told the
text: on the first k draft slots of a round it proposes the text's token, behind them another one. It looks the token up
at the position it is asked for, runs its real backbone on what it is given, and answers through the target's own head,
so a wrong position, crop or head shows as a round with fewer accepted tokens than planned.
"""

from functools import lru_cache
from itertools import cycle, islice

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)
from xpress_drafter import XPressDrafterModel, track_drafting
from xpress_drafter.generation import Draft, XPressCandidateGenerator, decoding_xpress


VOCAB, HIDDEN, LAYERS, BLOCK, WINDOW = 96, 32, 4, 6, 6
MASK_TOKEN = VOCAB - 1
TAPS = [0, 2]
CACHE = decoding_xpress.CACHE  # `generate`'s name for a cache: `cache`, or `past_key_values` before Transformers 5.24
PATTERNS = [(BLOCK - 1,), (0,), (1,), (3,), (BLOCK - 2,), (0, 3, BLOCK - 1)]

# `initializer_range` spreads the logits, so that no two are close enough for rounding to choose between them.
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
CONFIGS = {
    "qwen3": (Qwen3Config, {}),
    "qwen3-alternating": (Qwen3Config, {"use_sliding_window": True, **ALTERNATING}),
    "llama": (LlamaConfig, {}),
    "mistral-sliding": (MistralConfig, {"sliding_window": WINDOW}),
    # Scaled embeddings, soft-caps, alternating layers; the cap is low enough to bend the logits.
    "gemma2": (Gemma2Config, {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0, **ALTERNATING}),
    "gemma3": (Gemma3TextConfig, {"query_pre_attn_scalar": 8, **ALTERNATING}),
}


def make_target(kind: str = "qwen3", seed: int = 0, **overrides) -> PreTrainedModel:
    """A fresh tiny target in eval mode, for tests that change it; `target` gives a shared one."""
    torch.manual_seed(seed)
    config_class, fields = CONFIGS[kind]
    return AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **fields, **overrides})).eval()


target = lru_cache(make_target)


def prompt(length: int = 7, seed: int = 0) -> torch.LongTensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, MASK_TOKEN, (1, length), generator=generator)


def plain(model: PreTrainedModel, ids: torch.LongTensor, n: int, **kwargs):
    """What `model` generates without a drafter."""
    return model.generate(ids, max_new_tokens=n, **{"do_sample": False, **kwargs})


@lru_cache
def ref(kind: str = "qwen3", n: int = 40, length: int = 7) -> torch.LongTensor:
    """The plain greedy text of a shared target after `prompt(length)`: `[1, length + n]`."""
    return plain(target(kind), prompt(length), n)


def make_drafter(model: PreTrainedModel, cls=XPressDrafterModel, seed: int = 1, **kwargs) -> XPressDrafterModel:
    """A random drafter of real parts: wide weights, and a refiner (mixer too) whose biases decide tokens."""
    torch.manual_seed(seed)
    defaults = {
        "num_hidden_layers": 2,
        "target_layer_ids": TAPS,
        "block_size": BLOCK,
        "xpress_rank": 16,
        "xpress_num_passes": 3,
        "initializer_range": 0.3,
    }
    drafter = cls.for_target(model, mask_token_id=MASK_TOKEN, **{**defaults, **kwargs}).eval()
    if drafter.config.refiner_type == "xpress":
        torch.nn.init.normal_(drafter.xpress_head.w1.weight, std=2.0)  # tokens weigh as much as states
        torch.nn.init.normal_(drafter.xpress_head.mix.L, std=0.3)
    return drafter


class OracleDrafter(XPressDrafterModel):
    """A drafter that is told the text (see `oracle`)."""

    def forward(self, noise_embeds, context_hidden_states, position_ids, **kwargs):
        output = super().forward(noise_embeds, context_hidden_states, position_ids, **kwargs)
        tokens = self.text[position_ids[0, -self.config.block_size :]].clone()
        right = self.pattern[self.drafts % len(self.pattern)]
        tokens[right + 1 :] = (tokens[right + 1 :] + 1) % VOCAB
        self.drafts += 1
        output.last_hidden_state = self.codes[tokens][None].to(noise_embeds.dtype)
        return output


class NaNDrafter(XPressDrafterModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * float("nan")
        return output


def oracle(
    model: PreTrainedModel, text: torch.LongTensor, pattern=(BLOCK - 1,), cls=OracleDrafter, **kwargs
) -> OracleDrafter:
    """
    A drafter whose draft tokens are those of `text` `[1, n]` on the first k slots of a round and wrong behind them.

    Args:
        model: Its target.
        text: The tokens of all positions, the prompt's included. Padding does not count as a position.
        pattern: k of each round, over and over.
    """
    drafter = make_drafter(model, cls, **kwargs)
    if drafter.config.refiner_type == "xpress":
        torch.nn.init.zeros_(drafter.xpress_head.w2.weight)  # Jacobi passes run and change nothing
    drafter.text = torch.cat([text[0], text.new_zeros(8 * drafter.config.block_size)])
    drafter.pattern, drafter.drafts, drafter.codes = pattern, 0, codebook(model)
    return drafter


def steer(monkeypatch, text: torch.LongTensor, pattern) -> list[tuple[torch.LongTensor, Draft]]:
    """Lets any drafter draft, then proposes as an oracle would; returns the list its own drafts will be put in.

    So the contexts and the accepted lengths vary as in real use, while the drafter's code is the real one.
    """
    refine, kept, drafts = XPressCandidateGenerator.refine, cycle(pattern), []
    text = torch.cat([text[0], text.new_zeros(2 * BLOCK)])

    def steered(self, h, base, input_ids):
        drafts.append((input_ids, refine(self, h, base, input_ids)))
        tokens, right = text[input_ids.shape[1] :][: BLOCK - 1].clone(), next(kept)
        tokens[right:] = (tokens[right:] + 1) % VOCAB
        return drafts[-1][1]._replace(tokens=tokens[None])

    monkeypatch.setattr(XPressCandidateGenerator, "refine", steered)
    return drafts


@lru_cache
@torch.no_grad()
def codebook(model: PreTrainedModel) -> torch.Tensor:
    """A state for each token at which the head's best token is that one, by a wide margin: `[V, H]`."""
    weight = model.get_output_embeddings().weight.float()
    codes = weight / weight.norm(dim=1, keepdim=True)
    for _ in range(100):  # pushes every token's runner-up down
        logits = codes @ weight.T
        logits.fill_diagonal_(-torch.inf)
        codes = torch.nn.functional.normalize(codes + 0.1 * (weight - weight[logits.argmax(dim=1)]))
    codes = 10 * codes
    assert torch.equal((codes @ weight.T).argmax(dim=1), torch.arange(VOCAB))
    return codes


def drafted(model: PreTrainedModel, ids: torch.LongTensor, drafter, n: int | None = None, **kwargs):
    """What `model` generates with the drafter, and the statistics of the call."""
    with track_drafting() as drafting:
        output = model.generate(ids, assistant_model=drafter, **{"max_new_tokens": n, "do_sample": False, **kwargs})
    return output, drafting


NEAR_TIE = 4  # rounding steps of the best logit


def assert_same_but_for_a_near_tie(model, output, text, dtype: torch.dtype) -> bool:
    """The published rule for bf16 and fp16: drafted text may part from the plain run's only where the plain run's two
    best logits are less than `NEAR_TIE` rounding steps apart. Returns whether it parted."""
    different = (output != text)[0].nonzero()
    if len(different):
        best = model(text[:, : different[0]]).logits[0, -1].float().topk(2).values
        assert best[0] - best[1] < NEAR_TIE * torch.finfo(dtype).eps * best[0].abs()
    return len(different) > 0


def assert_rounds(drafting, pattern, size: int = BLOCK):
    """Every round but the last, which the end may cut, kept exactly as many draft tokens as the oracle had right."""
    accepted = [round.accepted for round in drafting.rounds]
    assert drafting.drafted > 0
    assert accepted[:-1] == list(islice(cycle(min(k, size - 1) for k in pattern), len(accepted) - 1))
