"""Speeds are those of the tokens that are asked for, with errors over repetitions."""

import pytest
import torch

from quark.torch.report import speed
from quark.torch.report.speed import measure_speed


class Clock:
    """Time that passes while a model generates: 2 s for the prompt, then 1 s for 4 tokens."""

    def __init__(self, model, monkeypatch):
        self.now, self.counts = 0.0, []
        monkeypatch.setattr(speed.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(model, "generate", self.generate)

    def generate(self, tokens, *, min_new_tokens, max_new_tokens, **_):
        assert min_new_tokens == max_new_tokens
        self.counts.append(max_new_tokens)
        self.now += 2.0 + 0.25 * (max_new_tokens - 1)
        return tokens


def test_the_prompt_and_new_tokens_are_timed_apart(build, monkeypatch):
    model = build()
    clock = Clock(model, monkeypatch)
    measured = measure_speed(model, torch.zeros(1, 24, dtype=torch.int64), 9)
    assert measured.prompt == pytest.approx(12.0)
    assert measured.new == pytest.approx(4.0)
    assert measured.prompt_error == pytest.approx(0.0)
    assert measured.new_error == pytest.approx(0.0)
    assert clock.counts == [2] + [1, 9] * speed.REPEATS


def test_a_model_writes_as_many_tokens_as_asked_for(build):
    measured = measure_speed(build(), torch.ones(1, 4, dtype=torch.int64), 3)
    assert measured.prompt > 0
    assert measured.new > 0
    assert measured.memory > 1_000_000
    assert measured.device_memory is None
