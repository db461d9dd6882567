"""A drafter knows its target again, and says so where sizes fit but the model is another one (CASES D10, K2)."""

import copy
import logging

import rig
from xpress_drafter.generation import pairing_xpress
from xpress_drafter.modeling_xpress import embedding_fingerprint


def warned(drafter, target, caplog) -> bool:
    pairing_xpress.logger.warning_once.cache_clear()
    caplog.clear()
    root = logging.getLogger("transformers")
    root.addHandler(caplog.handler)
    try:
        pairing_xpress.warn_of_another_target(drafter, target)
    finally:
        root.removeHandler(caplog.handler)
    return "trained for another target" in caplog.text


def test_another_model_of_the_same_sizes_is_noticed(caplog):
    target, other = rig.make_target(seed=0), rig.make_target(seed=1)
    drafter = rig.make_drafter(target)
    assert drafter.config.target_fingerprint == embedding_fingerprint(target)
    assert not warned(drafter, target, caplog)
    assert not warned(drafter, copy.deepcopy(target).bfloat16(), caplog), "rounding is no other model"
    assert warned(drafter, other, caplog)


def test_a_drafter_without_a_fingerprint_warns_of_nothing(caplog):
    drafter = rig.make_drafter(rig.make_target())
    drafter.config.target_fingerprint = None
    assert not warned(drafter, rig.make_target(seed=1), caplog)
