"""The objective in bounded memory: the numbers of `xpress_objective`, a chunk of blocks at a time.

Over `[slots, V]` the objective needs base logits, the teacher's distribution and `num_rounds + 1` refined logits, each
with a gradient; autograd would keep them all. But CE and L1 have a closed-form gradient in the logits, the loss is one
fixed sum of terms, and a block needs no other block. So a chunk of blocks is carried through all terms, value and
gradient, before the next one begins. Alive at a time are, of one chunk: the base logits and their gradient, one term's
logits (which become its gradient in place), and the teacher in fp32, taken once for all terms.

Shapes: M blocks (of a chunk where so said), B slots, P = B - 1 draft slots, Q = M * P rows, V columns of draft logits (the
vocabulary, or the draft vocabulary), H hidden, R rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..generation import row_argmax
from ..modeling_xpress import DraftVocabulary, previous_tokens
from .objective import ObjectiveTerms


CHUNK = 2**23  # elements of [Q, V] carried at a time, at least one block
SLICE = 2**18  # elements of the elementwise work at a time on CPUs, so that it stays in the processor's cache


class ObjectiveInputs(NamedTuple):
    """What the objective reads besides the drafter's states; fields over all blocks of a step."""

    head: Callable[[torch.Tensor], torch.Tensor]  # the target's head: states [..., H] to draft logits [..., V]
    tokens_MB: torch.Tensor  # the data's tokens: the anchor, then the labels
    predecessors_M: torch.Tensor  # the token before each anchor
    teacher_states_SH: torch.Tensor  # the target's last states, which the head turns into its distributions
    teacher_index_MP: torch.Tensor  # the row of `teacher_states_SH` that predicts each draft slot
    weights_MP: torch.Tensor  # position weight of every slot that is learned, 0 where it is not
    num_rounds: int
    ce_weight: float
    lambda_c: float
    lambda_b: float
    vocabulary: DraftVocabulary  # what the logits' columns stand for; the teacher's distribution is over them, too

    def chunk(self, blocks: slice) -> "ObjectiveInputs":
        per_block = ("tokens_MB", "predecessors_M", "teacher_index_MP", "weights_MP")
        return self._replace(**{name: getattr(self, name)[blocks] for name in per_block})


def bounded_objective(refiner, h_MBH: torch.Tensor, inputs: ObjectiveInputs) -> tuple[torch.Tensor, ObjectiveTerms]:
    """
    The loss, a sum over slots, and its terms.

    Args:
        refiner: `XPressHead`, `MarkovHead`, or `None` (plain DFlash: only the base term, as `teacher_forced`).
        h_MBH: Normed backbone states of all slots.

    Returns:
        The weighted sum of the terms, whose gradient reaches `h_MBH` and the refiner, and the terms, detached.
    """
    parameters = [] if refiner is None else [p for p in refiner.parameters() if p.requires_grad]
    results: list[ObjectiveTerms] = []
    loss = _BoundedObjective.apply(refiner, inputs, results, h_MBH, *parameters)
    return loss, results[0]


