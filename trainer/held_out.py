"""That nobody is measured on what was trained on: user turns are told apart by hash, whatever their case and white space.

`xpress data` keeps the hashes of all user turns that a folder's rows were made from (`turns.txt`, one a line), and leaves
out conversations with a turn of given prompt sets; `xpress eval` refuses prompts that are among a folder's turns.
"""

from pathlib import Path

from ..generation.prompt_sets import HUB_SETS, hub_prompts
from .answers import user_turns
from .prompts import read_conversations
from .row_folder import TURNS, read_manifest, turn_hashes


def read_sets(sources: list[str], limit: int | None = None) -> dict[str, list[list[dict]]]:
    """Prompt sets by name, from JSONL files and names of the Hub's, each prompt as the messages of its first turn."""
    sets = {}
    for source in sources:
        path = Path(source)
        name = path.stem if path.is_file() else source
        if name in sets:
            raise ValueError(f"two prompt sets are named {name!r} (a file's name without .jsonl), expected one each.")
        if path.is_file():
            sets[name] = [user_turns(messages)[0] for messages in read_conversations(source, limit=limit)]
        elif source in HUB_SETS:
            sets[name] = hub_prompts(source, limit)
        else:
            raise ValueError(
                f"{source!r} is neither a file nor a known set, expected a JSONL file or one of {', '.join(HUB_SETS)}."
            )
    return sets


def leave_out(conversations: list[list[dict]], sets: dict[str, list[list[dict]]]) -> list[list[dict]]:
    """The conversations that share no user turn with the prompts of `sets`."""
    held_out = turn_hashes(prompt for prompts in sets.values() for prompt in prompts)
    return [messages for messages in conversations if not turn_hashes([messages]) & held_out]


def check_untrained(sets: dict[str, list[list[dict]]], folders: list[str]) -> list[dict]:
    """Raises for a prompt that is among the user turns of a folder's rows; returns what each folder was made from."""
    checked = []
    for folder in map(Path, folders):
        made = read_manifest(folder)["settings"]["prompts_sha256"]
        if not (folder / TURNS).exists():
            raise ValueError(
                f"{folder} holds no {TURNS}, expected the hashes of what its rows were made from: run the same `xpress data` "
                "again, which writes it."
            )
        trained = set((folder / TURNS).read_text(encoding="utf-8").split())
        for name, prompts in sets.items():
            if known := [number for number, prompt in enumerate(prompts, 1) if turn_hashes([prompt]) & trained]:
                raise ValueError(
                    f"{len(known)} of the {len(prompts)} prompts of {name} are user turns of {folder}, expected none: prompts "
                    f"{known[:10]}. Make the rows without them (`xpress data --exclude`) and train again, or leave them out."
                )
        checked.append({"rows": folder.name, "turns": len(trained), "prompts_sha256": made})
    return checked
