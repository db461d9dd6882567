"""What the weights are: configuration, backbone, refiner. Knows nothing of decoding or training."""

from .configuration_xpress import XPressDrafterConfig, default_target_layer_ids
from .modeling_xpress import XPressModel, base_logits, context_features, embedding_fingerprint, states_to_keep
from .refiner_xpress import MarkovHead, XPressHead, previous_tokens
from .vocabulary_xpress import DraftVocabulary


__all__ = [
    "DraftVocabulary",
    "MarkovHead",
    "XPressDrafterConfig",
    "XPressHead",
    "XPressModel",
    "base_logits",
    "context_features",
    "default_target_layer_ids",
    "embedding_fingerprint",
    "previous_tokens",
    "states_to_keep",
]
