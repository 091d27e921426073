"""Perplexity and what feeds it, against figures known beforehand and a slow second computation."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quark.torch.evaluation import output_head as module
from quark.torch.evaluation.perplexity import perplexity, token_windows
from quark.torch.export.recognition import load_checkpoint

VOCABULARY = 11


class Letters:
    """A tokenizer: "a" is 2, "b" is 3 and so on; beginning is 0 and end is 1, if there are any."""

    def __init__(self, bos: int | None = 0, eos: int | None = 1) -> None:
        self.bos_token_id, self.eos_token_id = bos, eos

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        assert not add_special_tokens
        assert not verbose
        return [ord(letter) - ord("a") + 2 for letter in text]


class Bigram(nn.Module):
    """Logits from the token before, after a dropout that would spoil them in training mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.5)
        self.sizes: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        self.sizes.append(len(tokens))
        return self.dropout(self.table(tokens))


class Fixed(nn.Module):
    """The same logit everywhere, but for what ``spoil`` does to it; without any parameter."""

    def __init__(self, spoil=lambda logits: logits) -> None:
        super().__init__()
        self.spoil = spoil

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.spoil(torch.full((*tokens.shape, VOCABULARY), 3.0))


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(VOCABULARY, (7, 13), generator=torch.Generator().manual_seed(1))


def slow_perplexity(table: list[list[float]], windows: list[list[int]]) -> float:
    total, count = 0.0, 0
    for window in windows:
        for before, after in itertools.pairwise(window):
            weights = [math.exp(value) for value in table[before]]
            total -= math.log(weights[after] / sum(weights))
            count += 1
    return math.exp(total / count)


class TestTokenWindows:
    def test_layout(self) -> None:
        made = token_windows(["ab", "", "cde"], Letters(), 4)
        assert made.dtype == torch.int64
        assert made.tolist() == [[0, 2, 3, 1], [0, 4, 5, 6]]  # the last "end" fills no window

    @pytest.mark.parametrize(
        ("bos", "eos", "expected"),
        [
            (None, None, [[2, 3], [4, 5]]),
            (0, None, [[0, 2], [3, 0], [4, 5]]),
            (None, 1, [[2, 3], [1, 4], [5, 1]]),
        ],
        ids=["neither", "beginning", "end"],
    )
    def test_only_the_markers_there_are(
        self, bos: int | None, eos: int | None, expected: list[list[int]]
    ) -> None:
        assert token_windows(["ab", "cd"], Letters(bos, eos), 2).tolist() == expected

    def test_limit_is_a_prefix_and_reads_no_further(self) -> None:
        documents = ["abc", "bcd", "cde"]
        limited = token_windows(documents, Letters(), 5, limit=2)
        assert torch.equal(limited, token_windows(documents, Letters(), 5)[:2])
        assert token_windows(documents, Letters(), 5, limit=99).shape == (3, 5)
        assert token_windows(["abc", None], Letters(), 5, limit=1).shape == (1, 5)  # type: ignore

    def test_too_little_text(self) -> None:
        with pytest.raises(ValueError, match=r"2 document\(s\) hold 7 tokens.*window of 8.*most 7"):
            token_windows(["ab", "c"], Letters(), 8)
        with pytest.raises(ValueError, match=r"0 tokens"):
            token_windows([], Letters(), 8)

    @pytest.mark.parametrize(("length", "limit"), [(0, None), (4, 0)])
    def test_arguments_out_of_range(self, length: int, limit: int | None) -> None:
        with pytest.raises(ValueError, match=r"at least 1"):
            token_windows(["abc"], Letters(), length, limit)

    def test_one_string_is_not_a_list_of_documents(self) -> None:
        with pytest.raises(ValueError, match=r"list"):
            token_windows("abcdef", Letters(), 2)


