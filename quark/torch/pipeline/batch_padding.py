"""Padding masks of a batch: one for the encoder, one for the decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.pipeline.batches import padding_mask
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.padding import padding, switch_padding


@contextmanager
def batch_padding(model: nn.Module, batch: Any) -> Iterator[None]:
    """Let the masks of a batch tell which tokens are padding while it runs through the model.

    In a model with an encoder and a decoder, ``attention_mask`` belongs to the tensors of the
    encoder and to the layers of cross-attention that read its outputs; ``decoder_attention_mask``
    belongs to the others.

    Args:
        model: The model.
        batch: A batch for one call of it.
    """
    mask = padding_mask(batch)
    encoder = _encoder(model)
    with ExitStack() as stack:
        stack.enter_context(padding(mask))
        if encoder is not None and hasattr(batch, "get"):
            stacks = _Stacks(mask, _decoder_mask(batch))
            stack.callback(encoder.register_forward_pre_hook(stacks.enter_encoder).remove)
            stack.callback(encoder.register_forward_hook(stacks.leave_encoder).remove)
            for module in model.modules():
                if isinstance(module, QuantizedLayer):
                    stack.callback(module.register_forward_pre_hook(stacks.enter_layer).remove)
                    stack.callback(module.register_forward_hook(stacks.leave_layer).remove)
        yield


class _Stacks:
    """Chooses the mask while an encoder and a decoder run.

    The layers of cross-attention are known by their input: it is the output of the encoder.

    Args:
        encoder: Mask of the encoder, or None.
        decoder: Mask of the decoder, or None.
    """

    def __init__(self, encoder: torch.Tensor | None, decoder: torch.Tensor | None) -> None:
        self.encoder, self.decoder = encoder, decoder
        self._states: int | None = None  # address of the output of the encoder

    def enter_encoder(self, module: nn.Module, args: Any) -> None:
        """Choose the mask of the encoder."""
        self._states = None
        switch_padding(self.encoder)

    def leave_encoder(self, module: nn.Module, args: Any, output: Any) -> None:
        """Choose the mask of the decoder."""
        states = output if isinstance(output, torch.Tensor) else output[0]
        self._states = states.data_ptr()
        self._choose_decoder()

    def enter_layer(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Choose the mask of the encoder for a layer that reads its output."""
        is_tensor = bool(args) and isinstance(args[0], torch.Tensor)
        if self._states is not None and is_tensor and args[0].data_ptr() == self._states:
            switch_padding(self.encoder)

    def leave_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Choose the mask of the decoder again."""
        if self._states is not None:
            self._choose_decoder()

    def _choose_decoder(self) -> None:
        # A projection of the outputs of the encoder is known by its length, if that is another.
        is_same = self.decoder is None or (
            self.encoder is not None and self.encoder.shape == self.decoder.shape
        )
        switch_padding(self.decoder, None if is_same else self.encoder)


def _encoder(model: nn.Module) -> nn.Module | None:
    """Return the encoder of a model with an encoder and a decoder, as Transformers names it."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = getattr(model, "get_encoder", lambda: None)()
    return encoder if isinstance(encoder, nn.Module) else None


def _decoder_mask(batch: Any) -> torch.Tensor | None:
    """Return the mask of the tokens of the decoder, all of them if the batch has no mask."""
    mask = padding_mask(batch, "decoder_attention_mask")
    if mask is not None:
        return mask
    for name in ("decoder_input_ids", "labels"):
        if isinstance(batch.get(name), torch.Tensor) and batch.get(name).dim() == 2:
            return torch.ones_like(batch.get(name), dtype=torch.bool)
    return None
