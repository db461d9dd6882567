"""The tiny target: a Qwen3-architecture language model of six million parameters that answers word problems.

First half of the shipped pair (`hub_cards/tiny`). Trained from scratch on GSM8K question-and-answer text (Cobbe et
al. 2021, MIT licence, Hub data set `openai/gsm8k`) in a plain loop; the drafter's half is
`tiny_pair.py`. Rows are dictionaries with `question` and `answer`.
"""

import json
import math
import random
import re
import time
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .bfloat16 import multiplies_bf16
from .optimizer import MuonAdamW


VOCAB_SIZE = 2048
WINDOW = 384
BATCH = 4
HELD_OUT = 200  # of the training questions, to watch the loss; the test questions are never read here

PAD, USER, ASSISTANT, END, MASK = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}" + END + "{% else %}" + ASSISTANT +
    "{% generation %}{{ message['content'] }}" + END + "{% endgeneration %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)  # fmt: skip


def read_rows(path: str | Path) -> list[dict]:
    """Reads a GSM8K JSONL file; the calculator annotations (`<<48/2=24>>`) are taken out of the answers."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if not {"question", "answer"} <= row.keys():
            raise ValueError(
                f"{path}, row {number}: expected the keys 'question' and 'answer' (GSM8K's own), got {sorted(row)}."
            )
    return [
        {"question": row["question"].strip(), "answer": re.sub(r"<<[^>]*>>", "", row["answer"]).strip()}
        for row in rows
    ]


def chat(row: dict) -> list[dict]:
    """One question and its answer as chat messages."""
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]


def train_tokenizer(rows: list[dict]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB_SIZE` tokens with one token per digit, and the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, USER, ASSISTANT, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in rows for text in row.values()), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, mask_token=MASK, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def target_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Ten thin layers: as with real targets, much deeper than the drafter that will serve it."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=448,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def pack(rows: list[dict], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Chats end to end, cut into windows of `WINDOW` tokens `[windows, WINDOW]`; every token is a label."""
    texts = [tokenizer.apply_chat_template(chat(row), tokenize=False) for row in rows]
    ids = torch.tensor([token for text in tokenizer(texts)["input_ids"] for token in text])
    return ids[: len(ids) - len(ids) % WINDOW].view(-1, WINDOW)


def split(rows: list[dict], seed: int) -> tuple[list[dict], list[dict]]:
    """The rows in a seeded order: `HELD_OUT` to watch the loss on, and the rest to train on."""
    rows = random.Random(seed).sample(rows, len(rows))
    return rows[:HELD_OUT], rows[HELD_OUT:]


def learning_rate_factor(step: int, steps: int) -> float:
    """Cosine after warm-up."""
    return min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def language_loss(model: Qwen3ForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bf16()):
        return model(input_ids=windows, labels=windows).loss


def train_target(rows: list[dict], out: Path, steps: int, seed: int) -> None:
    """
    Trains tokenizer and target on `rows`, saves both in bf16 under `out/target`.

    `out/work/target-checkpoint.pt` is written every 200 steps; a killed run goes on from it, with the same batches.
    """
    torch.manual_seed(seed)
    held_out, train = split(rows, seed)
    tokenizer = train_tokenizer(train)
    model = Qwen3ForCausalLM(target_config(tokenizer))
    windows, watched = pack(train, tokenizer), pack(held_out, tokenizer)
    checkpoint, log, first = out / "work" / "target-checkpoint.pt", [], 0
    optimizer = MuonAdamW(model.named_parameters(), muon_lr=0.02, adamw_lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_factor, steps=steps))
    parts = [model, optimizer, scheduler]
    if checkpoint.exists():
        state = torch.load(checkpoint)
        first, log = state["step"], state["log"]
        for part, saved in zip(parts, state["parts"]):
            part.load_state_dict(saved)
    start, losses = time.perf_counter(), []
    for step in range(first, steps):
        picks = torch.randint(len(windows), (BATCH,), generator=torch.Generator().manual_seed(seed * 10**6 + step))
        loss = language_loss(model, windows[picks])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if (step + 1) % 200 == 0 or step + 1 == steps:
            with torch.no_grad():
                held_out_loss = sum(language_loss(model, batch).item() for batch in watched.split(16)[:-1])
            log.append(
                {
                    "step": step + 1,
                    "loss": round(sum(losses) / len(losses), 4),
                    "held_out_loss": round(held_out_loss / (len(watched.split(16)) - 1), 4),
                    "seconds": round(time.perf_counter() - start),
                }
            )
            print(log[-1], flush=True)
            losses = []
            torch.save({"step": step + 1, "log": log, "parts": [part.state_dict() for part in parts]}, checkpoint)
    folder = out / "target"
    model.bfloat16()
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    (out / "work" / "target-log.json").write_text(json.dumps(log, indent=1))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
