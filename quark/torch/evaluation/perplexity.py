"""Perplexity of a causal language model: documents → token windows → one number.

The steps are separate, so that two models or toolkits can be evaluated on the same windows:

    windows = token_windows(load_documents("text.txt"), tokenizer, length=2048)
    perplexity(model, windows)
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from quark.torch.evaluation.next_token import check_next_token
from quark.torch.evaluation.output_head import ROWS_AT_ONCE, OutputHead, Receive
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.float_products import float_products
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.batches import run_batch
from quark.torch.pipeline.interleaved_passes import (
    Pauses,
    Steps,
    complete,
    deliver,
    never,
    within,
)
from quark.torch.pipeline.model_pass import data_steps
from quark.torch.pipeline.shapes import windows_at_once
from quark.torch.progress import show_progress
from quark.torch.quantization.config.resolution import output_head
from quark.torch.quantization.nn.expert_tokens import unchanged_token_counts
from quark.torch.quantization.preparation import check_parameters

BATCH_SIZE = 8  # windows that run together by default


class Tokenizer(Protocol):
    """The interface of a tokenizer; those of Transformers implement it."""

    @property
    def bos_token_id(self) -> int | None:
        """Token that begins a document, None where there is no such token."""

    @property
    def eos_token_id(self) -> int | None:
        """Token that ends a document, None where there is no such token."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Sequence[int]:
        """Return the token identifiers of ``text``."""


# ------------------------------------------------------------------------------------- windows


def token_windows(
    documents: Sequence[str], tokenizer: Tokenizer, length: int, limit: int | None = None
) -> torch.Tensor:
    """Tokenize documents, concatenate their tokens, and cut them into windows of equal length.

    The tokens of a document are put between the beginning-of-text and end-of-text tokens, as far as
    the tokenizer has them. Empty documents are skipped, and the incomplete window at the end is
    dropped. Only as many documents are tokenized as ``limit`` windows need.

    Args:
        documents: Texts, in order.
        tokenizer: Tokenizer of the model.
        length: Number of tokens per window.
        limit: Maximum number of windows, None for all.

    Returns:
        Token identifiers, (windows, length) int64, on the CPU.

    Raises:
        ValueError: The documents hold less than one window, or an argument is out of range.
    """
    if isinstance(documents, str):
        raise ValueError("documents is one string; give a list of them: [text]")
    if length < 1 or (limit is not None and limit < 1):
        raise ValueError(f"length and limit must be at least 1, got {length} and {limit}")
    pieces: list[torch.Tensor] = []
    count = 0
    for document in documents:
        if limit is not None and count >= limit * length:
            break
        pieces.append(_document_tokens(document, tokenizer))
        count += len(pieces[-1])
    if count < length:
        raise ValueError(
            f"{len(documents)} document(s) hold {count} tokens, less than one window of {length}; "
            f"give more text or a length of at most {count}"
        )
    windows = count // length if limit is None else min(limit, count // length)
    return torch.cat(pieces)[: windows * length].reshape(windows, length)


def _document_tokens(text: str, tokenizer: Tokenizer) -> torch.Tensor:
    """Return the tokens of one document with its markers, (tokens,) int64; none if it is empty."""
    # verbose=False: no warning about the length of the text, which is cut afterwards
    tokens = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if len(tokens) == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    marked = [tokenizer.bos_token_id, *tokens, tokenizer.eos_token_id]
    return torch.tensor(
        [token for token in marked if token is not None], dtype=torch.int64, device="cpu"
    )


# ---------------------------------------------------------------------------------- perplexity


def perplexity(
    model: nn.Module,
    windows: torch.Tensor,
    batch_size: int = BATCH_SIZE,
    progress: str | None = None,
    context: int = 1,
) -> float:
    """Return the perplexity: exp of the mean negative log-likelihood of tokens given those before.

    Args:
        model: Model that takes token identifiers (batch, length) and returns logits
            (batch, length, vocabulary): a tensor, the first of a tuple, or an attribute or item
            named ``logits``.
        windows: Token identifiers, (windows, length) integers, as `token_windows` returns them.
        batch_size: Number of windows per forward pass; see `window_losses`.
        progress: Title of a progress bar; see `window_losses`.
        context: Number of tokens at the beginning of each window that are read but not scored.

    Returns:
        The perplexity: at least 1, the size of the vocabulary for uniform logits, infinite if
        float64 overflows.

    Raises:
        ValueError, FloatingPointError: As `window_losses`.
    """
    return float(window_losses(model, windows, batch_size, progress, context).mean().exp())


