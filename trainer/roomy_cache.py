"""A cache that grows by many positions at a time: `DynamicLayer` copies all it holds for every token that it takes."""

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


ROOM = 64  # positions


class RoomyLayer(DynamicLayer):
    """As `DynamicLayer`, except that keys and values lie at the beginning of larger tensors `[N, heads, capacity, width]`."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.rooms = self.keys, self.values
        held = self.keys.shape[2]
        length = held + key_states.shape[2]
        if length > self.rooms[0].shape[2]:
            self.rooms = tuple(self._larger(part, length + ROOM) for part in (self.keys, self.values))
        for room, states in zip(self.rooms, (key_states, value_states)):
            room[:, :, held:length] = states
        self.keys, self.values = (room[:, :, :length] for room in self.rooms)
        return self.keys, self.values

    @staticmethod
    def _larger(part: torch.Tensor, capacity: int) -> torch.Tensor:
        room = part.new_empty((*part.shape[:2], capacity, part.shape[3]))
        room[:, :, : part.shape[2]] = part
        return room


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """A `DynamicCache` for `generate`, whose plain layers are roomy; those of sliding windows stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