class _BoundedObjective(torch.autograd.Function):
    """The loss is one number, so its gradients are taken along with it; backward only scales them."""

    @staticmethod
    def forward(ctx, refiner, inputs: ObjectiveInputs, results: list, h_MBH, *parameters):
        M, P = inputs.weights_MP.shape
        V = inputs.head(h_MBH[:1, 0]).shape[-1]
        grads = {p: torch.zeros_like(p) for p in parameters} if any(ctx.needs_input_grad) else None
        grad_h, chunks = [], []
        for blocks in _slices(M, CHUNK // (P * V)):
            chunk = _Chunk(refiner, h_MBH[blocks], inputs.chunk(blocks), grads)
            chunks.append(chunk.terms())
            if grads is not None:
                grad_h.append(chunk.backward())
        results.append(_total(chunks))
        if grads is not None:
            ctx.save_for_backward(torch.cat(grad_h), *grads.values())
        return results[0].loss(inputs.lambda_c, inputs.lambda_b)

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, *(saved * grad for saved in ctx.saved_tensors)


class _Chunk:
    """Some blocks: the values of their terms, then the gradients that the terms left behind."""

    def __init__(self, refiner, h_MBH: torch.Tensor, inputs: ObjectiveInputs, grads: dict | None):
        self.refiner, self.inputs, self.grads = refiner, inputs, grads
        self.h_MBH = h_MBH.detach().requires_grad_(grads is not None)
        with torch.set_grad_enabled(grads is not None):
            self.base_QV = inputs.head(self.h_MBH[:, 1:]).flatten(0, 1)
        self.grad_base_QV: torch.Tensor | None = None
        positions_U, self.teacher_row_Q = inputs.teacher_index_MP.flatten().unique(return_inverse=True)
        self.teacher_UV = inputs.head(inputs.teacher_states_SH[positions_U]).float().softmax(dim=-1)
        self.latents, self.latent_grads, self.lookups = [], [], []

    def terms(self) -> ObjectiveTerms:
        inputs, base_QV = self.inputs, self.base_QV.detach()
        zero, weight = torch.zeros((), device=base_QV.device), inputs.weights_MP.sum()
        if self.refiner is None:
            value, guess, self.grad_base_QV = self.choose_and_differentiate_(base_QV.clone(), 1.0)
            return ObjectiveTerms(value, zero, zero, weight, [guess])
        anchor, guess, self.grad_base_QV = self.choose_and_differentiate_(base_QV.clone(), inputs.lambda_b)
        with torch.set_grad_enabled(self.grads is not None):
            block_MBR = self.refiner.begin_block(self.h_MBH)
        teacher_forced, _ = self.refined_term(block_MBR, inputs.tokens_MB[:, 1:], 1.0)
        guesses, consistency = [guess], zero
        for _ in range(inputs.num_rounds):
            value, guess = self.refined_term(block_MBR, guesses[-1], inputs.lambda_c / inputs.num_rounds)
            consistency = consistency + value / inputs.num_rounds
            guesses.append(guess)
        return ObjectiveTerms(teacher_forced, consistency, anchor, weight, guesses)

    def refined_term(self, block_MBR, tokens_MP, coefficient: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and guesses of the logits refined by these tokens; their gradient goes to latents, readout and base."""
        inputs, w2 = self.inputs, self.refiner.w2.weight
        prev_MB = previous_tokens(inputs.predecessors_M, inputs.tokens_MB[:, 0], tokens_MP)
        with torch.set_grad_enabled(self.grads is not None):
            embedded_MBR = self.refiner.w1(prev_MB).detach().requires_grad_(self.grads is not None)
            latents_QR = self.refiner.mix_tokens(block_MBR, embedded_MBR)[:, 1:].flatten(0, 1)
        with torch.autocast(latents_QR.device.type, enabled=False):
            x_QR, base_QV = latents_QR.detach(), self.base_QV.detach()
            w2_VR = w2.detach().to(x_QR.dtype)
            bias_QV = torch.mm(x_QR, w2_VR.T)
            logits_QV = bias_QV.add_(base_QV) if bias_QV.dtype == base_QV.dtype else bias_QV + base_QV
            value, guess, grad_QV = self.choose_and_differentiate_(logits_QV, coefficient)
            if self.grads is not None:
                self.grad_base_QV += grad_QV
                self.latents.append(latents_QR)
                self.latent_grads.append(torch.mm(grad_QV, w2_VR))
                self.lookups.append((prev_MB, embedded_MBR))
                if w2 in self.grads:
                    self.grads[w2] += torch.mm(grad_QV.T, x_QR)
        return value, guess

    def choose_and_differentiate_(self, logits_QV, coefficient: float):
        """Summed loss, arg-max tokens `[M, P]`, and the logits overwritten with the gradient of coefficient * loss."""
        vocabulary, weights_MP = self.inputs.vocabulary, self.inputs.weights_MP
        labels_Q, _ = vocabulary.columns(self.inputs.tokens_MB[:, 1:].flatten())
        guess_Q, weights_Q = row_argmax(logits_QV), weights_MP.flatten()
        loss_Q = torch.empty_like(weights_Q)
        Q, V = logits_QV.shape
        for rows in _slices(Q, SLICE // V if logits_QV.device.type == "cpu" else Q):
            teacher_QV = self.teacher_UV[self.teacher_row_Q[rows]]
            loss_Q[rows] = slot_loss_and_gradient_(
                logits_QV[rows],
                guess_Q[rows],
                labels_Q[rows],
                teacher_QV,
                self.inputs.ce_weight,
                coefficient * weights_Q[rows],
            )
        return (loss_Q * weights_Q).sum(), vocabulary.tokens(guess_Q).view(weights_MP.shape), logits_QV

    def backward(self) -> torch.Tensor:
        """Carries the logits' and latents' gradients on to the refiner's parameters; returns that of the states."""
        w1, w2 = (None, None) if self.refiner is None else (self.refiner.w1.weight, self.refiner.w2.weight)
        inner = [p for p in self.grads if p is not w1 and p is not w2]
        embedded = [embedded_MBR for _, embedded_MBR in self.lookups]
        found = torch.autograd.grad(
            [self.base_QV, *self.latents], [self.h_MBH, *inner, *embedded], [self.grad_base_QV, *self.latent_grads]
        )
        for parameter, grad in zip(inner, found[1:]):
            self.grads[parameter] += grad
        if w1 in self.grads:  # dense, so that rows are added up once, not a whole table for every lookup
            for (prev_MB, _), grad_MBR in zip(self.lookups, found[1 + len(inner) :]):
                self.grads[w1].index_add_(0, prev_MB.flatten(), grad_MBR.flatten(0, 1).to(w1.dtype))
        return found[0]


def slot_loss_and_gradient_(logits_QV, best_Q, labels_Q, teacher_QV, ce_weight: float, scale_Q) -> torch.Tensor:
    """
    `slot_loss` of some rows `[Q]`, in fp32; the logits are overwritten with `scale` times its gradient.

    d CE / d logits = q - onehot; d L1 / d logits = q * (s - sum_v q s) with s = sign(q - p). Both sums over the
    vocabulary come from q where it exceeds p (else 0), called excess: q s = 2 * excess - q, and
    sum_v |q - p| = 2 - 2 * sum_v min(p, q). `best_Q` are the rows' arg-maxima, from which CE's log-sum is read off.
    """
    l1_weight, best_Q1, labels_Q1, scale_Q1 = 1.0 - ce_weight, best_Q[:, None], labels_Q[:, None], scale_Q[:, None]
    q_QV = logits_QV.softmax(dim=-1, dtype=torch.float32)
    log_sum_Q1 = logits_QV.gather(1, best_Q1) - q_QV.gather(1, best_Q1).log()
    ce_Q1 = log_sum_Q1 - logits_QV.gather(1, labels_Q1)
    l1_Q = 2.0 - 2.0 * torch.minimum(q_QV, teacher_QV).sum(dim=-1)
    excess_QV = torch.where(q_QV > teacher_QV, q_QV, 0.0)
    pull_Q1 = 2.0 * excess_QV.sum(dim=-1, keepdim=True) - 1.0
    q_QV *= (ce_weight - l1_weight * (1.0 + pull_Q1)) * scale_Q1
    torch.addcmul(q_QV, excess_QV, 2.0 * l1_weight * scale_Q1, out=q_QV)
    q_QV.scatter_add_(1, labels_Q1, -ce_weight * scale_Q1)
    logits_QV.copy_(q_QV)
    return ce_weight * ce_Q1.squeeze(1) + l1_weight * l1_Q


def _slices(total: int, size: int) -> list[slice]:
    size = max(size, 1)
    return [slice(start, min(start + size, total)) for start in range(0, max(total, 1), size)]


def _total(chunks: list[ObjectiveTerms]) -> ObjectiveTerms:
    sums = (torch.stack(values).sum() for values in list(zip(*chunks))[:4])
    return ObjectiveTerms(*sums, [torch.cat(parts) for parts in zip(*(chunk.guesses for chunk in chunks))])
