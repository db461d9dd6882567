"""Training rows from prompts: the target answers them itself, batch by batch, into a folder that outlives a kill.

A drafter is judged by the target's own words, so those are what it learns from. Conversations of like length go
together, in an order that depends on the prompts alone, and sampling is seeded batch by batch: a run that was killed
and taken up again writes the rows of one that was not. Nothing is cut: a prompt that leaves no room for an answer
within `max_length` is dropped and counted, and an answer that does not end within `max_new_tokens` is kept without an
end-of-turn token. What ends a conversation early leaves the turns before it.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, extract_commit_hash, logging

from ..generation.decoding_xpress import CACHE
from .bfloat16 import warn_of_slow_bf16
from .chat_rows import Turn, answer_turn, join_turns, prompt_ids, tokenize_chat
from .preallocated_cache import preallocated_cache
from .row_folder import RowFolder, sha256, weights_fingerprint


logger = logging.get_logger(__name__)

LONGEST = 4096  # tokens of a row where neither the user nor the target's context says less


@dataclass
class AnswerSettings:
    """
    How rows are made.

    Args:
        target (`str`), revision (`str`): Hub id or folder of the target.
        answers (`str`): `"regenerated"` by the target, or `"given"`: the data set's own.
        max_new_tokens (`int`): Of an answer.
        max_length (`int`, *optional*): Of a row; 4096, or the target's context if that is shorter, where omitted.
        batch_size (`int`): Conversations that are answered together.
        temperature, top_p, top_k: Of the sampling; temperature 0 is greedy.
        template_args (`dict`): Variables of the chat template, such as `enable_thinking`.
    """

    target: str
    revision: str | None = None
    answers: str = "regenerated"
    max_new_tokens: int = 1024
    max_length: int | None = None
    batch_size: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    dtype: str = "bfloat16"
    template_args: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, value, expected in (
            ("answers", self.answers, ("regenerated", "given")),
            ("dtype", self.dtype, ("float32", "bfloat16", "float16")),
        ):
            if value not in expected:
                raise ValueError(f"`{name}` is {value!r}, expected one of {', '.join(expected)}.")
        if self.temperature == 0 and (self.top_p, self.top_k) != (1.0, 0):
            raise ValueError(
                f"`top_p`={self.top_p} and `top_k`={self.top_k} were given with `temperature`=0, which is greedy and reads "
                "neither: expected a temperature above 0, or leave them out."
            )
        if self.answers == "given" and self.temperature:
            raise ValueError(
                f"`temperature` is {self.temperature} with given answers, which nobody samples: expected `answers`="
                "'regenerated', or leave it out."
            )
        if self.answers == "regenerated" and self.max_length is not None and self.max_length <= self.max_new_tokens:
            raise ValueError(
                f"`max_length` is {self.max_length}, expected more than `max_new_tokens`={self.max_new_tokens}: no prompt "
                "would fit."
            )

    def within(self, context: int) -> "AnswerSettings":
        """The settings with `max_length` filled in, for a target of that many positions."""
        if self.max_length is not None and self.max_length > context:
            raise ValueError(f"`max_length` is {self.max_length}, expected at most {context}: the target's positions.")
        return replace(self, max_length=self.max_length or min(LONGEST, context))

    @property
    def sampling(self) -> dict:
        """The arguments of `generate` that choose tokens, all of them, so that no default of the target's shapes an answer."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


def write_rows(
    conversations: list[list[dict]],
    folder: Path,
    settings: AnswerSettings,
    on_batch: Callable[[int, int], None] = lambda done, tokens: None,
    excluded: Collection[int] = (),
) -> dict:
    """
    Makes the rows of `folder`, or those that it lacks, and returns its manifest.

    Args:
        conversations: As `read_conversations` gives them.
        on_batch: Called after each batch, and before the first, with the conversations done and the tokens supervised.
        excluded: Places of conversations to leave out. Rows are named, and errors count, by the place among all.
    """
    tokenizer = load_tokenizer(settings.target, settings.revision)
    config = AutoConfig.from_pretrained(settings.target, revision=settings.revision)
    settings = settings.within(config.get_text_config(decoder=True).max_position_embeddings)
    make = GivenAnswers if settings.answers == "given" else TargetAnswers
    kept = {index: messages for index, messages in enumerate(conversations) if index not in excluded}
    source = make(tokenizer, kept, settings)
    names = {"target": settings.target, "revision": settings.revision, "commit": commit_of(settings)}
    names |= {"torch": torch.__version__, "transformers": transformers.__version__, "excluded": len(excluded)}
    decided = manifest_settings(settings, tokenizer, source.end_tokens, list(map(kept.get, range(len(conversations)))))
    out = RowFolder(folder, decided | source.made_by, names)
    out.note_turns(kept.values())
    on_batch(out.counts["prompts"], out.counts["supervised_tokens"])
    for start in range(out.batches * settings.batch_size, len(kept), settings.batch_size):
        batch = source.order[start : start + settings.batch_size]
        with torch.random.fork_rng():
            torch.manual_seed(int(sha256(f"{settings.seed} {out.batches}")[:8], 16))  # torch reads 32 bits of it
            rows, counts = source.rows_of(batch)
        out.add(rows, counts + Counter(prompts=len(batch)))
        on_batch(out.counts["prompts"], out.counts["supervised_tokens"])
    if not out.counts["rows"]:
        raise ValueError(
            f"no prompt gave a row, expected at least one: {dict(out.counts)}. See what was dropped, and why."
        )
    return out.finish()


