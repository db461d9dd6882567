"""Runs every arm on every prompt, one row a prompt, into a folder that a killed command goes on filling.

`settings.json` holds all that decides over the numbers, the machine included: a run that would differ in any of it is
refused. `rows.jsonl` holds one line for each finished prompt; half a line is dropped and its prompt measured again.
Prompts go round the sets, first prompts first, and each prompt through all arms in turn, beginning with another one
each time, so that neither a drift of the machine nor a place in the order favours an arm.
"""

import json
import os
import platform
import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from .arms import Arm, digest, gap_in_steps, run_arm
from .evaluation import PLAIN


SETTINGS, ROWS = "settings.json", "rows.jsonl"
WARM_UP_TOKENS = 8
MISSING = "not set"  # beside values, among them None


class Prompt(NamedTuple):
    set: str
    index: int  # in its set
    ids: list[int]


def round_the_sets(rendered: dict[str, list[list[int]]]) -> list[Prompt]:
    """The first prompt of every set, then the second ones, and so on."""
    columns = ([Prompt(name, i, ids) for i, ids in enumerate(prompts)] for name, prompts in rendered.items())
    return [prompt for row in zip_longest(*columns) for prompt in row if prompt is not None]


def environment(device: torch.device) -> dict:
    """What the speeds depend on besides the models; no name of a machine."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def device_name(device: torch.device) -> str:
    """The processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", information.read_text()) if information.exists() else []
    return names[0] if names else platform.machine()


class RunFolder:
    """
    The folder of one evaluation, opened for writing.

    Args:
        path (`Path`): Made if need be.
        settings (`dict`): All that decides over the numbers; a folder begun with others raises a `ValueError`.
    """

    def __init__(self, path: Path, settings: dict):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        settings_file = path / SETTINGS
        if settings_file.exists():
            check_same(path, json.loads(settings_file.read_text(encoding="utf-8")), settings)
        elif (path / ROWS).exists():
            raise ValueError(f"{path} holds {ROWS} but no {SETTINGS}, expected both or neither: choose a new folder.")
        else:
            write_json(settings_file, settings)
        self.rows = self._take_up()

    def add(self, row: dict) -> None:
        with (self.path / ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)

    def _take_up(self) -> list[dict]:
        """The finished rows; what lies behind the last whole line is cut off."""
        file = self.path / ROWS
        file.touch()
        whole = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        os.truncate(file, sum(map(len, whole)))
        return [json.loads(line) for line in whole]


def check_same(path: Path, found: dict, wanted: dict) -> None:
    """Raises a `ValueError` that names every setting in which a folder differs from the command."""
    if different := differences(flatten(found), flatten(wanted)):
        raise ValueError(
            f"{path} was begun with other settings: {'; '.join(different)}. Give the same ones, on the same machine, or "
            "choose a new folder: numbers of two settings are not one result."
        )


def differences(found: dict, wanted: dict) -> list[str]:
    """Every setting in which a folder differs from what is wanted of it, with both values."""
    return [
        f"`{key}` is {wanted.get(key, MISSING)!r}, there {found.get(key, MISSING)!r}"
        for key in sorted({*found, *wanted})
        if found.get(key, MISSING) != wanted.get(key, MISSING)
    ]


def flatten(settings: dict, prefix: str = "") -> dict:
    """Nested settings with the path of each as its name."""
    flat = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def write_json(file: Path, content) -> None:
    """Whole or not at all."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def evaluate(
    target,
    prompts: list[Prompt],
    arms: list[Arm],
    folder: RunFolder,
    seed: int = 0,
    on_prompt: Callable[[int], None] = lambda done: None,
    **generate,
) -> list[dict]:
    """
    Measures what the folder lacks; returns all its rows.

    Args:
        arms: Plain is among them: the others are compared with it.
        seed: Of the sampling; every call begins with one made of it and the prompt's number.
        on_prompt: Called with the number of prompts done, before the first and after each.
        generate: Arguments of `generate` for all arms.
    """
    done = len(folder.rows)
    on_prompt(done)
    if done < len(prompts):
        warm_up(target, prompts[done], arms, generate)
    for number, prompt in enumerate(prompts[done:], done):
        first = number % len(arms)
        folder.add(measure(target, prompt, [*arms[first:], *arms[:first]], arms, seed + number, generate))
        on_prompt(number + 1)
    return folder.rows


def warm_up(target, prompt: Prompt, arms: list[Arm], generate: dict) -> None:
    """A few tokens of every arm, not counted."""
    ids = torch.tensor([prompt.ids], device=target.device)
    for arm in arms:
        run_arm(target, ids, arm, **{**generate, "max_new_tokens": WARM_UP_TOKENS})


def measure(target, prompt: Prompt, in_turn: list[Arm], arms: list[Arm], seed: int, generate: dict) -> dict:
    """The row of one prompt. Under sampling nothing is said of identity: no two arms draw alike."""
    ids, runs = torch.tensor([prompt.ids], device=target.device), {}
    for arm in in_turn:
        torch.manual_seed(seed)
        runs[arm.name] = run_arm(target, ids, arm, **generate)
    plain, entries = runs[PLAIN].new_ids, {}
    for arm in arms:
        entries[arm.name] = runs[arm.name].as_dict()
        if not generate["do_sample"]:
            other = runs[arm.name].new_ids
            same = other == plain
            gap = None if same else gap_in_steps(target, ids, plain, other)
            entries[arm.name] |= {"identical": same, "gap_steps": gap}
    return {"set": prompt.set, "index": prompt.index, "prompt": digest(prompt.ids), "arms": entries}
