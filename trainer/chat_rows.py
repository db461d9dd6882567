"""Conversations as training rows: `input_ids`, and a `loss_mask` that is 1 exactly where the target would have spoken.

Supervised are the answers' own tokens and the end-of-turn token behind each; not the template's header, not an empty
think block, not what the template puts behind the end of a turn. A row is what generation would have had before its
eyes: a turn goes on in the row of the turn before it only where its prompt begins with that row, token for token (a
template that rewrites history, by dropping thoughts, starts another row).
"""

import re
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase


MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")


class Turn(NamedTuple):
    prompt: list[int]  # all that generation is given, the header of the answer included
    answer: list[int]
    mask: list[int]  # of the answer


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **template_args) -> list[int]:
    """What the target is given to answer the last message."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template_args)["input_ids"]


def answer_turn(tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: list[int]) -> Turn:
    """A turn whose answer the target wrote itself, token by token."""
    silent = _empty_think_tokens(tokenizer, answer)
    return Turn(prompt, answer, [0] * silent + [1] * (len(answer) - silent))


def join_turns(turns: list[Turn]) -> list[dict]:
    """The turns of one conversation as rows: one, or more where a prompt does not begin with the row so far."""
    rows = []
    for prompt, answer, mask in turns:
        ids = rows[-1]["input_ids"] if rows else []
        if not rows or prompt[: len(ids)] != ids:
            rows.append({"input_ids": [], "loss_mask": []})
        row = rows[-1]
        row["loss_mask"] += [0] * (len(prompt) - len(row["input_ids"])) + mask
        row["input_ids"] = prompt + answer
    return rows


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], end_tokens: set[int] | None = None, **template_args
) -> list[dict]:
    """
    One conversation with its answers as rows.

    A chat template with `{% generation %}` markers says itself what is supervised; where it rewrites history, only of
    each turn as the last one. Without markers, each answer is what the rendered conversation adds to its prompt. A
    `ValueError` says why where that cannot be told.

    Args:
        messages (`list[dict]`): With `role` and `content`; ends with an assistant's message.
        end_tokens (`set[int]`, *optional*): Tokens that end a turn; the tokenizer's `eos_token_id` where omitted.
        template_args: Variables of the template, such as `enable_thinking=False`.
    """
    if end_tokens is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no `eos_token`, expected one, or `end_tokens`: what ends a turn is learned."
            )
        end_tokens = {tokenizer.eos_token_id}
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError(f"the roles are {[m['role'] for m in messages]}, expected an 'assistant' to learn from.")
    if MARKER.search(tokenizer.get_chat_template()):
        rows = _marked_rows(tokenizer, messages, answers, end_tokens, template_args)
    else:
        rows = join_turns([_given_turn(tokenizer, messages[: i + 1], end_tokens, template_args) for i in answers])
    for row in rows:
        check_mask(row["loss_mask"], f"the conversation that begins {str(messages[0])[:80]!r}")
    return rows


def check_mask(mask: list[int], name: str) -> None:
    """Raises unless some tokens, and not all, are supervised."""
    if not 0 < sum(mask) < len(mask):
        raise ValueError(
            f"{name} has {sum(mask)} supervised of {len(mask)} tokens, expected the answers' tokens and no others: is "
            "the chat template that of this model, and is there an answer behind a prompt?"
        )


def _given_turn(tokenizer, messages: list[dict], end_tokens: set[int], template_args: dict) -> Turn:
    """The last message as the answer to those before it, found by rendering with and without it."""
    before = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False, **template_args)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **template_args)
    prompt = tokenizer(before, add_special_tokens=False)["input_ids"]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    if not text.startswith(before) or ids[: len(prompt)] != prompt:
        raise _unclear(f"begins {_from_parting(before, text)}, which is not how the prompt for it goes on")
    start = text.find(messages[-1]["content"].strip(), len(before))
    if start < 0:
        raise _unclear(f"does not hold the answer's own text {messages[-1]['content'].strip()[:60]!r}")
    if empty := EMPTY_THINK.match(text, start):
        start = empty.end()
    spoken = [i for i in range(len(prompt), len(ids)) if offsets[i][1] > start]
    end = next((i for i in spoken if ids[i] in end_tokens), None)
    if end is None:
        raise _unclear(f"ends {text[-20:]!r}, expected one of the end-of-turn tokens {_names(tokenizer, end_tokens)}")
    answer = ids[len(prompt) : end + 1]
    silent = spoken[0] - len(prompt)
    return Turn(prompt, answer, [0] * silent + [1] * (len(answer) - silent))


def _unclear(what: str) -> ValueError:
    return ValueError(
        f"the assistant's tokens cannot be told from the template's: the rendered conversation {what}. Give the "
        "tokenizer a chat template with {% generation %} markers, or let the target answer (`--answers regenerated`)."
    )


def _from_parting(before: str, text: str) -> str:
    """Where two texts part, shown from a little before."""
    at = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
    return f"{text[max(at - 20, 0) : at + 20]!r} where the prompt has {before[max(at - 20, 0) : at + 20]!r}"


def _marked_rows(tokenizer, messages: list[dict], answers: list[int], end_tokens: set[int], template_args: dict):
    """The whole conversation as one row, or its turns joined where the template writes a turn otherwise later on."""
    parts = [_marked_row(tokenizer, messages[: i + 1], end_tokens, template_args) for i in answers]
    whole = _marked_row(tokenizer, messages, end_tokens, template_args)
    if all(whole["input_ids"][: len(part["input_ids"])] == part["input_ids"] for part in parts):
        return [whole]
    prompts = [prompt_ids(tokenizer, messages[:i], **template_args) for i in answers]
    return join_turns([_marked_turn(tokenizer, prompt, **part) for prompt, part in zip(prompts, parts)])


def _marked_turn(tokenizer, prompt: list[int], input_ids: list[int], loss_mask: list[int]) -> Turn:
    """The last answer of a row, up to the end of what is supervised of it."""
    start = len(prompt)
    if input_ids[:start] != prompt:
        parting = _from_parting(tokenizer.decode(prompt), tokenizer.decode(input_ids))
        raise _unclear(f"begins {parting}, which is not how the prompt for it goes on")
    end = max((i + 1 for i in range(start, len(loss_mask)) if loss_mask[i]), default=start)
    return Turn(prompt, input_ids[start:end], loss_mask[start:end])


def _marked_row(tokenizer, messages: list[dict], end_tokens: set[int], template_args: dict) -> dict:
    """The whole conversation as one row; the markers' spans are trimmed to what the target would have spoken."""
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, **template_args)
    ids, marked = encoded["input_ids"], encoded["assistant_masks"]
    header = _header(tokenizer, messages, template_args)
    mask, start = [0] * len(ids), 0
    while 1 in marked[start:]:
        start = marked.index(1, start)
        end = marked.index(0, start) if 0 in marked[start:] else len(ids)
        first = max((e for e in range(start, end) if header and ids[e - len(header) : e] == header), default=start)
        first += _empty_think_tokens(tokenizer, ids[first:end])
        last = next((i for i in range(first, min(end + 1, len(ids))) if ids[i] in end_tokens), None)
        if last is None:
            raise _unclear(
                f"marks {tokenizer.decode(ids[start:end])[-40:]!r} as an answer, expected one of the end-of-turn tokens "
                f"{_names(tokenizer, end_tokens)} in it or behind it"
            )
        mask[first : last + 1] = [1] * (last + 1 - first)
        start = end
    return {"input_ids": ids, "loss_mask": mask}


def _header(tokenizer, messages: list[dict], template_args: dict) -> list[int]:
    """The tokens that a generation prompt adds to what stands before the first answer."""
    asked = messages[: [message["role"] for message in messages].index("assistant")]
    plain = tokenizer.apply_chat_template(asked, **template_args)["input_ids"]
    return prompt_ids(tokenizer, asked, **template_args)[len(plain) :]


def _empty_think_tokens(tokenizer, answer: list[int]) -> int:
    """How many tokens at the beginning of an answer are a think block without a thought."""
    empty = EMPTY_THINK.match(tokenizer.decode(answer))
    if empty is None:
        return 0
    n = 0
    while n < len(answer) and len(tokenizer.decode(answer[: n + 1])) <= empty.end():
        n += 1
    return n


def _names(tokenizer, tokens: set[int]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(sorted(tokens))