class GivenAnswers:
    """The rows of conversations that hold their answers. `order` is theirs; nothing of the target is asked."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, conversations: dict[int, list[dict]], settings: AnswerSettings
    ):
        logger.warning(
            "The answers are the data set's own: the drafter learns another distribution than the target's, and fewer of "
            'its drafts will be kept. Let the target answer (`answers="regenerated"`) unless you compare the two.'
        )
        self.tokenizer, self.conversations, self.settings = tokenizer, conversations, settings
        self.end_tokens = end_tokens(tokenizer, settings)
        self.order = list(conversations)
        self.made_by = {"weights": None}

    def rows_of(self, batch: list[int]) -> tuple[list[dict], Counter]:
        rows, counts = [], Counter()
        for index in batch:
            with named_row(index):
                made = tokenize_chat(
                    self.tokenizer, self.conversations[index], self.end_tokens, **self.settings.template_args
                )
            short = [row for row in made if len(row["input_ids"]) <= self.settings.max_length]
            kept = [row for row in short if (1, 1) in pairwise(row["loss_mask"])]  # as `check_row` wants them
            counts += Counter(dropped_row_too_long=len(made) - len(short), dropped_empty_answer=len(short) - len(kept))
            rows += with_ids(index, kept)
        return rows, counts


@dataclass
class Chat:
    """A conversation that is being answered."""

    index: int
    ahead: list[list[dict]]  # the messages of every user turn that was not answered yet
    history: list[dict] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


class TargetAnswers:
    """The rows of conversations that the target answers, turn by turn. Every template is tried before it is loaded."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, conversations: dict[int, list[dict]], settings: AnswerSettings
    ):
        self.tokenizer, self.settings = tokenizer, settings
        self.end_tokens = end_tokens(tokenizer, settings)
        self.user_turns = {index: user_turns(messages) for index, messages in conversations.items()}
        lengths = {}
        for index, turns in self.user_turns.items():
            with named_row(index):
                lengths[index] = len(prompt_ids(tokenizer, turns[0], **settings.template_args))
        # By length, so that little is padded.
        self.order = sorted(lengths, key=lambda i: (len(self.user_turns[i]), lengths[i], i))
        self.target = load_target(settings, tokenizer, self.end_tokens)
        self.made_by = {"weights": weights_fingerprint(self.target)}

    def rows_of(self, batch: list[int]) -> tuple[list[dict], Counter]:
        chats = [Chat(index, list(self.user_turns[index])) for index in batch]
        counts, waiting = Counter(), chats
        while waiting:
            waiting = self.answer_turns(waiting, counts)
        return [row for chat in chats for row in with_ids(chat.index, join_turns(chat.turns))], counts

    def answer_turns(self, chats: list[Chat], counts: Counter) -> list[Chat]:
        """Answers the next turn of every chat; returns those that go on."""
        asked, longest = [], self.settings.max_length - self.settings.max_new_tokens
        for chat in chats:
            chat.history += chat.ahead.pop(0)
            prompt = prompt_ids(self.tokenizer, chat.history, **self.settings.template_args)
            if len(prompt) > longest:
                counts["dropped_prompt_too_long"] += 1
            else:
                asked.append((chat, prompt))
        answers = self.answer([prompt for _, prompt in asked]) if asked else []
        return [chat for (chat, prompt), answer in zip(asked, answers) if self.take(chat, prompt, answer, counts)]

    def take(self, chat: Chat, prompt: list[int], answer: list[int] | None, counts: Counter) -> bool:
        """Adds an answer to its chat, unless it is none; returns whether another turn follows."""
        if answer is None:
            counts["dropped_not_finite"] += 1
            return False
        turn = answer_turn(self.tokenizer, prompt, answer)
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        if sum(turn.mask) < 2 or not text.strip():
            counts["dropped_empty_answer"] += 1
            return False
        counts["unfinished_answers"] += answer[-1] not in self.end_tokens
        chat.turns.append(turn)
        chat.history.append({"role": "assistant", "content": text})
        return bool(chat.ahead)

    @torch.no_grad()
    def answer(self, prompts: list[list[int]]) -> list[list[int] | None]:
        """The target's answers up to their end-of-turn token; None where its logits were not finite."""
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.target.device)
        watch = FiniteLogits()
        cache = {}
        if self.target._supports_default_dynamic_cache():
            cache = {CACHE: preallocated_cache(self.target.config.get_text_config(decoder=True))}
        outputs = self.target.generate(
            **inputs,
            max_new_tokens=self.settings.max_new_tokens,
            logits_processor=[watch],
            **cache,
            **self.settings.sampling,
        )
        answers = []
        for failed, ids in zip(watch.failed.tolist(), outputs[:, inputs["input_ids"].shape[1] :].tolist()):
            end = next((i + 1 for i, token in enumerate(ids) if token in self.end_tokens), len(ids))
            answers.append(None if failed else ids[:end])
        return answers