class TestPerplexity:
    def test_uniform_logits_give_the_vocabulary_size(self, windows: torch.Tensor) -> None:
        assert perplexity(Fixed(), windows) == pytest.approx(VOCABULARY, rel=1e-6)

    @pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
    @pytest.mark.parametrize("rows", [5, 512])
    def test_agrees_with_a_slow_computation(
        self, windows: torch.Tensor, batch_size: int, rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
        model = Bigram()
        expected = slow_perplexity(model.table.weight.tolist(), windows.tolist())
        assert perplexity(model, windows, batch_size) == pytest.approx(expected, rel=1e-6)
        assert sum(model.sizes) == 7
        assert max(model.sizes) == min(batch_size, 7)

    @pytest.mark.parametrize("context", [1, 2, 7])
    def test_a_context_is_read_and_not_scored(self, windows: torch.Tensor, context: int) -> None:
        """A bigram model sees one token only: the same as windows that begin with the last one."""
        model = Bigram()
        expected = slow_perplexity(model.table.weight.tolist(), windows[:, context - 1 :].tolist())
        assert perplexity(model, windows, context=context) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(("context", "said"), [(0, "at least 1, got 0"), (13, "14 tokens")])
    def test_a_context_that_leaves_nothing(
        self, context: int, said: str, windows: torch.Tensor
    ) -> None:
        with pytest.raises(ValueError, match=said):
            perplexity(Fixed(), windows, context=context)

    def test_half_precision_logits_are_accumulated_in_more(self) -> None:
        windows = torch.zeros(64, 257, dtype=torch.int32)
        found = perplexity(Fixed(lambda logits: logits.bfloat16()), windows)
        assert found == pytest.approx(VOCABULARY, rel=1e-6)

    def test_modes_are_restored(self, windows: torch.Tensor) -> None:
        model = nn.Sequential(Bigram())
        model.train()
        model[0].dropout.eval()
        before = [part.training for part in model.modules()]
        perplexity(model, windows)
        assert [part.training for part in model.modules()] == before

    def test_modes_are_restored_after_an_error(self, windows: torch.Tensor) -> None:
        model = Fixed(lambda logits: logits * math.nan).train()
        with pytest.raises(FloatingPointError):
            perplexity(model, windows)
        assert model.training

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda logits: (logits, "cache"),
            lambda logits: SimpleNamespace(logits=logits),
            lambda logits: {"logits": logits},
        ],
        ids=["tuple", "attribute", "mapping"],
    )
    def test_kinds_of_output(self, windows: torch.Tensor, wrap) -> None:
        assert perplexity(Fixed(wrap), windows) == pytest.approx(VOCABULARY, rel=1e-6)

    def test_cache_is_switched_off_where_there_is_one(self, windows: torch.Tensor) -> None:
        class Cached(Fixed):
            def forward(self, tokens: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
                assert not use_cache
                return super().forward(tokens)

        assert perplexity(Cached(), windows) == pytest.approx(VOCABULARY, rel=1e-6)

    def test_bar_changes_nothing(self, windows: torch.Tensor) -> None:
        assert perplexity(Bigram(), windows, progress="perplexity") == perplexity(Bigram(), windows)

    def test_window_with_nan_is_named(self, windows: torch.Tensor) -> None:
        windows[5, 0] = 10
        windows[:5].clamp_(max=9)

        class Broken(Fixed):
            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return super().forward(tokens).masked_fill(tokens[..., None] == 10, math.nan)

        with pytest.raises(FloatingPointError, match=r"window 5 of 7 .*nan"):
            perplexity(Broken(), windows, batch_size=2)

    def test_a_damaged_weight_is_named(self, build, windows: torch.Tensor) -> None:
        model = build()
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3, 5] = math.nan
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight has NaN"):
            perplexity(model, windows % 64)

    def test_a_window_of_a_loaded_quantized_model_is_named(
        self, build, quantize, export, windows: torch.Tensor
    ) -> None:
        model = load_checkpoint(export(quantize(build(), "int8_wo")))
        model.lm_head.register_forward_hook(lambda *args: args[-1] * math.nan)
        with pytest.raises(FloatingPointError, match=r"window 0 of 7 .*the weights are finite"):
            perplexity(model, windows % 64)

    def test_excluded_token_is_not_finite(self, windows: torch.Tensor) -> None:
        def exclude(logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill(-1, windows[0, 1:2], -math.inf)

        with pytest.raises(FloatingPointError, match=r"window 0 .*inf"):
            perplexity(Fixed(exclude), windows)

    @pytest.mark.parametrize(
        "bad",
        [torch.zeros(0, 8).long(), torch.zeros(3, 1).long(), torch.zeros(8).long()],
        ids=["no window", "one token", "one axis"],
    )
    def test_empty_windows(self, bad: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=r"at least one window and 2 tokens"):
            perplexity(Fixed(), bad)

    def test_other_wrong_arguments(self, windows: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=r"integer"):
            perplexity(Fixed(), windows.float())
        with pytest.raises(ValueError, match=r"batch_size"):
            perplexity(Fixed(), windows, batch_size=0)
        with pytest.raises(ValueError, match=r"causal language model"):
            perplexity(Fixed(lambda logits: logits[:, 0]), windows)


def test_an_encoder_decoder_has_none():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=16, **sizes, decoder_start_token_id=0))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        perplexity(model, torch.ones(1, 4, dtype=torch.int64))
