"""One ONNX graph, for ONNX Runtime; it is written, but not read back."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.torch.export.containers.base import Container, ExportSettings, in_quotes
from quark.torch.files import Target
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.export import ONNX_FILE

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.verification import Verdict


class Onnx(Container):
    """A graph of QuantizeLinear and DequantizeLinear with weights as codes."""

    name = "onnx"
    title = "an ONNX file"
    patterns = (f"{ONNX_FILE}*",)
    is_read = False
    whole_because = "torch traces the whole model, and its graph holds all weights"

    def holds(self, path: Path) -> bool:
        """Whether a path is an ONNX file, or a directory with one that was written here."""
        return (path / ONNX_FILE).is_file() or (path.suffix == ".onnx" and path.is_file())

    def check_installed(self) -> None:
        """Check that torch and onnxscript can export."""
        from quark.torch.export.onnx.writer import check_packages

        check_packages()

    def check_verifiable(self, dtypes: Collection[str]) -> None:
        """Check that ONNX Runtime is installed and computes in these types on a CPU."""
        from quark.torch.export.onnx.runtime import check_runtime

        check_runtime(dtypes)

    def check_config(self, layers: Iterable[QuantizationConfig]) -> None:
        """Check that a graph computes layers quantized like this."""
        from quark.torch.export.onnx.writer import check_config

        for layer in layers:
            check_config(layer, "this configuration")

    def check_writable(self, model: nn.Module, settings: ExportSettings) -> None:
        """Check that a graph computes every layer; see ``Container.check_writable``."""
        from quark.torch.export.onnx.writer import check_writable

        check_writable(model)

    def write(self, model: nn.Module, target: Target, settings: ExportSettings) -> None:
        """Trace a model on ``settings.inputs`` and write its graph; see ``Container.write``."""
        from quark.torch.export.onnx.writer import OnnxOptions, write_onnx

        inputs = _token_ids(model) if settings.inputs is None else settings.inputs
        write_onnx(model, target, inputs, settings.graph or OnnxOptions(), settings.tokenizer)

    def verify(
        self, path: Path, model: nn.Module, trust_remote_code: bool = False, inputs: Any = None
    ) -> Verdict:
        """Run the graph in ONNX Runtime and compare its outputs with those of ``model``."""
        from quark.torch.export.onnx.verification import verify_graph

        config = getattr(model, "config", None)  # of models of Transformers
        if inputs is None and getattr(config, "is_encoder_decoder", False):
            inputs = _token_ids(model)
        return verify_graph(path / ONNX_FILE if path.is_dir() else path, model, inputs)

    def load_code(self, path: Path) -> str:
        """Return the line that loads the graph with ONNX Runtime."""
        return f"session = onnxruntime.InferenceSession({in_quotes(path / ONNX_FILE)})"


def _token_ids(model: Any) -> dict[str, torch.Tensor]:
    """Return inputs of a language model: ids from the whole vocabulary, (2, 16).

    Raises:
        ValueError: The model is no language model of Transformers.
    """
    import torch

    from quark.torch.evaluation.samples import complete_batches

    is_known = hasattr(getattr(model, "config", None), "get_text_config")
    if not is_known or getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(
            "input_args is missing: give an example of the inputs, as a tensor, a tuple of "
            f"arguments or a mapping of them. {type(model).__name__} is no language model of "
            "Transformers, for which tokens are one."
        )
    words = model.config.get_text_config().vocab_size
    ids = torch.arange(32, device="cpu").reshape(2, 16) * words // 32
    [inputs] = complete_batches(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    return dict(inputs)