class FiniteLogits(LogitsProcessor):
    """Notes sequences with logits that are NaN or infinite, and levels those, so that the rest of the batch goes on."""

    def __init__(self):
        self.failed: torch.Tensor | bool = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        failed = ~(scores < torch.inf).all(dim=-1)
        self.failed = failed | self.failed
        return scores.masked_fill(failed[:, None], 0.0)


@contextmanager
def named_row(index: int):
    """Names the row in what is said of it by the template, or because of it."""
    try:
        yield
    except (TemplateError, ValueError) as error:
        raise ValueError(f"row {index + 1}: the chat template cannot be used on it. {error}") from error


def user_turns(messages: list[dict]) -> list[list[dict]]:
    """The messages cut behind every one of the user's; the last one is."""
    turns = [[]]
    for message in messages:
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return turns[:-1]


def with_ids(index: int, rows: list[dict]) -> list[dict]:
    """The rows of one conversation, named after it."""
    return [{"id": f"{index}.{part}" if part else str(index), **row} for part, row in enumerate(rows)]


def load_tokenizer(target: str, revision: str | None) -> PreTrainedTokenizerBase:
    """
    The target's tokenizer, padding on the left; raises without a chat template, and for an adapter. Padding and truncation that
    tokenizer.json was saved with are off: applying a chat template clears them, and rows are known by its hash.
    """
    folder = Path(target)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ValueError(
            f"the target {target} is a PEFT adapter, expected a whole model: merge it (`merge_and_unload`), save the "
            "merged model and its tokenizer to a folder, and name that one."
        )
    tokenizer = AutoTokenizer.from_pretrained(target, revision=revision, padding_side="left")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {target} has no chat template, expected one: without it nobody knows what the "
            "target is asked. Save the tokenizer with the `chat_template` that the target is used with."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def commit_of(settings: AnswerSettings) -> str | None:
    """The commit that a Hub id stands for; none where the target is a folder of one's own."""
    return extract_commit_hash(cached_file(settings.target, "config.json", revision=settings.revision), None)


def end_tokens(tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings) -> set[int]:
    """What ends a turn: the tokens at which the target's `generate` stops."""
    try:
        stops = GenerationConfig.from_pretrained(settings.target, revision=settings.revision).eos_token_id
    except OSError:  # a folder without generation_config.json
        stops = None
    stops = tokenizer.eos_token_id if stops is None else stops
    if stops is None:
        raise ValueError(
            f"{settings.target} has no `eos_token_id`, expected one: the end of an answer is learned too."
        )
    return set(stops) if isinstance(stops, list) else {stops}


def load_target(settings: AnswerSettings, tokenizer: PreTrainedTokenizerBase, end_tokens: set[int]) -> PreTrainedModel:
    """The target, to answer by `settings` and by no generation default of its own."""
    target = AutoModelForCausalLM.from_pretrained(
        settings.target, revision=settings.revision, dtype=getattr(torch, settings.dtype), device_map="auto"
    ).eval()
    if settings.dtype == "bfloat16":
        warn_of_slow_bf16("`dtype` is bfloat16", "`dtype` to float32 (`--dtype float32`)", target.device)
    target.generation_config = GenerationConfig(eos_token_id=sorted(end_tokens), pad_token_id=tokenizer.pad_token_id)
    return target


def manifest_settings(
    settings: AnswerSettings,
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: set[int],
    conversations: list[list[dict] | None],
) -> dict:
    """
    All that decides over the rows, besides the weights. Names do not: a moved target is the same one. None stands for a
    conversation that is left out: where it stood decides over the names of the rows.
    """
    chosen = {key: value for key, value in asdict(settings).items() if key not in ("target", "revision")}
    return chosen | {
        "tokenizer": sha256(tokenizer.backend_tokenizer.to_str()),
        "chat_template": sha256(tokenizer.get_chat_template()),
        "end_tokens": sorted(end_tokens),
        "prompts": sum(messages is not None for messages in conversations),
        "prompts_sha256": sha256(json.dumps(conversations)),
    }
