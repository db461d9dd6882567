"""A cache that grows by many positions at a time: `DynamicLayer` copies all it holds for every token that it takes."""

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


SPARE = 64  # positions


class PreallocatedLayer(DynamicLayer):
    """As `DynamicLayer`, except that keys and values lie at the beginning of larger tensors `[N, heads, capacity, width]`."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.buffers = None
        held = self.keys.shape[2]
        length = held + key_states.shape[2]
        if not self._fits(length):
            self.buffers = tuple(self._larger(part, length + SPARE) for part in (self.keys, self.values))
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, held:length] = states
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)
        return self.keys, self.values

    def _fits(self, length: int) -> bool:
        """Whether the buffers are there, hold the present keys (reordering makes others) and have as many positions."""
        if self.buffers is None or self.keys.data_ptr() != self.buffers[0].data_ptr():
            return False
        return self.keys.shape[0] == self.buffers[0].shape[0] and length <= self.buffers[0].shape[2]

    @staticmethod
    def _larger(part: torch.Tensor, capacity: int) -> torch.Tensor:
        buffer = part.new_empty((*part.shape[:2], capacity, part.shape[3]))
        buffer[:, :, : part.shape[2]] = part
        return buffer


def preallocated_cache(config: PreTrainedConfig) -> DynamicCache:
    """A `DynamicCache` for `generate`, whose plain layers are preallocated; those of sliding windows stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
