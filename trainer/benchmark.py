"""What the objective costs at a shape: the bounded form beside the dense one, seconds and peak memory in one run."""

import resource
import sys
import time
from functools import partial

import torch

from ..generation.benchmark import head_shape
from ..modeling_xpress import DraftVocabulary, XPressHead
from .arguments import XPressTrainingArguments
from .bounded import ObjectiveInputs, bounded_objective
from .objective import position_weights, xpress_objective


def objective_ways(
    vocab_size: int, hidden_size: int, rank: int, mlp_width: int, block_size: int, anchors: int, dtype: torch.dtype
) -> dict:
    """Name to function: each is one step's loss and gradients on random blocks, arithmetic in `dtype`."""
    torch.manual_seed(0)
    refiner = XPressHead(head_shape(vocab_size, hidden_size, rank, mlp_width, block_size))
    for parameter in refiner.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    head = torch.nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype).requires_grad_(False)
    M, P, defaults = anchors, block_size - 1, XPressTrainingArguments
    h_MBH = torch.randn(M, block_size, hidden_size, requires_grad=True)
    inputs = ObjectiveInputs(
        head=lambda h: head(h.to(dtype).contiguous()),
        vocabulary=DraftVocabulary(vocab_size),
        tokens_MB=torch.randint(vocab_size, (M, block_size)),
        predecessors_M=torch.randint(vocab_size, (M,)),
        teacher_states_SH=torch.randn(2 * M, hidden_size, dtype=dtype),
        teacher_index_MP=(2 * torch.arange(M)[:, None] + torch.arange(P)).clamp_max(2 * M - 1),
        weights_MP=position_weights(block_size, defaults.gamma).expand(M, P),
        num_rounds=defaults.num_rounds,
        ce_weight=defaults.ce_weight,
        lambda_c=defaults.lambda_consistency,
        lambda_b=defaults.lambda_anchor_start,
    )
    return {
        "bounded": partial(_step, bounded_objective, refiner, h_MBH, inputs, dtype),
        "dense": partial(_step, dense_objective, refiner, h_MBH, inputs, dtype),
    }


def dense_objective(refiner, h_MBH: torch.Tensor, inputs: ObjectiveInputs):
    """The formulas as they stand, differentiated by autograd."""
    M, P = inputs.weights_MP.shape
    base_MPV = inputs.head(h_MBH[:, 1:].flatten(0, 1)).view(M, P, -1)
    teacher_MPV = inputs.head(inputs.teacher_states_SH[inputs.teacher_index_MP]).float().softmax(dim=-1)
    blocks = (inputs.tokens_MB, inputs.predecessors_M, teacher_MPV, inputs.weights_MP)
    terms = xpress_objective(
        refiner, h_MBH, base_MPV, *blocks, num_rounds=inputs.num_rounds, ce_weight=inputs.ce_weight
    )
    return terms.loss(inputs.lambda_c, inputs.lambda_b), terms


def _step(objective, refiner, h_MBH, inputs: ObjectiveInputs, dtype: torch.dtype):
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss, _ = objective(refiner, h_MBH, inputs)
    loss.backward()
    h_MBH.grad = None
    refiner.zero_grad()


def measure(way, repeats: int) -> tuple[float, float]:
    """Seconds of the fastest run after a first one, and the process's peak so far in MB: it only grows."""
    way()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - start)
    return min(seconds), peak_megabytes()


def peak_megabytes() -> float:
    """The most memory that this process has held."""
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
