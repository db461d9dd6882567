"""Prompt sets by name, as the paper measured on them (arXiv 2608.02438): shuffled with seed 0, the first N, first turn.

A set's wording is that of the public DFlash and DSpark evaluations. What the target is given is rendered by its own
chat template, thinking off where the template has that switch, and known by a hash of its token ids.
"""

from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset, load_dataset

from .arms import digest


SHUFFLE_SEED = 0
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE_FILES = "hf://datasets/livecodebench/code_generation_lite/test{}.jsonl"


@dataclass(frozen=True)
class PromptSet:
    """
    Where a set is, and how a row of it becomes a prompt.

    Args:
        source (`str`), subset (`str`, *optional*), split (`str`): As `datasets.load_dataset` takes them.
        prompt: The first turn of a row.
        files: For a set that is plain files, read by the loader that `source` names.
    """

    source: str
    split: str
    prompt: Callable[[dict], str]
    subset: str | None = None
    files: tuple[str, ...] | None = None

    def load(self) -> Dataset:
        """The rows in the paper's order."""
        files = list(self.files) if self.files else None
        return load_dataset(self.source, self.subset, split=self.split, data_files=files).shuffle(seed=SHUFFLE_SEED)


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
    "gsm8k": PromptSet("openai/gsm8k", "test", lambda row: row["question"] + BOXED, subset="main"),
    "math500": PromptSet("HuggingFaceH4/MATH-500", "test", lambda row: row["problem"] + BOXED),
    "aime25": PromptSet("MathArena/aime_2025", "train", lambda row: row["problem"] + BOXED),
    "humaneval": PromptSet("openai/openai_humaneval", "test", humaneval_prompt),
    "mbpp": PromptSet("google-research-datasets/mbpp", "test", lambda row: row["prompt"], subset="sanitized"),
    "livecodebench": PromptSet(
        "json", "train", livecodebench_prompt, files=tuple(CODE_FILES.format(n) for n in ("", 2, 3, 4, 5, 6))
    ),
    "mt-bench": PromptSet("HuggingFaceH4/mt_bench_prompts", "train", lambda row: row["prompt"][0]),
}


def hub_prompts(name: str, limit: int | None = None) -> list[list[dict]]:
    """The first `limit` prompts of a named set, or all if it has fewer, each as messages."""
    rows = HUB_SETS[name].load()
    chosen = rows.select(range(len(rows))[:limit])
    return [[{"role": "user", "content": HUB_SETS[name].prompt(row)}] for row in chosen]


def template_arguments(tokenizer) -> dict:
    """Variables of the chat template: thinking off, where it can think."""
    return {"enable_thinking": False} if "enable_thinking" in (tokenizer.chat_template or "") else {}


def render(tokenizer, messages: list[dict]) -> list[int]:
    """What the target is given to answer; the bare text where its tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    arguments = template_arguments(tokenizer)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **arguments)["input_ids"]


def render_sets(tokenizer, sets: dict[str, list[list[dict]]], longest: int) -> dict[str, list[list[int]]]:
    """All prompts as token ids; raises for one of more than `longest` tokens."""
    rendered = {name: [render(tokenizer, messages) for messages in prompts] for name, prompts in sets.items()}
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
