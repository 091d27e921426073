"""The native format of Quark: ``config.json`` and ``model_state_dict.pth``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quark.torch.export.checkpoint.config_json import CONFIG
from quark.torch.export.checkpoint.headers import NATIVE
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.containers.safetensors import TensorDirectory
from quark.torch.export.formats.base import ExportFormat
from quark.torch.files import Target, size_of

if TYPE_CHECKING:
    from torch import fx, nn

    from quark.torch.export.checkpoint.files import NativeReader
    from quark.torch.export.verification import Verdict


class Native(TensorDirectory):
    """A directory whose tensors are a pickled dictionary, read without running code."""

    name = "quark_format"
    title = f"a directory with {NATIVE}"
    patterns = (NATIVE,)

    def holds(self, path: Path) -> bool:
        """Whether a directory has ``config.json`` and ``model_state_dict.pth``."""
        return (path / NATIVE).is_file() and (path / CONFIG).is_file()

    def reader(self, path: Path) -> NativeReader:
        """Return the tensors of a directory."""
        from quark.torch.export.checkpoint.files import NativeReader

        return NativeReader(path)

    def check_writable(self, model: nn.Module, settings: ExportSettings) -> None:
        """Check that the format can hold a model; see ``Container.check_writable``."""
        _make_format(model, settings)

    def write(self, model: nn.Module, target: Target, settings: ExportSettings) -> None:
        """Write config.json and model_state_dict.pth; see ``Container.write``."""
        import torch

        from quark.torch.export.checkpoint.writer import collect, write_model_files
        from quark.torch.export.checks import check_written

        fmt = _make_format(model, settings)
        tensors = {name: t.detach().cpu() for name, t in collect(model, fmt).items()}
        with target(size_of(tensors)) as directory:
            torch.save(tensors, directory / NATIVE)
            write_model_files(model, fmt.config_section(), directory, None)
            check_written(tensors, self.reader(directory))

    def verify(
        self, path: Path, model: nn.Module, trust_remote_code: bool = False, inputs: Any = None
    ) -> Verdict:
        """Compare predictions with those of the model that this package reads."""
        from quark.torch.export.checkpoint.graphs import is_quantized_graph
        from quark.torch.export.verification import verify_own

        if is_quantized_graph(model):
            return self.verify_graph(path, cast("fx.GraphModule", model))
        return verify_own(model, self.size(path), self.loader(path, trust_remote_code))


def _make_format(model: nn.Module, settings: ExportSettings) -> ExportFormat:
    """Return the format of the tensors.

    Raises:
        ValueError: It needs headers of safetensors, or cannot hold the model.
    """
    from quark.torch.export.checkpoint.writer import make_format

    fmt = make_format(model, settings.quant_config, settings.options, settings.custom_mode)
    if fmt.needs_headers:
        raise ValueError(
            f"custom_mode={fmt.name!r} describes tensors in headers of safetensors, which "
            f"{NATIVE} has not: use export_safetensors_model (--model_export hf_format)."
        )
    return fmt
