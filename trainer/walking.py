"""Tau as `generate` reaches it, from the training path: rounds walked over given answers, each behind the last one's tokens.

`eval_tau` is of evenly spread anchors; the rounds of a run begin where a draft failed, on harder ones. Walks are of whole
blocks, as with a `confidence_threshold` of 0.

Shapes: S tokens of a row, M anchors at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from ..generation import XPressDrafterModel
from ..generation.pairing_xpress import check_options
from .answers import load_tokenizer
from .arguments import XPressTrainingArguments
from .drafting import draft_blocks, own_draft
from .metrics import kept
from .row_folder import check_rows_are_of, load_rows
from .wrapping import bare_drafter, inside_forward
from .xpress_trainer import XPressTrainer


logger = logging.get_logger(__name__)

ANCHORS = 32  # of a row, drafted from at a time


@torch.no_grad()
def walked_tau(trainer: XPressTrainer, rows: Iterable[dict], passes: Sequence[int | None]) -> dict[int | None, float]:
    """
    Tau (accepted + 1) of the rounds in which `generate` would write the rows' supervised spans, for every number of Jacobi
    passes; exact where the spans are the target's own greedy answers. Every process walks all rows.

    Args:
        trainer: Of the drafter and its target.
        rows: Rows of `input_ids` and `loss_mask`.
        passes: Numbers of passes; `None` for the drafter's own way.
    """
    for number in passes:
        check_options(bare_drafter(trainer.model), number)
    accepted, rounds = dict.fromkeys(passes, 0), dict.fromkeys(passes, 0)
    training = trainer.model.training
    trainer.model.eval()
    for row in rows:
        batch = trainer._prepare_inputs(trainer.data_collator([row]))
        for number, accepted_S in accepted_everywhere(trainer, batch, passes).items():
            for start, end in spans(batch["loss_mask"][0].tolist()):
                kept_in_rounds = walk(accepted_S, start, end)
                accepted[number] += sum(kept_in_rounds)
                rounds[number] += len(kept_in_rounds)
    trainer.model.train(training)
    return {number: accepted[number] / rounds[number] + 1 for number in passes}


class Walk(NamedTuple):
    rows: str  # folder
    count: int  # of rows
    made_from: str  # their prompts' hash
    tau: dict[int | None, float]  # by number of passes; None for the drafter's own way


def walk_folders(
    folders: Sequence[Path],
    target: str,
    drafter: XPressDrafterModel,
    passes: Sequence[int | None],
    limit: int | None = None,
    dtype: str = "float32",
) -> Iterator[Walk]:
    """
    `walked_tau` of every folder's rows, one folder after the other, for a target's name or folder. Of more than `limit` rows so
    many are taken, evenly spread, as rows lie in the order of their prompts' lengths.
    """
    parts = [load_rows(folder) for folder in folders]
    for folder, (_, manifest) in zip(folders, parts):
        if manifest["settings"]["answers"] != "regenerated" or manifest["settings"]["temperature"] > 0:
            raise ValueError(
                f"the rows of {folder} are not the target's greedy answers, expected those: make them by `xpress data` with "
                "`--temperature 0` and without `--answers given`, or measure with `xpress eval`."
            )
    tokenizer = load_tokenizer(target, None)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    for folder, (_, manifest) in zip(folders, parts):
        check_rows_are_of(str(folder), manifest, target, dtype, tokenizer, model)
        if (answered := manifest["settings"]["dtype"]) != dtype:
            logger.warning(
                f"The rows of {folder} were answered in {answered} and are walked in {dtype}: where the target's two best logits "
                "are within rounding of each other, `generate` would write another text."
            )
    with TemporaryDirectory() as nothing:
        args = XPressTrainingArguments(nothing, report_to="none", bf16=dtype == "bfloat16")
        for folder, (rows, manifest) in zip(folders, parts):
            count = len(rows) if limit is None else min(limit, len(rows))
            chosen = rows.select([i * len(rows) // count for i in range(count)])
            trainer = XPressTrainer(drafter, model, args, train_dataset=chosen)
            made_from = manifest["settings"]["prompts_sha256"]
            yield Walk(str(folder), len(chosen), made_from, walked_tau(trainer, chosen, passes))


def accepted_everywhere(
    trainer: XPressTrainer, batch: dict, passes: Sequence[int | None]
) -> dict[int | None, list[int]]:
    """How many draft tokens would be kept of a block at every position of one row; 0 where no block can begin."""
    mask_S = batch["loss_mask"][0]
    features, states = trainer.read_target(batch)
    found = {number: torch.zeros(len(mask_S), dtype=torch.long, device=mask_S.device) for number in passes}
    for anchors_M in (mask_S[:-1] & mask_S[1:]).nonzero().flatten().split(ANCHORS):
        batch["anchors"], batch["anchor_valid"] = anchors_M[None], torch.ones_like(anchors_M[None], dtype=torch.bool)
        blocks = trainer.cut_blocks(batch)
        inputs = trainer.objective_inputs(blocks, features.dtype, states)

        def draft(drafter, blocks=blocks, inputs=inputs):
            h_MBH = draft_blocks(drafter, trainer.target, features, blocks, batch["attention_mask"])[0]
            return [own_draft(drafter, h_MBH, inputs, number) for number in passes]

        with trainer.accelerator.autocast():
            drafts = inside_forward(trainer.model_wrapped, draft)
        for number, tokens_MP in zip(passes, drafts):
            found[number][anchors_M] = kept(tokens_MP, inputs.tokens_MB[:, 1:], blocks.counted[0, :, 1:]).sum(dim=-1)
    return {number: accepted_S.tolist() for number, accepted_S in found.items()}


def spans(mask: list[bool]) -> list[tuple[int, int]]:
    """First and last position of every run of True."""
    edges = [position for position, (before, here) in enumerate(zip([False, *mask], [*mask, False])) if before != here]
    return [(start, end - 1) for start, end in zip(edges[::2], edges[1::2])]


def walk(accepted_S: list[int], start: int, end: int) -> list[int]:
    """What every round keeps on the way from `start`, which the prompt's forward gives, to the text's last token at `end`,
    which is the target's own however good the draft is."""
    rounds, anchor = [], start
    while anchor < end:
        rounds.append(min(accepted_S[anchor], end - anchor - 1))
        anchor += rounds[-1] + 1
    return rounds
