"""Generation ends where the plain run ends, also inside a block, and streams the same: CASES A1, A2, A3, A4, A5, A14."""

import pytest
import torch
from rig import BLOCK, CACHE, VOCAB, assert_rounds, drafted, make_drafter, oracle, plain, prompt, ref, target
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer


LENGTH = 7  # of the prompt
PATTERNS = [(BLOCK - 1,), (3,), (0, 3, BLOCK - 1)]
UNUSED = sorted(set(range(VOCAB)) - set(ref()[0].tolist()))[0]

each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


class Recorder(BaseStreamer):
    """What a streamer is given."""

    def __init__(self):
        self.tokens, self.sizes, self.ends = [], [], 0

    def put(self, value):
        assert not self.ends and value.device.type == "cpu"
        self.tokens += value.flatten().tolist()
        self.sizes.append(value.numel())

    def end(self):
        self.ends += 1


def assert_same_end(pattern, n: int = 3 * BLOCK, model=None, text=None, ids=None, **kwargs):
    """Drafted and plain give the same tokens, stream the same, and a cache of one position less."""
    model, ids = model or target(), prompt() if ids is None else ids
    text = ref() if text is None else text
    make = kwargs.pop("make", dict)  # arguments that keep state: built anew for each run
    wanted, streamer = Recorder(), Recorder()
    expected = plain(model, ids, n, streamer=wanted, **kwargs, **make())
    drafter = oracle(model, text, pattern)
    output, drafting = drafted(
        model, ids, drafter, n, streamer=streamer, return_dict_in_generate=True, **kwargs, **make()
    )
    assert torch.equal(output.sequences, expected)
    assert streamer.tokens == wanted.tokens == expected[0].tolist()
    assert streamer.sizes == wanted.sizes and streamer.ends == 1
    assert output[CACHE].get_seq_length() == expected.shape[1] - 1
    assert expected.shape[1] == ids.shape[1] + 1 + drafting.accepted + len(drafting.rounds)
    new = expected.shape[1] - ids.shape[1]
    if n > 2 and new > 1:  # there was something to draft
        assert_rounds(drafting, pattern)
    return new


@each_pattern
def test_eos_at_every_place(pattern):
    lengths = set()
    for j in range(2 * BLOCK + 1):
        token = int(ref()[0, LENGTH + j])
        lengths.add(assert_same_end(pattern, eos_token_id=token, pad_token_id=0))
    lengths.add(assert_same_end(pattern, eos_token_id=[UNUSED, token], pad_token_id=0))
    assert len(lengths) > BLOCK  # the ends fell on all places of a block


@each_pattern
def test_eos_as_the_last_token_of_the_prompt(pattern):
    assert_same_end(pattern, eos_token_id=int(prompt()[0, -1]), pad_token_id=0)


@each_pattern
def test_max_new_tokens_and_max_length(pattern):
    for n in range(1, 2 * BLOCK + 4):
        assert assert_same_end(pattern, n) == n
    for n in range(1, 2 * BLOCK + 1, 3):
        output, _ = drafted(
            target(), prompt(), oracle(target(), ref(), pattern), max_length=LENGTH + n, max_new_tokens=None
        )
        assert torch.equal(output, ref()[:, : LENGTH + n])


