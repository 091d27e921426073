"""Recorded outputs of blocks: a call can begin at a block, and the blocks before do not run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.graph.replay import replace_forwards
from quark.torch.pipeline.activation_store import ActivationStore, current_limit
from quark.torch.pipeline.batches import padding_mask, take_excerpt
from quark.torch.statistics.log_probabilities import log_probs, logits_of, predict

logger = logging.getLogger(__name__)

_OTHER_TOKENS = 8  # of an excerpt that is shorter than another


class BlockOutputs:
    """Outputs of the blocks of a model, recorded for some calls.

    Args:
        model: The model.
        blocks: Its blocks in the order of execution.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._model, self._blocks = model, blocks
        self._store = ActivationStore(current_limit() // 2)
        self._forms: list[dict[str, Any]] = []  # of each call: block -> output, slots for tensors
        self._entrances: set[str] = set()  # blocks that a call can begin at

    def clear(self) -> None:
        """Forget all outputs."""
        self._store.clear()

    def recorded(self, block: str, index: int) -> Any:
        """Return the output of a block for a call, None if it was not recorded."""
        form = self._forms[index].get(block)
        return None if form is None else self._get(form)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what each block returns for a call that runs while the context is open.

        Blocks that return it again, for another part of the output head, are recorded once.
        """
        forms: dict[str, Any] = {}

        def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
            if name not in forms and _is_plain(output):
                forms[name] = self._put(output)

        with ExitStack() as stack:
            for name in self._blocks:
                module = self._model.get_submodule(name)
                stack.callback(module.register_forward_hook(partial(keep, name)).remove)
            yield
        self._forms.append(forms)

    def prove(self, call: Any) -> bool:
        """Find the blocks that calls can begin at, by an excerpt of a call.

        Returns whether the model predicts each token of a sequence.

        Blocks may read more of earlier ones than what these return, such as keys and values. Then a
        call that begins there has other predictions, or none, and all blocks run instead.
        """
        excerpt = take_excerpt(call)
        with self.recording():
            logits = logits_of(self._model, excerpt)
        predictions, forms = log_probs(logits, padding_mask(excerpt)), self._forms.pop()
        is_sequence = logits.dim() == 3
        # What blocks keep is of other tokens from here on, so that nobody can read it unnoticed. A
        # call refreshes what its blocks keep: the last block is first, as the earlier ones do not.
        others = predict(self._model, take_excerpt(call, _OTHER_TOKENS))
        if torch.equal(others, predictions):
            return is_sequence
        for block in reversed(self._blocks[1:]):
            try:
                with self._skip(forms, block):
                    if torch.equal(predict(self._model, excerpt), predictions):
                        self._entrances.add(block)
            except Exception as error:  # anything that a model can raise
                logger.debug("Calls cannot begin at %s: %s", block, error)
        return is_sequence

    def beginning_at(self, block: str, index: int) -> AbstractContextManager[None]:
        """Let a recorded call begin at a block while the context is open, if it can."""
        return self._skip(self._forms[index], block if block in self._entrances else "")

    def _skip(self, forms: Mapping[str, Any], block: str) -> AbstractContextManager[None]:
        """Let blocks before ``block`` return what is recorded; none if it is ""."""
        earlier = self._blocks[: self._blocks.index(block)] if block else ()

        def forward(name: str, *args: Any, **kwargs: Any) -> Any:
            return self._get(forms[name])

        return replace_forwards(
            self._model, {n: partial(forward, n) for n in earlier if n in forms}
        )

    def _put(self, output: Any) -> Any:
        """Store the tensors of an output; return it with their numbers in their places."""
        if isinstance(output, tuple):
            return tuple(map(self._put, output))
        if output is None:
            return None
        number = len(self._store)
        self._store[number] = output
        return number

    def _get(self, form: Any) -> Any:
        """Return an output; a copy, because models may write to it in place."""
        if isinstance(form, tuple):
            return tuple(map(self._get, form))
        return None if form is None else self._store[form].clone()


def _is_plain(output: Any) -> bool:
    """Whether an output is a tensor, or a tuple of tensors and None."""
    if type(output) is tuple:
        return all(map(_is_plain, output))
    return output is None or isinstance(output, torch.Tensor)
