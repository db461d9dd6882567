"""Prompt sets by name, as the paper measured on them (arXiv 2608.02438): shuffled with seed 0, the first N, first turn.

A set's wording is that of the public DFlash and DSpark evaluations. What the target is given is rendered by its own
chat template, thinking off where the template has that switch, and known by a hash of its token ids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from datasets import Dataset, load_dataset

from .arms import digest


SHUFFLE_SEED = 0
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE = "livecodebench/code_generation_lite"
CODE_FILE, CODE_PARTS = f"hf://datasets/{CODE}/test{{}}.jsonl", ("", 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class PromptSet:
    """
    Where a set is, and how a row of it becomes a prompt.

    Args:
        source (`str`), subset (`str`, *optional*), split (`str`): As `datasets.load_dataset` takes them.
        bare: What a row asks.
        prompt: What its first turn is, with the set's instruction; `bare` where it has none.
        files: For a set that is plain JSONL files.
    """

    source: str
    split: str
    bare: Callable[[dict], str]
    prompt: Callable[[dict], str] | None = None
    subset: str | None = None
    files: tuple[str, ...] | None = None

    def load(self) -> Dataset:
        """The rows in the paper's order."""
        if self.files:
            rows = load_dataset("json", split=self.split, data_files=list(self.files))
        else:
            rows = load_dataset(self.source, self.subset, split=self.split)
        return rows.shuffle(seed=SHUFFLE_SEED)

    def worded(self, row: dict) -> str:
        return self.bare(row) if self.prompt is None else self.prompt(row)


@dataclass(frozen=True)
class Prompts:
    """
    The prompts of one set.

    Args:
        source (`str`): The set's id on the Hub, or the name of the file.
        messages (`list[list[dict]]`): What is asked.
        bare (`list[str]`): The same without the set's instruction.
    """

    source: str
    messages: list[list[dict]]
    bare: list[str]


def boxed(key: str) -> Callable[[dict], str]:
    return lambda row: row[key] + BOXED


def humaneval_prompt(row: dict) -> str:
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    )


def livecodebench_prompt(row: dict) -> str:
    starter = row["starter_code"]
    form = "Use the following code structure" if starter else "Write your code in the following format"
    return (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
        f"for the program\n\n### Question:\n{row['question_content']}\n\n### Format: {form}:\n"
        f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n### Answer: (use the provided format with backticks)"
    )


HUB_SETS = {
    "gsm8k": PromptSet("openai/gsm8k", "test", itemgetter("question"), boxed("question"), subset="main"),
    "math500": PromptSet("HuggingFaceH4/MATH-500", "test", itemgetter("problem"), boxed("problem")),
    "aime25": PromptSet("MathArena/aime_2025", "train", itemgetter("problem"), boxed("problem")),
    "humaneval": PromptSet("openai/openai_humaneval", "test", itemgetter("prompt"), humaneval_prompt),
    "mbpp": PromptSet("google-research-datasets/mbpp", "test", itemgetter("prompt"), subset="sanitized"),
    "livecodebench": PromptSet(
        CODE,
        "train",
        itemgetter("question_content"),
        livecodebench_prompt,
        files=tuple(map(CODE_FILE.format, CODE_PARTS)),
    ),
    "mt-bench": PromptSet("HuggingFaceH4/mt_bench_prompts", "train", lambda row: row["prompt"][0]),
}


def hub_prompts(name: str, limit: int | None = None) -> Prompts:
    """The first `limit` prompts of a named set, or all if it has fewer."""
    chosen = HUB_SETS[name]
    rows = chosen.load()
    rows = rows.select(range(len(rows))[:limit])
    messages = [[{"role": "user", "content": chosen.worded(row)}] for row in rows]
    return Prompts(chosen.source, messages, [chosen.bare(row) for row in rows])


def template_arguments(tokenizer) -> dict:
    """Variables of the chat template: thinking off, where it can think."""
    return {"enable_thinking": False} if "enable_thinking" in (tokenizer.chat_template or "") else {}


def render(tokenizer, messages: list[dict]) -> list[int]:
    """What the target is given to answer; the bare text where its tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    arguments = template_arguments(tokenizer)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **arguments)["input_ids"]


def render_sets(tokenizer, sets: dict[str, Prompts], longest: int) -> dict[str, list[list[int]]]:
    """All prompts as token ids; raises for one of more than `longest` tokens."""
    rendered = {name: [render(tokenizer, messages) for messages in prompts.messages] for name, prompts in sets.items()}
    for name, prompts in rendered.items():
        for number, ids in enumerate(prompts, 1):
            if len(ids) > longest:
                raise ValueError(
                    f"{name}, prompt {number} has {len(ids)} tokens, expected at most {longest}: what the target's "
                    "positions leave beside `--max-new-tokens`. Take fewer new tokens, or leave the prompt or set out."
                )
    return rendered


def set_hashes(rendered: dict[str, list[list[int]]]) -> dict[str, str]:
    """The rendered-prompt hash of every set."""
    return {name: digest(prompts) for name, prompts in rendered.items()}
