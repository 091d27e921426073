"""Text that models write: drawn from their predictions alone, the same whatever the batch."""

from types import SimpleNamespace

import pytest
import torch

from quark.torch.evaluation import sampling
from quark.torch.evaluation.sampling import check_writes_text, sample_sequences
from quark.torch.graph.residency import ATTRIBUTE

WORDS = 8


def tiny(**options):
    """A random model of a few words, with predictions that are far from even."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    heads = dict.fromkeys(("num_attention_heads", "num_hidden_layers"), 2)
    config = LlamaConfig(vocab_size=WORDS, initializer_range=0.5, **sizes, **heads, **options)
    return LlamaForCausalLM(config).double().eval()


def sampled(model, count, length, seed=0):
    return torch.cat([*sample_sequences(model, count, length, seed)])


def test_tokens_have_the_probabilities_of_the_predictions(monkeypatch):
    monkeypatch.setattr(sampling, "BATCH", 1000)
    model, count = tiny(), 6000
    tokens = sampled(model, count, 3)
    assert tokens.shape == (count, 3) and tokens.dtype == torch.int64
    first = torch.bincount(tokens[:, 0], minlength=WORDS) / count
    assert (first - 1 / WORDS).abs().max() < 4 * (1 / WORDS / count) ** 0.5
    with torch.no_grad():
        expected = model(tokens[:, :2]).logits.softmax(-1)
    for place in range(2):
        drawn = torch.nn.functional.one_hot(tokens[:, place + 1], WORDS)
        error = (drawn - expected[:, place]).mean(0)
        assert error.abs().max() < 4 * (0.25 / count) ** 0.5
    assert expected.std() > 0.1


def test_a_sequence_does_not_depend_on_the_others(monkeypatch):
    model = tiny()
    whole = sampled(model, 11, 20)
    monkeypatch.setattr(sampling, "BATCH", 3)
    assert torch.equal(sampled(model, 11, 20), whole)
    assert torch.equal(sampled(model, 5, 20), whole[:5])
    assert torch.equal(sampled(model, 11, 9), whole[:, :9])
    assert not torch.equal(sampled(model, 11, 20, seed=1), whole)
    assert len(whole.unique(dim=0)) == 11


def test_settings_of_the_model_for_answers_do_not_count():
    model = tiny()
    plain, settings = sampled(model, 4, 30), model.generation_config
    settings.update(repetition_penalty=5.0, eos_token_id=[0, 1, 2], suppress_tokens=[3, 4])
    assert torch.equal(sampled(model, 4, 30), plain)
    assert model.generation_config is settings
    state = torch.get_rng_state()
    sampled(model, 1, 4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["gpt2", "mamba", "gemma2", "qwen3_moe"])
def test_other_architectures(name, build, monkeypatch):
    """The predictions are those of a pass without a cache: the most probable tokens follow."""
    model = build(name)

    def most_probable(self, tokens, logits):
        return logits

    monkeypatch.setattr(sampling._Draw, "__call__", most_probable)
    tokens = sampled(model, 2, 12)
    with torch.no_grad():
        assert torch.equal(model(tokens[:, :-1]).logits.argmax(-1), tokens[:, 1:])


def test_a_failure_leaves_the_settings():
    model = tiny()
    settings = model.generation_config
    model.forward = None
    with pytest.raises(TypeError):
        sampled(model, 1, 4)
    assert model.generation_config is settings


def test_predictions_that_are_not_finite():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        sampled(model, 1, 4)


def test_dropout_does_not_count():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_head=2, n_layer=2)).eval()
    plain = sampled(model, 4, 20)
    model.train()
    assert torch.equal(sampled(model, 4, 20), plain)
    assert model.training and model.transformer.h[0].training and model.config.use_cache


def test_models_that_write_no_text():
    import transformers

    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    heads = dict.fromkeys(("num_attention_heads", "num_hidden_layers"), 1)
    config = transformers.BertConfig(vocab_size=WORDS, **sizes, **heads)
    masked = transformers.BertForMaskedLM(config)
    with pytest.raises(TypeError, match="BertForMaskedLM predicts masked tokens"):
        check_writes_text(masked)
    with pytest.raises(TypeError, match="BertModel predicts no next token"):
        check_writes_text(transformers.BertModel(config))
    with pytest.raises(TypeError, match="Linear predicts no next token"):
        check_writes_text(torch.nn.Linear(2, 2))
    model = tiny()
    setattr(model, ATTRIBUTE, SimpleNamespace())
    with pytest.raises(ValueError, match="each token would read all of it"):
        next(sample_sequences(model, 1, 4))


@pytest.mark.parametrize(("length", "seed"), [(1, 0), (2, -1), (2, 1 << 32)])
def test_numbers_out_of_range(length, seed):
    with pytest.raises(ValueError, match=f"got length={length}, 8 tokens and seed={seed}"):
        next(sample_sequences(tiny(), 1, length, seed))
