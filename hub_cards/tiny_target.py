"""The tiny target: a Qwen3-architecture language model of six million parameters that answers word problems.

First half of the shipped pair (`hub_cards/tiny`). Trained from scratch on GSM8K question-and-answer text (Cobbe et
al. 2021, MIT licence, Hub data set `openai/gsm8k`) with plain `transformers.Trainer`; the drafter's half is
`hub_cards/tiny_pair.py`. Rows are dictionaries with `question` and `answer`.
"""

import json
import random
import re
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


VOCAB_SIZE = 2048
WINDOW = 384
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


def pack(rows: list[dict], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Chats end to end, cut into windows of `WINDOW` tokens; every token is a label."""
    texts = [tokenizer.apply_chat_template(chat(row), tokenize=False) for row in rows]
    ids = [token for text in tokenizer(texts)["input_ids"] for token in text]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    return Dataset.from_dict({"input_ids": windows, "labels": windows})


def split(rows: list[dict], seed: int) -> tuple[list[dict], list[dict]]:
    """The rows in a seeded order: `HELD_OUT` to watch the loss on, and the rest to train on."""
    rows = random.Random(seed).sample(rows, len(rows))
    return rows[:HELD_OUT], rows[HELD_OUT:]


def train_target(rows: list[dict], out: Path, steps: int, seed: int) -> Path:
    """Trains tokenizer and target on `rows`, saves both in bf16 under `out/target` and returns that folder.

    Checkpoints lie under `out/target-checkpoints`; a killed run goes on from the last one.
    """
    set_seed(seed)
    held_out, train = split(rows, seed)
    tokenizer = train_tokenizer(train)
    model = Qwen3ForCausalLM(target_config(tokenizer))
    checkpoints = out / "target-checkpoints"
    args = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        per_device_train_batch_size=12,
        per_device_eval_batch_size=12,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.04,
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=True,
        logging_steps=50,
        eval_strategy="steps",
        eval_steps=400,
        save_steps=200,
        save_total_limit=1,
        report_to=[],
        seed=seed,
        dataloader_num_workers=0,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=pack(train, tokenizer),
        eval_dataset=pack(held_out, tokenizer),
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=any(checkpoints.glob("checkpoint-*")))
    folder = out / "target"
    model.bfloat16()
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (out / "target-log.json").write_text(json.dumps(trainer.state.log_history, indent=1))
    return folder