def window_losses(
    model: nn.Module,
    windows: torch.Tensor,
    batch_size: int = BATCH_SIZE,
    progress: str | None = None,
    context: int = 1,
    receive: Receive | None = None,
    observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Return the mean negative log-likelihood of the tokens of each window, given those before.

    Each window is scored on its own, and its first token is not scored. Logarithms are computed in
    float32 and summed in float64 for any type of model. The output head runs on a part of a batch
    at a time (``output_head``), so that memory holds few logits. The model runs in evaluation mode,
    and every module returns to its own mode afterwards.

    Args:
        model: As for `perplexity`.
        windows: Token identifiers, (windows, length) integers, as `token_windows` returns them.
        batch_size: Number of windows per forward pass. For a model that is larger than memory, it
            is the largest number: a bound of memory may leave less.
        progress: Title of a progress bar, which appears on a terminal after a second; None for no
            bar.
        context: Number of tokens at the beginning of each window that are read but not scored.
        receive: Also takes the logits of each part of a batch; see ``OutputHead.run``.
        observe: Opened while the windows run; each module runs once for each batch inside, the
            output head for each part of it.

    Returns:
        Nats per token, (windows,) float64.

    Raises:
        ValueError: The windows are empty, too short or not integers, or ``batch_size`` or
            ``context`` is below 1; or the model is an encoder-decoder.
        FloatingPointError: The likelihood of a window is not a finite number, but weights are.
    """
    return complete(
        window_loss_steps(model, windows, batch_size, progress, context, receive, observe)
    )


def window_loss_steps(
    model: nn.Module,
    windows: torch.Tensor,
    batch_size: int = BATCH_SIZE,
    progress: str | None = None,
    context: int = 1,
    receive: Receive | None = None,
    observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
    pauses: Pauses = never,
) -> Steps[torch.Tensor]:
    """Return a pass that can take turns with others; it returns what ``window_losses`` returns.

    Args:
        model: As in ``window_losses``, like the arguments that follow.
        windows: Likewise.
        batch_size: Likewise.
        progress: Likewise.
        context: Likewise.
        receive: Likewise.
        observe: Likewise; left and opened again at each pause.
        pauses: Whether to pause after a batch.
    """
    _check_windows(windows, batch_size, context)
    check_next_token(model)
    batch_size = _fitting_batch_size(model, batch_size, windows.shape[1])
    batches = torch.split(windows.to(torch.int64), batch_size)
    sums = torch.zeros(len(windows), dtype=torch.float64, device="cpu")

    def keep_losses(index: int, losses: torch.Tensor) -> None:
        if not losses.isfinite().all():
            check_parameters(model)
            bad = int((~losses.isfinite()).nonzero()[0])
            raise FloatingPointError(
                f"window {index * batch_size + bad} of {len(windows)} has a negative "
                f"log-likelihood of {float(losses[bad])}, though the weights are finite: its "
                "logits are infinite, or it overflows. Load it in a wider type, or leave the "
                "evaluation out."
            )
        sums[index * batch_size :][: len(losses)] = losses

    compute = _compute_losses(model, context, receive)
    yield from _run(model, batches, progress, observe, compute, keep_losses, pauses)
    return sums / (windows.shape[1] - context)


def check_room(model: nn.Module, windows: torch.Tensor, batch_size: int = BATCH_SIZE) -> None:
    """Check that a bound of memory leaves room for an evaluation, before any window runs.

    It must have room for the largest part of the model and the logits of a part of a batch.
    Other models are not bounded.

    Args:
        model: A model, also one that is read in parts.
        windows: Token identifiers, (windows, length).
        batch_size: Largest number of windows per forward pass.

    Raises:
        ValueError: There is less.
    """
    residency = residency_of(model)
    if residency is None or residency.room is None:
        return
    count, length = windows.shape
    batch = _fitting_batch_size(model, min(batch_size, count), length)
    positions = min(length, max(1, ROWS_AT_ONCE // batch))
    heads = [model.get_submodule(name) for name in output_head(model)]
    vocabulary = max((int(getattr(m, "out_features", 0)) for m in heads), default=0)
    # The least: in half precision, and of one window at a time their logarithms in float32.
    logits = vocabulary * positions * (2 * batch + 4)
    needed = residency.largest + logits
    if needed > residency.room:
        missing = -(-(needed - residency.room) // 10**6)
        raise ValueError(
            f"max_memory: an evaluation of {type(model).__name__} takes at least "
            f"{needed / 1e6:.0f} MB, but {max(residency.room, 0) / 1e6:.0f} MB are left of the "
            f"bound. Give at least {missing} MB more."
        )


def _check_windows(windows: torch.Tensor, batch_size: int, context: int) -> None:
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] <= context:
        raise ValueError(
            f"windows has shape {tuple(windows.shape)}; expected (windows, length) with at least "
            f"one window and {context + 1} tokens in it"
        )
    if windows.is_floating_point() or windows.is_complex() or windows.dtype == torch.bool:
        raise ValueError(f"windows holds {windows.dtype}; expected integer token identifiers")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def _compute_losses(
    model: nn.Module, context: int, receive: Receive | None
) -> Callable[[Callable[[], Any], torch.Tensor], torch.Tensor]:
    """Return a function that returns the negative log-likelihood of each window of a batch.

    It takes a function that runs the model on the batch, and the batch.
    """
    head = OutputHead(model)

    def compute(run: Callable[[], Any], tokens: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(len(tokens), dtype=torch.float64, device="cpu")

        def add(first: int, logits: torch.Tensor) -> None:
            losses.add_(_window_losses(logits, tokens, first, context))
            if receive is not None:
                receive(first, logits)

        head.run(run, tokens, add)
        return losses

    return compute


def _fitting_batch_size(model: nn.Module, most: int, length: int) -> int:
    """Return the windows of a batch; fewer than ``most`` where a bound of memory leaves less."""
    residency = residency_of(model)
    if residency is None:
        return most
    head = output_head(model)
    widths = [
        module.out_features
        for name, module in model.named_modules()
        if isinstance(getattr(module, "out_features", None), int) and name not in head
    ]
    return windows_at_once(most, length, max(widths, default=1), residency.activation_limit)


def _takes_use_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters


def _input_device(model: nn.Module, default: torch.device) -> torch.device:
    """Return the device of the first tensor of the model, ``default`` without any (offloaded)."""
    tensors = chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), default)


def _run(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    progress: str | None,
    observe: Callable[[], AbstractContextManager[Any]],
    compute: Callable[[Callable[[], Any], torch.Tensor], torch.Tensor],
    receive: Callable[[int, torch.Tensor], None],
    pauses: Pauses,
) -> Steps[None]:
    """Run batches of tokens through a model; see ``window_loss_steps``.

    ``compute`` takes a function that runs the model on a batch, and the batch; ``receive`` takes
    the number of the batch, and what was computed.
    """
    residency = residency_of(model)
    if residency is not None:
        steps = data_steps(
            model,
            batches,
            progress or "perplexity",
            observe=observe,
            receive=receive,
            limit=residency.activation_limit,
            call=lambda model, tokens: compute(partial(run_batch, model, tokens), tokens),
            pauses=pauses,
        )
        with unchanged_token_counts(model):
            yield from within(float_products, steps)
        return
    options = {"use_cache": False} if _takes_use_cache(model) else {}
    device = _input_device(model, default=batches[0].device)

    def run(index: int) -> None:
        tokens = batches[index]
        receive(index, compute(partial(model, tokens.to(device), **options), tokens))

    @contextmanager
    def in_use() -> Iterator[None]:
        with torch.inference_mode(), eval_mode(model), observe(), float_products():
            yield

    numbers = range(len(batches))
    shown = numbers if progress is None else show_progress(numbers, progress)
    yield from deliver(shown, in_use, run, pauses)


def _window_losses(
    logits: torch.Tensor, tokens: torch.Tensor, first: int, context: int
) -> torch.Tensor:
    """Return the summed negative log-likelihood of tokens of each window, (batch,) float64.

    Args:
        logits: Logits of successive positions, (batch, positions, vocabulary).
        tokens: The windows, (batch, length).
        first: Position of the first logits.
        context: Number of tokens at the beginning of each window that are not scored.

    Returns:
        The sums, on the CPU, over the tokens that these logits predict.
    """
    begin = max(context - 1 - first, 0)
    rows = logits[:, begin : tokens.shape[1] - 1 - first]
    targets = tokens[:, first + begin + 1 :][:, : rows.shape[1]].to(logits.device)
    losses = [
        functional.cross_entropy(part.float(), target, reduction="none")
        for part, target in zip(rows, targets, strict=True)
    ]
    return torch.stack(losses).cpu().double().sum(-1)  # float64 is not on every device
