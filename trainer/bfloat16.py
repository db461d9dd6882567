"""
Whether a device multiplies in bf16. What has no instructions for it emulates them: a CPU with AVX2 alone took 4 times as
long as in float32 for a model's forward, and up to 120 times for one product (`NOTES.md`, 2026-11-30).
"""

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)


def multiplies_bf16(device: str | torch.device = "cpu") -> bool:
    """Whether `device` has bf16 products of its own: NVIDIA's from Ampere on, CPUs for which oneDNN has them, and the rest."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def quick_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """What to compute in on `device` where rounding is of no concern: bf16 where it multiplies in it, else float32."""
    return torch.bfloat16 if multiplies_bf16(device) else torch.float32


def warn_of_slow_bf16(setting: str, remedy: str, device: str | torch.device = "cpu") -> None:
    """Warns where `setting` asks for bf16 of a device that has no instructions for it; `remedy` is what to set instead."""
    if not multiplies_bf16(device):
        kind = torch.device(device).type
        name = torch.cuda.get_device_name() if kind == "cuda" else torch.backends.cpu.get_cpu_capability()
        logger.warning_once(
            f"{setting} on a device without bf16 instructions ({kind}, {name}), which emulates them: on a CPU with AVX2 a "
            f"model took 4 times as long as in float32, and single products up to 120 times. Set {remedy}."
        )
