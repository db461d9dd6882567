"""Conversations to train on, from a JSONL file or a `datasets` name, checked before anything is loaded.

A row holds `messages`, `prompt`, `question` or `turns` (a list of user turns); the first of these that it has is read.
For the target's own answers its assistant messages are left out. For given answers they are kept, or an `answer` next
to a `prompt` or `question`. A row that is none of these raises a `ValueError` with its file and number: nothing is
skipped in silence.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from datasets import load_dataset


ROLES = ("system", "user", "assistant")
KEYS = ("messages", "prompt", "question", "turns")


def read_conversations(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
    given_answers: bool = False,
) -> list[list[dict]]:
    """
    The conversations of `source`, each a list of messages with `role` and `content`.

    Args:
        source (`str`): Path of a JSONL file, or a name that `datasets.load_dataset` takes.
        split, subset (`str`): Of the data set; a file has none.
        limit (`int`, *optional*): Only so many rows, the first ones.
        given_answers (`bool`): Keep the rows' own answers, up to the last one.
    """
    rows = file_rows(Path(source)) if Path(source).is_file() else dataset_rows(source, subset, split)
    conversations = [conversation_of(row, name, given_answers) for name, row in islice(rows, limit)]
    if not conversations:
        raise ValueError(f"{source} has no rows, expected at least one prompt.")
    return conversations


def file_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """Rows of a JSONL file with their names; numbers are those of the file's lines."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            name = f"{path}, row {number}"
            try:
                yield name, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name}: expected a JSON object, got {line[:60]!r}. Mend or remove the line."
                ) from error


def dataset_rows(name: str, subset: str | None, split: str) -> Iterator[tuple[str, dict]]:
    """Rows of a data set with their names; numbers count from 1, as in a file."""
    for number, row in enumerate(load_dataset(name, subset, split=split), 1):
        yield f"{name} ({split}), row {number}", row


def conversation_of(row: dict, name: str, given_answers: bool = False) -> list[dict]:
    """One row as messages that end with what is to be answered, or, with `given_answers`, with an answer."""
    key = next((key for key in KEYS if isinstance(row, dict) and row.get(key) is not None), None)
    if key is None:
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{name}: expected a key {', '.join(map(repr, KEYS))}, got {found}. Mend or remove the row.")
    if key == "messages":
        messages = _checked_messages(row["messages"], name, ROLES if given_answers else ROLES[:2])
    else:
        turns = row["turns"] if key == "turns" else [row[key]]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{name}: `turns` is {str(turns)[:60]!r}, expected a list of the user's turns.")
        messages = [_message("user", turn, f"{name}: `{key}`") for turn in turns]
        if given_answers and "answer" in row and len(messages) == 1:
            messages.append(_message("assistant", row["answer"], f"{name}: `answer`"))
    return _up_to_last("assistant" if given_answers else "user", messages, name)


def _message(role: str, content, name: str) -> dict:
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"{name} is {str(content)[:60]!r}, expected text that is not empty. Mend or remove the row.")
    return {"role": role, "content": content}


def _checked_messages(messages, name: str, kept: tuple[str, ...]) -> list[dict]:
    """The messages of the roles in `kept`, with their roles and contents alone."""
    if not isinstance(messages, list):
        raise ValueError(f"{name}: `messages` is {str(messages)[:60]!r}, expected a list of messages.")
    checked = []
    for number, message in enumerate(messages, 1):
        where = f"{name}: message {number}"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(
                f"{where} is {str(message)[:60]!r}, expected a `role` of {', '.join(ROLES)} and a `content`: "
                "mend or remove the row."
            )
        if message["role"] in kept:
            checked.append(_message(message["role"], message.get("content"), f"{where}: `content`"))
    return checked


def _up_to_last(role: str, messages: list[dict], name: str) -> list[dict]:
    """The messages up to the last one of that role, which needs something before it if it is an answer."""
    last = max((i for i, message in enumerate(messages) if message["role"] == role), default=-1)
    if last < (role == "assistant"):
        raise ValueError(
            f"{name}: the roles are {[message['role'] for message in messages]}, expected "
            + (
                "an 'assistant' after a prompt: regenerate the answers"
                if role == "assistant"
                else "a 'user' to answer"
            )
            + ", or remove the row."
        )
    return messages[: last + 1]
