"""How tokens are made: Jacobi passes, acceptance, candidate generator, decoding loop, dispatch, statistics."""

from .acceptance_xpress import verify
from .candidate_generator_xpress import XPressCandidateGenerator
from .decoding_xpress import XPressGenerateOutput, assisted_decoding
from .drafter_xpress import XPressDrafterModel, xpress_generate
from .jacobi_xpress import Draft, resolve_block, resolve_left_to_right, row_argmax
from .statistics_xpress import DraftingStatistics, track_drafting


__all__ = [
    "Draft",
    "DraftingStatistics",
    "XPressCandidateGenerator",
    "XPressDrafterModel",
    "XPressGenerateOutput",
    "assisted_decoding",
    "resolve_block",
    "resolve_left_to_right",
    "row_argmax",
    "track_drafting",
    "verify",
    "xpress_generate",
]
