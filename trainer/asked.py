"""What was asked, in hashes: `turns.txt` has one of every user turn, a line each, and `turns.npz` those of its 13-grams.

A hash knows a text again whatever its case and white space. Its 13-grams (words in a row, without case and punctuation)
know it in another frame too, such as a set's instruction before or behind the question: a turn holds a text if it has
more than half of the text's 13-grams. A text of fewer words has none and is known by its hash alone. No word can be read
from either file; the second takes 12 bytes a word.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


TURNS, GRAMS = "turns.txt", "turns.npz"
GRAM_WORDS = 13


@dataclass
class Asked:
    """
    The user turns of some conversations.

    Args:
        turns (`list[str]`): The hash of every turn, each once.
        grams (`np.ndarray`), owners (`np.ndarray`): The hash of every 13-gram of every turn, in rising order, and whose it
            is, as a place in `turns`.
    """

    turns: list[str]
    grams: np.ndarray
    owners: np.ndarray

    def __post_init__(self):
        self.known = set(self.turns)

    @classmethod
    def of(cls, conversations: Iterable[list[dict]]) -> "Asked":
        texts = {turn_hash(turn): turn for messages in conversations for turn in turns_of(messages)}
        parts = [np.fromiter(gram_hashes(text), np.uint64) for text in texts.values()]
        grams = np.concatenate([np.empty(0, np.uint64), *parts])
        owners = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
        order = np.lexsort((owners, grams))
        return cls(list(texts), grams[order], owners[order])

    @classmethod
    def load(cls, folder: Path) -> "Asked":
        if lacking := [name for name in (TURNS, GRAMS) if not (folder / name).exists()]:
            raise ValueError(
                f"{folder} holds no {' and no '.join(lacking)}, expected the hashes of what its rows were made from: run the "
                "same `xpress data` again, which writes them."
            )
        with np.load(folder / GRAMS) as arrays:
            return cls((folder / TURNS).read_text(encoding="utf-8").split(), arrays["grams"], arrays["owners"])

    def save(self, folder: Path) -> None:
        """Each file whole or not at all."""
        new = {name: folder / f"{name}.new" for name in (GRAMS, TURNS)}
        with new[GRAMS].open("wb") as file:
            np.savez(file, grams=self.grams, owners=self.owners)
        new[TURNS].write_text("".join(f"{turn}\n" for turn in self.turns), encoding="utf-8")
        for name, file in new.items():
            file.replace(folder / name)

    def holding(self, text: str, frame: set[int]) -> set[str]:
        """The hashes of the turns that are or hold `text`; the 13-grams of `frame` do not count."""
        own = gram_hashes(text) - frame
        values = np.array(sorted(own), dtype=np.uint64)
        first, last = (np.searchsorted(self.grams, values, side) for side in ("left", "right"))
        shared = Counter(owner for start, end in zip(first, last) for owner in self.owners[start:end].tolist())
        holding = {self.turns[owner] for owner, count in shared.items() if 2 * count > len(own)}
        return holding | {turn_hash(text)} & self.known


def turns_of(messages: list[dict]) -> list[str]:
    """What the user says."""
    return [message["content"] for message in messages if message["role"] == "user"]


def turn_hash(text: str) -> str:
    """The same whatever case and white space."""
    return hashlib.sha256(" ".join(text.split()).casefold().encode()).hexdigest()


def gram_hashes(text: str) -> set[int]:
    """Of every 13 words in a row, 8 bytes each."""
    words = re.findall(r"\w+", text.casefold())
    grams = {" ".join(words[start : start + GRAM_WORDS]) for start in range(len(words) - GRAM_WORDS + 1)}
    return {int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big") for gram in grams}


def without_frame(texts: list[str]) -> list[str]:
    """The texts without the words that all of them begin with or end with."""
    words = [text.split() for text in texts]
    if len(set(map(tuple, words))) < 2:
        return texts
    shortest = min(map(len, words))
    before = next((i for i in range(shortest) if len({each[i] for each in words}) > 1), shortest)
    left = [each[before:] for each in words]
    shortest = min(map(len, left))
    behind = next((i for i in range(shortest) if len({each[-1 - i] for each in left}) > 1), shortest)
    return [" ".join(each[: len(each) - behind]) for each in left]
