"""Which draft tokens the target keeps, as pure functions of tensors.

Greedy keeps a token while it is the target's arg-max. Sampling keeps token x with probability min(1, p(x) / q(x)) and
draws the first rejected slot anew from max(p - q, 0), which leaves exactly p (Leviathan et al. 2023, algorithm 1;
Chen et al. 2023). Either way the round ends with one token of the target's own: the correction, or the bonus.

Shapes: P draft tokens, T rows of target scores (T = P + 1 with the bonus row, T = P without), V vocabulary.
"""

import torch


def verify(draft_P: torch.Tensor, draft_scores_PV: torch.Tensor | None, scores_TV: torch.Tensor, sample: bool) -> list:
    """
    The round's tokens: the accepted drafts, then the target's own token at the first row that rejects (or the bonus).

    Args:
        draft_P: Draft tokens.
        draft_scores_PV: The scores they were drawn from (softmax is q); `None`: they are arg-maxima, q is one-hot.
        scores_TV: The target's processed scores, fp32; row i judges draft i.
        sample: Sample from the target; arg-max otherwise.

    Returns:
        Token ids, at least one and at most T. With T = P and every draft accepted, there is no further token.
    """
    P, T = draft_P.shape[0], scores_TV.shape[0]
    if not sample:
        own_T = scores_TV.argmax(dim=-1)
        accepted = leading_true(draft_P == own_T[:P])
        return own_T[: min(accepted + 1, T)].tolist()
    p_TV = scores_TV.softmax(dim=-1)
    q_PV = proposal(draft_P, draft_scores_PV, p_TV)
    accepted = leading_true(accept_sampled(draft_P, q_PV, p_TV[:P], torch.rand(P, device=p_TV.device)))
    tokens = draft_P[:accepted].tolist()
    if accepted < T:
        p_V = p_TV[accepted] if accepted == P else residual(p_TV[accepted], q_PV[accepted])
        tokens.append(int(torch.multinomial(p_V, 1)))
    return tokens


def leading_true(flags_P: torch.Tensor) -> int:
    """How many of the first flags hold without a gap."""
    return int(flags_P.long().cumprod(dim=0).sum())


def proposal(draft_P: torch.Tensor, draft_scores_PV: torch.Tensor | None, p_TV: torch.Tensor) -> torch.Tensor:
    """q of every draft slot `[P, V]`: one-hot for arg-max drafts; all zero where the drafter gave no distribution.

    A row that is not finite (a broken drafter) proposes nothing: it is rejected and its residual is p.
    """
    if draft_scores_PV is None:
        return torch.zeros_like(p_TV[: draft_P.shape[0]]).scatter_(1, draft_P[:, None], 1.0)
    q_PV = draft_scores_PV.to(p_TV.device).softmax(dim=-1)
    return torch.where(q_PV.isfinite().all(dim=-1, keepdim=True), q_PV, 0.0)


def accept_sampled(draft_P: torch.Tensor, q_PV: torch.Tensor, p_PV: torch.Tensor, u_P: torch.Tensor) -> torch.Tensor:
    """Whether each draft is kept, `u < p(x) / q(x)`, given uniform draws u. A token of q = 0 is never kept."""
    q_P = q_PV.gather(1, draft_P[:, None]).squeeze(1)
    p_P = p_PV.gather(1, draft_P[:, None]).squeeze(1)
    return (u_P * q_P < p_P) & (q_P > 0)


def residual(p_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    """`max(p - q, 0)`, unnormalised. Where rounding leaves nothing (p = q, which never rejects), p itself."""
    rest = (p_V - q_V).clamp_min(0)
    return torch.where(rest.sum() > 0, rest, p_V)
