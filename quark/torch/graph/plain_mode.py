"""Modes of torch under which a model is quantized, whatever those of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def plain_mode(model: nn.Module) -> Iterator[None]:
    """Switch off autocast and inference mode while the context is open.

    Autocast would round the operands of algorithms and of proofs to 16 bits. Inference mode hides
    operations from traces, and has no gradients. A model that was made in inference mode stays in
    it, since its parameters cannot be changed outside.

    Args:
        model: The model that will run.
    """
    parameters = list(model.parameters())
    kinds = {"cpu", *(parameter.device.type for parameter in parameters)}
    with ExitStack() as stack:
        # inference_mode(False) also enables gradients, so it is left out where it changes nothing.
        if torch.is_inference_mode_enabled() and not any(p.is_inference() for p in parameters):
            stack.enter_context(torch.inference_mode(False))
        for kind in sorted(kinds):
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
