"""Every drafter in the repository, and the shipped pair's cards; `test_cli_card.py` checks a drafter that it makes."""

import json
import re
import shutil
from pathlib import Path

import pytest
from published import check_published
from xpress_drafter import XPressDrafterModel
from xpress_drafter.cli import TINY
from xpress_drafter.hub_cards.cards import write_tiny_cards


@pytest.mark.parametrize(
    "folder", sorted((Path(__file__).parents[2] / "hub_cards").glob("xpress-*")), ids=lambda folder: folder.name
)
def test_a_published_folder(folder):
    check_published(folder)


def test_the_tiny_cards_are_what_today_s_code_makes_of_the_logs(tmp_path):
    """All but the line on where it was measured, which no file holds."""
    (tmp_path / "target").mkdir()
    shutil.copytree(TINY / "drafter", tmp_path / "drafter", ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    shutil.copy(TINY / "log.json", tmp_path)
    (measured_on,) = re.findall(
        r"^The first 20 questions of .*", (TINY / "drafter" / "README.md").read_text(), re.MULTILINE
    )
    parameters = XPressDrafterModel.from_pretrained(TINY / "drafter").num_parameters()
    write_tiny_cards(tmp_path, json.loads((TINY / "measured.json").read_text()), parameters, measured_on)
    for name in ("drafter/README.md", "target/README.md", "measured.json"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (TINY / name).read_text(encoding="utf-8"), name
