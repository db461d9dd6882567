"""What holds of every published drafter's folder: small, in bf16, with today's code, losslessly measured, its card its results."""

import json
from pathlib import Path

from safetensors import safe_open
from xpress_drafter.generation.drafter_xpress import code_files
from xpress_drafter.hub_cards.results import evaluated


def check_published(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 40_000_000
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert not [key for key in weights.keys() if "embed_tokens" in key or "lm_head" in key]
        dtypes = {key: weights.get_slice(key).get_dtype() for key in weights.keys()}
        assert dtypes.pop("d2t", "I64") == "I64" and set(dtypes.values()) == {"BF16"}
    for name, source in code_files().items():
        assert (folder / name).read_text(encoding="utf-8") == source, f"{name}: save the drafter again"
    card = (folder / "README.md").read_text(encoding="utf-8")
    reports = json.loads((folder / "results.json").read_text())
    assert reports and all(report["held_out"] and evaluated(report) in card for report in reports)
    exact = [report for report in reports if report["settings"]["dtype"] == "float32"]
    assert exact and all(mean["identity"]["identical"] == mean["prompts"] for mean in exact[0]["means"])