@each_pattern
@pytest.mark.parametrize(
    "kwargs",
    [
        {"min_new_tokens": 12, "eos_token_id": int(ref()[0, LENGTH + 2])},
        {"min_length": 20, "eos_token_id": int(ref()[0, LENGTH + 2])},
        {"exponential_decay_length_penalty": (5, 2.0), "eos_token_id": UNUSED},
        {"forced_eos_token_id": UNUSED},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_minimum_length_and_forced_eos(pattern, kwargs):
    text = plain(target(), prompt(), 30, pad_token_id=0, **kwargs)
    assert_same_end(pattern, 30, text=text, pad_token_id=0, **kwargs)


class LastTokenIs(StoppingCriteria):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class LengthIs(StoppingCriteria):
    """Stops at exactly one length, so that a criterion looked at too late never stops."""

    def __init__(self, length: int):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return torch.full((1,), input_ids.shape[1] == self.length)


@each_pattern
def test_stopping_criteria_see_every_token(pattern):
    for j in range(11):
        criteria = StoppingCriteriaList([LastTokenIs(int(ref()[0, LENGTH + j]))])
        assert_same_end(pattern, stopping_criteria=criteria)
    for n in range(1, 2 * BLOCK + 1):
        criterion = LengthIs(LENGTH + n)
        output, _ = drafted(
            target(),
            prompt(),
            oracle(target(), ref(), pattern),
            30,
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
        assert torch.equal(output, ref()[:, : LENGTH + n])
        assert criterion.seen == list(range(LENGTH + 1, LENGTH + n + 1))


def test_stopping_criteria_are_given_the_scores_so_far():
    class Watch(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append(None if scores is None else len(scores))
            return torch.zeros(1, dtype=torch.bool)

    for kwargs in ({}, {"return_dict_in_generate": True, "output_scores": True}):
        wanted, seen = Watch(), Watch()
        plain(target(), prompt(), 10, stopping_criteria=StoppingCriteriaList([wanted]), **kwargs)
        drafter = oracle(target(), ref(), (0, 3))
        drafted(target(), prompt(), drafter, 10, stopping_criteria=StoppingCriteriaList([seen]), **kwargs)
        assert seen.seen == wanted.seen


CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?()+-*/="
TEXT = "Prix: 5 € … été, 😀! Jacobi (fixé)"


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes as a byte-level BPE spells them, as many as the target has tokens; most characters are one token."""
    missing = sorted(set(TEXT.encode()) - set(CHARACTERS.encode()))
    spelled = dict(zip(_BYTES, _PIECES))
    vocab = {spelled[byte]: i for i, byte in enumerate([*CHARACTERS.encode(), *missing])}
    for i in range(len(vocab), VOCAB):
        vocab[f"<{i}>"] = i
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


# GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on.
_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _BYTES]
_PIECES = [chr(byte) for byte in _BYTES] + [chr(256 + i) for i in range(len(_OTHERS))]
_BYTES = _BYTES + _OTHERS


@each_pattern
def test_stop_strings_at_every_place(pattern, tokenizer):
    pieces = tokenizer.batch_decode(ref()[0, LENGTH : LENGTH + 2 * BLOCK + 1][:, None])
    lengths = set()
    for j in range(2 * BLOCK + 1):
        if pieces[j].isascii():
            lengths.add(assert_same_end(pattern, stop_strings=pieces[j], tokenizer=tokenizer))
    pair = next(a + b for a, b in zip(pieces[BLOCK:], pieces[BLOCK + 1 :]) if (a + b).isascii())
    lengths.add(assert_same_end(pattern, stop_strings=["never seen", pair], tokenizer=tokenizer))
    assert len(lengths) > BLOCK


class Force(LogitsProcessor):
    """Makes the target write a given text, whatever it would have written."""

    def __init__(self, text: list[int]):
        self.text = text

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.text[input_ids.shape[1] - LENGTH]] = 0.0
        return forced


@each_pattern
def test_streamed_text_with_characters_of_several_tokens(pattern, tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert len(ids) > len(TEXT) and tokenizer.decode(ids) == TEXT
    text = torch.cat([prompt(), torch.tensor([ids])], dim=1)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    drafter = oracle(target(), text, pattern)
    processors = LogitsProcessorList([Force(ids)])
    output, drafting = drafted(target(), prompt(), drafter, len(ids), streamer=streamer, logits_processor=processors)
    assert_rounds(drafting, pattern)
    assert torch.equal(output, text)
    pieces = list(streamer)
    assert "".join(pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_random_drafter_ends_the_same():
    drafter = make_drafter(target())
    for j in (0, 3, 8):
        output, _ = drafted(target(), prompt(), drafter, 20, eos_token_id=int(ref()[0, LENGTH + j]), pad_token_id=0)
        assert torch.equal(
            output, plain(target(), prompt(), 20, eos_token_id=int(ref()[0, LENGTH + j]), pad_token_id=0)
        )
