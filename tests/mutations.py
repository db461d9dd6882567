"""A check of the suite itself: plants faults one by one in a copy of the repository; each must make a test fail.

    python tests/mutations.py

Prints for every fault the tests that caught it; exits with 1 if one went unnoticed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    fault: str
    file: str
    old: str
    new: str
    tests: str  # where to look for a test that fails


MUTATIONS = [
    Mutation(
        "draft tokens named by their columns",
        "modeling_xpress/vocabulary_xpress.py",
        "columns if self.ids_D is None else self.ids_D[columns]",
        "columns",
        "tests/generation/test_draft_vocabulary.py",
    ),
    Mutation(
        "slots learned behind a label that cannot be drafted",
        "trainer/blocks.py",
        "(draftable | (slots == 0)).cumprod(dim=-1).bool()",
        "(draftable | (slots == 0))",
        "tests/trainer/test_draft_tokens.py",
    ),
    Mutation(
        "labels shifted by one",
        "trainer/blocks.py",
        "at(input_ids_NS, indices), counted",
        "at(input_ids_NS, (indices + 1).clamp_max(S - 1)), counted",
        "tests/trainer/test_blocks.py",
    ),
    Mutation(
        "taps shifted by one",
        "modeling_xpress/modeling_xpress.py",
        "hidden_states[i + 1] for i in target_layer_ids",
        "hidden_states[i] for i in target_layer_ids",
        "tests/generation/test_greedy.py",
    ),
    Mutation(
        "q from the pass before the tokens'",
        "generation/jacobi_xpress.py",
        "tokens_NP, scores = readout(choose, latents)",
        "tokens_NP = readout(choose, latents)[0]",
        "tests/generation/test_sampling.py",
    ),
    Mutation(
        "causal attention inside the block",
        "modeling_xpress/modeling_xpress.py",
        "query, key, value, attention_mask, dropout",
        "query, key, value, torch.ones(B, key.shape[2], dtype=torch.bool).tril(key.shape[2] - B), dropout",
        "tests/modeling_xpress/test_modeling.py",
    ),
    Mutation(
        "the context reaches one position too far",
        "trainer/blocks.py",
        "< anchors_NA[..., None]",
        "<= anchors_NA[..., None]",
        "tests/trainer/test_blocks.py",
    ),
    Mutation(
        "the cache keeps one rejected draft",
        "generation/decoding_xpress.py",
        "self.cache.crop(kept - 1 - drafts.shape[1])",
        "self.cache.crop(min(kept - drafts.shape[1], 0))",
        "tests/generation/test_greedy.py",
    ),
    Mutation(
        "the base gets no gradient from the refined terms",
        "trainer/bounded.py",
        "                self.grad_base_QV += grad_QV\n",
        "",
        "tests/trainer/test_objective.py",
    ),
    Mutation(
        "L1's gradient without its mean",
        "trainer/bounded.py",
        "l1_weight * (1.0 + pull_Q1)",
        "l1_weight",
        "tests/trainer/test_objective.py",
    ),
    Mutation(
        "a draft that ends before an unlikely token, and not behind it",
        "generation/jacobi_xpress.py",
        "draft.confidence[0].cumprod(dim=0)[:-1]",
        "draft.confidence[0].cumprod(dim=0)[1:]",
        "tests/generation/test_confidence.py",
    ),
    Mutation(
        "a copied draft from one place too early",
        "generation/lookup_xpress.py",
        "return ids_n[start + ",
        "return ids_n[start - 1 + ",
        "tests/generation/test_lookup.py",
    ),
    Mutation(
        "anchors that no step changes",
        "trainer/xpress_trainer.py",
        "(args.seed * 1_000_003 + draw) % 2**32",
        "args.seed",
        "tests/trainer/test_trainer.py",
    ),
    Mutation(
        "the batch that was being written is not made again",
        "trainer/answers.py",
        "range(out.batches * settings.batch_size,",
        "range((out.batches + 1) * settings.batch_size if out.batches else 0,",
        "tests/trainer/test_answers.py",
    ),
    Mutation(
        "tau without the target's own token",
        "generation/evaluation_numbers.py",
        "return accepted / max(rounds, 1) + 1",
        "return accepted / max(rounds, 1)",
        "tests/test_cli_eval.py",
    ),
    Mutation(
        "the target's own token counted as accepted in Transformers' loops",
        "generation/arms.py",
        "Round(d, a - 1, 0)",
        "Round(d, a, 0)",
        "tests/generation/test_evaluation_runs.py",
    ),
    Mutation(
        "our arms are given another prompt than the rest",
        "generation/arms.py",
        "target.generate(prompt, attention_mask=torch.ones_like(prompt)",
        "target.generate(prompt[:, arm.own :], attention_mask=torch.ones_like(prompt[:, arm.own :])",
        "tests/generation/test_evaluation_runs.py",
    ),
    Mutation(
        "prompts that were trained on are measured",
        "trainer/held_out.py",
        "enumerate(asked_turns(prompts, asked), 1) if turns]",
        "enumerate(asked_turns(prompts, asked), 1) if turns and not turns]",
        "tests/test_cli_eval.py",
    ),
]


def caught_by(mutation: Mutation, folder: Path) -> list[str]:
    """The tests that fail on a copy with the fault in it."""
    copy = folder / "xpress_drafter"  # the import package is the repository's root
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    file = copy / mutation.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file} holds {mutation.old!r} {source.count(mutation.old)} times, expected once.")
    file.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=3", "-p", "no:cacheprovider", *mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return re.findall(r"^FAILED (\S+)", run.stdout, flags=re.MULTILINE)


def main() -> int:
    unnoticed = 0
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            tests = caught_by(mutation, Path(folder))
        unnoticed += not tests
        print(f"{mutation.fault}: {', '.join(tests) or 'UNNOTICED'}", flush=True)
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
