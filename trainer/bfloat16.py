"""Whether a device multiplies in bf16. CPUs without instructions for it (AVX2 alone) emulate it, dozens of times slower."""

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)


def multiplies_bf16(device: str | torch.device = "cpu") -> bool:
    """Whether products in bf16 are of use on `device`: on any accelerator, and on CPUs for which oneDNN has them."""
    if torch.device(device).type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def warn_of_slow_bf16(setting: str, remedy: str, device: str | torch.device = "cpu") -> None:
    """Warns where `setting` asks for bf16 of a CPU that has no instructions for it; `remedy` is what to set instead."""
    if not multiplies_bf16(device):
        logger.warning_once(
            f"{setting} on a CPU without bf16 instructions ({torch.backends.cpu.get_cpu_capability()}), where products in "
            f"bf16 take ten times as long as in float32, and more: set {remedy}."
        )
