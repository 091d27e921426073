"""Evaluation mode switches off dropout and caches, and every module gets its own mode back."""

import pytest

from quark.torch.graph.eval_mode import eval_mode


def test_chance_and_caches_are_off_for_a_while(build):
    model = build("opt").train()
    model.model.decoder.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError, match="inside"), eval_mode(model):
        assert not any(module.training for module in model.modules())
        assert not model.config.use_cache
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == modes
    assert model.config.use_cache
