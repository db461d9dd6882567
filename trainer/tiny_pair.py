"""Builds the shipped pair from GSM8K's text: target, the target's own answers, drafter. One seeded run, resumable.

    xpress build-tiny gsm8k-train.jsonl gsm8k-test.jsonl OUT

Everything lies under OUT, what is not shipped in OUT/work; a killed run goes on where it stopped. The steps are fixed
numbers, not times, so that two machines train the same pair.
"""

import calendar
import json
import random
import re
from collections import Counter
from pathlib import Path

from datasets import Dataset

from .answers import AnswerSettings, write_rows
from .bfloat16 import quick_dtype
from .recipe_runs import run, save_drafter
from .recipes import read_recipe
from .row_folder import load_rows
from .tiny_target import read_rows, split, train_target


TARGET_STEPS = 3000
VARIATIONS = 2  # of every training question
MAX_ANSWER = 160  # tokens; nine of ten training answers end before


def build_tiny(data: Path, out: Path, seed: int = 0) -> None:
    """Makes what is not there yet: `out/target`, `out/drafter`, `out/log.json`, and `out/work`, which is not shipped."""
    rows, work = read_rows(data), out / "work"
    work.mkdir(parents=True, exist_ok=True)
    if not (out / "target" / "model.safetensors").exists():
        train_target(rows, out, TARGET_STEPS, seed)
    held_out, trained = split(rows, seed)
    answers, manifest = answer(vary_questions([row["question"] for row in trained], VARIATIONS, seed), out, "answers")
    answer([row["question"] for row in held_out], out, "held-out")  # what `xpress study` measures on
    if not (out / "drafter" / "model.safetensors").exists():
        train_drafter(out, seed)
    log = {part: json.loads((work / f"{part}-log.json").read_text()) for part in ("target", "drafter")}
    log["answers"] = {"rows": len(answers), "tokens": manifest["counts"]["supervised_tokens"]}
    (out / "log.json").write_text(json.dumps(log, indent=1))


def arithmetic() -> dict:
    """The recipe's fields for this CPU: float32 where bf16 would be emulated."""
    name = str(quick_dtype()).removeprefix("torch.")
    return {"bf16": name == "bfloat16", "target_dtype": name}


def answer(questions: list[str], out: Path, name: str) -> tuple[Dataset, dict]:
    """The target's own greedy answers, in `out/work/name`: rows and their manifest."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    dtype = arithmetic()["target_dtype"]
    settings = AnswerSettings(target=str(out / "target"), max_new_tokens=MAX_ANSWER, batch_size=128, dtype=dtype)
    folder = out / "work" / name
    write_rows(chats, folder, settings, lambda done, _: print(f"{name}: {done} of {len(chats)}", flush=True))
    return load_rows(folder)


def vary_questions(questions: list[str], variations: int, seed: int) -> list[str]:
    """
    The questions with other numbers and names, `variations` times each.

    The target half remembers the answers to the questions that it was trained on, and what it says from memory is not
    what a drafter will meet: with the varied questions the drafter trains on answers that the target had to make up.
    """
    names, varied = _names(questions), []
    for variation in range(1, variations + 1):
        rng = random.Random(seed + variation)
        varied += [_vary(question, names, rng) for question in questions]
    return varied


def _vary(question: str, names: list[str], rng: random.Random) -> str:
    """One question with other numbers of as many digits, and other names; 0 and 1 stay, words like "each" go with them."""
    replaced, known = {"0": "0", "1": "1"}, set(names)

    def replace(match: re.Match) -> str:
        word = match[0]
        if word not in replaced:
            low = 10 ** (len(word) - 1)
            replaced[word] = str(rng.randint(max(low, 2), 10 * low - 1)) if word.isdigit() else rng.choice(names)
        return replaced[word]

    question = re.sub(r"\d+", replace, question)
    return re.sub(r"\b[A-Z][a-z]+\b", lambda match: replace(match) if match[0] in known else match[0], question)


def _names(questions: list[str]) -> list[str]:
    """Words that stand capitalised inside sentences, several times, and never otherwise; no days and months."""
    inside = Counter(word for q in questions for word in re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{2,}\b", q))
    other = set(re.findall(r"\b[a-z]+\b", " ".join(questions))) | {
        word.lower() for word in (*calendar.day_name, *calendar.month_name)
    }
    return sorted(word for word, count in inside.items() if count >= 3 and word.lower() not in other)


def train_drafter(out: Path, seed: int) -> None:
    """Trains the drafter by the recipe `tiny` and saves it in bf16 under `out/drafter`."""
    work = out / "work"
    own = {"target": out / "target", "data": work / "answers", "output_dir": work / "drafter-checkpoints"}
    own = {key: str(path) for key, path in own.items()} | {"seed": seed, "disable_tqdm": True}
    trainer = run(read_recipe("tiny", own | arithmetic()))
    save_drafter(trainer, out / "drafter")
    history = [{key: round(float(value), 5) for key, value in row.items()} for row in trainer.state.log_history]
    (work / "drafter-log.json").write_text(json.dumps(history, indent=1))
