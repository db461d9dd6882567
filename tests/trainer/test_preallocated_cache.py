"""Answering on a preallocated cache is answering on Transformers' own."""

import pytest
import torch
from rig import CONFIGS, prompt, target
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from xpress_drafter.generation.decoding_xpress import CACHE
from xpress_drafter.trainer.preallocated_cache import SPARE, PreallocatedLayer, preallocated_cache


@pytest.mark.parametrize("kind", CONFIGS)
def test_texts_are_the_same(kind):
    """Over two growths, padded on the left; a sliding window's layers are Transformers' own."""
    model, n = target(kind), 2 * SPARE + 20
    ids = torch.cat([prompt(9, seed=seed) for seed in range(3)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    how = {"attention_mask": mask, "max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
    caches = [preallocated_cache(model.config.get_text_config()), DynamicCache(config=model.config.get_text_config())]
    ours, theirs = (model.generate(ids, **how, **{CACHE: cache}) for cache in caches)
    assert torch.equal(ours, theirs) and ours.shape[1] == 9 + n
    assert [type(layer) is PreallocatedLayer for layer in caches[0].layers] == [
        type(layer) is DynamicLayer for layer in caches[1].layers
    ]


def test_what_else_is_done_to_a_cache():
    """Cropped, reordered, selected and repeated, it goes on as `DynamicLayer` does."""
    layers = PreallocatedLayer(), DynamicLayer()
    for change in (
        lambda layer: layer.crop(-2),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0, 2])),
        lambda layer: layer.batch_select_indices(torch.tensor([0, 2])),
        lambda layer: layer.batch_repeat_interleave(2),
    ):
        rows = 3 if layers[1].keys is None else layers[1].keys.shape[0]
        states = torch.randn(rows, 2, 5, 4), torch.randn(rows, 2, 5, 4)
        for layer in layers:
            layer.update(*states)
            change(layer)
        assert torch.equal(layers[0].keys, layers[1].keys) and torch.equal(layers[0].values, layers[1].values)
    assert layers[0].get_seq_length() == 18
