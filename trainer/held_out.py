"""That nobody is measured on what was trained on, be it asked in another frame (`asked.py` says what is the same).

`xpress data` keeps hashes of all user turns that a folder's rows were made from, and leaves out conversations that ask a
prompt of given sets; `xpress eval` refuses prompts that a folder's turns ask. Both look for a prompt as it is given and
bare, without its set's instruction; 13-grams that all prompts of a set share do not count.
"""

from collections.abc import Iterator
from pathlib import Path

from ..generation.prompt_sets import HUB_SETS, Prompts, hub_prompts
from .answers import user_turns
from .asked import Asked, gram_hashes, turn_hash, turns_of, without_frame
from .prompts import read_conversations
from .row_folder import read_manifest


def read_sets(sources: list[str], limit: int | None = None) -> dict[str, Prompts]:
    """Prompt sets by name, from JSONL files and names of the Hub's, each prompt as the messages of its first turn."""
    sets = {}
    for source in sources:
        path = Path(source)
        name = path.stem if path.is_file() else source
        if name in sets:
            raise ValueError(f"two prompt sets are named {name!r} (a file's name without .jsonl), expected one each.")
        if path.is_file():
            sets[name] = file_prompts(path, limit)
        elif source in HUB_SETS:
            sets[name] = hub_prompts(source, limit)
        else:
            raise ValueError(
                f"{source!r} is neither a file nor a known set, expected a JSONL file or one of {', '.join(HUB_SETS)}."
            )
    return sets


def file_prompts(path: Path, limit: int | None) -> Prompts:
    """The set that a file is; bare is what its prompts do not all begin or end with."""
    messages = [user_turns(conversation)[0] for conversation in read_conversations(str(path), limit=limit)]
    return Prompts(path.name, messages, without_frame([turns_of(prompt)[0] for prompt in messages]))


def asked_turns(prompts: Prompts, asked: Asked) -> Iterator[set[str]]:
    """Of every prompt, the hashes of the turns that ask it."""
    worded = [turns_of(messages)[0] for messages in prompts.messages]
    frame = set.intersection(*map(gram_hashes, worded)) if len({*map(turn_hash, worded)}) > 1 else set()
    for texts in zip(worded, prompts.bare):
        yield set.union(*(asked.holding(text, frame) for text in texts if text))


def asking(conversations: list[list[dict]], sets: dict[str, Prompts]) -> set[int]:
    """The places of the conversations that ask a prompt of `sets`."""
    asked = Asked.of(conversations)
    turns = {turn for prompts in sets.values() for found in asked_turns(prompts, asked) for turn in found}
    return {i for i, messages in enumerate(conversations) if turns.intersection(map(turn_hash, turns_of(messages)))}


def check_untrained(sets: dict[str, Prompts], folders: list[str]) -> list[dict]:
    """Raises for a prompt that a folder's rows were asked; returns what each folder was made from."""
    checked = []
    for folder in map(Path, folders):
        made = read_manifest(folder)["settings"]["prompts_sha256"]
        asked = Asked.load(folder)
        for name, prompts in sets.items():
            if known := [number for number, turns in enumerate(asked_turns(prompts, asked), 1) if turns]:
                raise ValueError(
                    f"{len(known)} of the {len(prompts.messages)} prompts of {name} are asked in the rows of {folder}, expected "
                    f"none: prompts {known[:10]}. Make the rows without them (`xpress data --exclude`) and train again, or "
                    "leave them out."
                )
        counts = {"turns": len(asked.turns), "grams": len(asked.grams)}
        checked.append({"rows": folder.name, **counts, "prompts_sha256": made})
    return checked
