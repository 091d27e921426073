"""Directories of Hugging Face: ``config.json`` and ``*.safetensors``, in ``FORMATS``."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quark.torch.export.checkpoint.config_json import (
    CONFIG,
    SECTION,
    SETTINGS_FILES,
    calibration_notes,
    read_config_json,
)
from quark.torch.export.checkpoint.headers import NATIVE, Entry, Headers
from quark.torch.export.checkpoint_contents import Contents, summarize
from quark.torch.export.containers import vllm
from quark.torch.export.containers.base import Container, ExportSettings, in_quotes
from quark.torch.export.containers.merged_experts import expert_schemes, reads_experts
from quark.torch.export.containers.recognition import recognize_format
from quark.torch.export.containers.registry import SAFETENSORS
from quark.torch.export.formats.base import ExportFormat, format_class
from quark.torch.export.formats.kv_cache import SCALE_NAMES
from quark.torch.export.formats.registry import FORMATS
from quark.torch.files import Target

if TYPE_CHECKING:
    from torch import fx, nn

    from quark.torch.export.checkpoint.files import CheckpointReader
    from quark.torch.export.checkpoint.reader import Loading, Reader
    from quark.torch.export.verification import Verdict
    from quark.torch.quantization.config.description import LayerDescription


_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")  # not weights
_OTHER_LAYOUT = "compressed-tensors"  # in which vLLM reads more schemes than in Quark's own
_NOT_COPIED = (CONFIG, *SETTINGS_FILES)


class TensorDirectory(Container):
    """A directory with a ``config.json`` and tensors in a format of ``FORMATS``."""

    has_formats = True
    has_config_json = True

    def reader(self, path: Path) -> Reader:
        """Return the tensors of a directory.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is damaged.
        """
        raise NotImplementedError

    def headers(self, path: Path) -> Mapping[str, Entry]:
        """Return the headers of the tensors of a directory, by name.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is damaged.
        """
        return self.reader(path).entries

    def open(self, path: Path, trust_remote_code: bool = False, **options: Any) -> Loading:
        """Return a model that is ready for the tensors; see ``Container.open``."""
        from quark.torch.export.checkpoint.reader import prepare_load

        fmt = recognize_format(read_config_json(path), str(path / CONFIG))
        model = self.architecture(path, trust_remote_code, **options)
        return prepare_load(model, fmt, self.reader(path))

    def architecture(
        self, path: Path, trust_remote_code: bool = False, **options: Any
    ) -> nn.Module:
        """Return the float model of a directory; see ``Container.architecture``."""
        from quark.torch.export.checkpoint.architecture import empty_model, read_config
        from quark.torch.export.checkpoint.float_source import read_generation_config

        entries = self.reader(path).entries
        config = read_config(path, trust_remote_code)
        model = empty_model(config, entries, path, trust_remote_code=trust_remote_code, **options)
        read_generation_config(model, path, trust_remote_code)
        return model

    def verify_graph(self, path: Path, model: fx.GraphModule) -> Verdict:
        """Read the tensors of a graph into a copy of it, and compare the outputs.

        Raises:
            ValueError: The outputs differ, or the graph itself was loaded from a checkpoint.
        """
        from quark.torch.export.checkpoint.graphs import copy_for_load
        from quark.torch.export.checkpoint.reader import load
        from quark.torch.export.verification import verify_graph_tensors

        reader = self.reader(path)
        graph = copy_for_load(model, reader.entries)
        if graph is None:
            raise ValueError(
                "A graph that was loaded from a checkpoint is not verified again: export it "
                "without verification."
            )
        load(graph, recognize_format(read_config_json(path), str(path / CONFIG)), reader)
        return verify_graph_tensors(model, graph, self.size(path))

    def contents(self, path: Path) -> Contents:
        """Return what a directory holds, quantized or not; see ``Container.contents``.

        Where the configuration is of an unknown method, or is not understood, tensors are
        summarized by type alone, as those of a float model.
        """
        config, fmt, note = read_config_json(path), None, ""
        section = config.get(SECTION)
        if SECTION in config:
            try:
                fmt = recognize_format(config, str(path / CONFIG))
            except (TypeError, ValueError) as error:
                note = f"layers are not told apart: {error}"
        return Contents(
            str(config.get("model_type", "unknown type")),
            _origin(section, calibration_notes(config)) if isinstance(section, dict) else {},
            note,
            summarize(
                self.headers(path), fmt, config.get("dtype") or config.get("torch_dtype"), config
            ),
        )

    def tokenizer(self, path: Path) -> Any:
        """Return an object that copies the tokenizer, code and templates of a directory."""
        return CopiedFiles(path)

    def check_writable(self, model: nn.Module, settings: ExportSettings) -> None:
        """Check that the format can hold a model; see ``Container.check_writable``."""
        _make_format(model, settings)


class Safetensors(TensorDirectory):
    """A directory as Transformers and vLLM load it."""

    name = SAFETENSORS
    title = "a directory of safetensors"
    patterns = ("*.safetensors",)
    whole_because = ""

    def holds(self, path: Path) -> bool:
        """Whether a directory has a ``config.json``, and not only a native file."""
        if not (path / CONFIG).is_file():
            return False
        return not (path / NATIVE).is_file() or any(path.glob("*.safetensors"))

    def is_quantized(self, path: Path) -> bool:
        """Whether the ``config.json`` of a directory says how it was quantized."""
        return bool(read_config_json(path).get(SECTION))

    def holds_other_model(self, path: Path) -> bool:
        """Whether a directory holds a float model, or one that another method quantized."""
        if not self.is_quantized(path):
            return True
        section = read_config_json(path).get(SECTION)
        method = section.get("quant_method", "quark") if isinstance(section, dict) else None
        return isinstance(method, str) and method not in FORMATS

    def reader(self, path: Path) -> CheckpointReader:
        """Return the tensors of a directory."""
        from quark.torch.export.checkpoint.files import CheckpointReader

        return CheckpointReader(path)

    def headers(self, path: Path) -> Mapping[str, Entry]:
        """Return the headers of the tensors of a directory by name, read without torch."""
        return Headers(path).entries

    def write(self, model: nn.Module, target: Target, settings: ExportSettings) -> None:
        """Write config.json, *.safetensors and the tokenizer; see ``Container.write``."""
        from quark.torch.export.checkpoint.directory_writer import write_directory

        fmt = _make_format(model, settings)
        write_directory(
            model,
            fmt,
            target,
            settings.max_shard_size,
            settings.file_name,
            settings.tokenizer,
        )

    def verify(
        self, path: Path, model: nn.Module, trust_remote_code: bool = False, inputs: Any = None
    ) -> Verdict:
        """Compare predictions with those of Transformers, or of this package where it fails."""
        from quark.torch.export.checkpoint.graphs import is_quantized_graph
        from quark.torch.export.verification import verify_predictions

        if is_quantized_graph(model):
            return self.verify_graph(path, cast("fx.GraphModule", model))
        config = read_config_json(path)
        is_dequantized = _needs_gpu_for_inputs(config)
        is_read = not is_dequantized or _has_whole_blocks(config[SECTION], self.headers(path))
        is_read = is_read and self._reads_experts(path)
        return verify_predictions(
            path,
            model,
            _transformers_packages(config) if is_read else None,
            self.size(path),
            self.loader(path, trust_remote_code),
            trust_remote_code,
            is_dequantized,
        )

    def load_code(self, path: Path) -> str:
        """Return the line that loads a directory: with Transformers, if it can do so here."""
        config = read_config_json(path)
        packages = _transformers_packages(config)
        is_missing = packages is None or any(find_spec(name) is None for name in packages)
        # Transformers leaves out rotations of inputs.
        is_rotated = (config.get(SECTION) or {}).get("transform_config")
        is_float = _needs_gpu_for_inputs(config)
        is_other = self._has_packed_offsets(path) or not self._reads_experts(path)
        if is_missing or is_rotated or is_float or is_other:
            line = super().load_code(path)
        else:
            line = f"model = transformers.{_loading_class(path)}.from_pretrained({in_quotes(path)})"
        return f"{line[:-1]}, trust_remote_code=True)" if _has_code(config) else line

    def _has_packed_offsets(self, path: Path) -> bool:
        """Whether zero points are packed as compressed-tensors does: Transformers expects others.

        Transformers 5.23 with compressed-tensors 0.20 ends with an error of shapes.
        """
        fmt, schemes = self._schemes(path)
        return fmt.name == _OTHER_LAYOUT and any(x.weight.endswith("asym") for x in schemes)

    def _reads_experts(self, path: Path) -> bool:
        """Whether Transformers reads the experts of a directory, if there are any."""
        config = read_config_json(path)
        if (config.get(SECTION) or {}).get("quant_method") != _OTHER_LAYOUT:
            return True
        return reads_experts(config, self.contents(path).summary, self.headers(path))

    def _schemes(self, path: Path) -> tuple[ExportFormat, list[LayerDescription]]:
        """Return the format of a directory, and how its layers are quantized."""
        fmt = recognize_format(read_config_json(path), str(path))
        return fmt, [group.scheme for group in self.contents(path).summary.schemes()]

    def serve_command(self, path: Path) -> str | None:
        """Return the command of vLLM, for language models that it reads.

        If it reads their layers or experts, or rotates their inputs, in compressed-tensors alone, a
        line above converts them.
        """
        from quark.torch.export.checkpoint.rotation_config import prescales_inputs, rotates_inputs

        if _loading_class(path) != "AutoModelForCausalLM" or _has_conv1d(read_config_json(path)):
            return None
        fmt, schemes = self._schemes(path)
        summary = self.contents(path).summary
        experts = expert_schemes(summary, self.headers(path))
        if any(len(kinds) > 1 for kinds in experts.values()):  # vLLM merges those of a block
            return None
        caches = (layer.name for layer in summary.layers if layer.scheme.kv_cache)
        if any(name.rpartition(".")[2] not in SCALE_NAMES for name in caches):
            return None  # its scales are those of keys, and those of values
        trust = ["--trust-remote-code"] * _has_code(read_config_json(path))
        is_own = fmt.name == "quark"
        is_other = is_own and (rotates_inputs(fmt.config) or not vllm.reads_own(experts, schemes))
        if vllm.is_read(fmt.name, schemes) and not is_other:
            return shlex.join(["vllm", "serve", str(path), *trust])
        is_held = not prescales_inputs(fmt.config) and vllm.is_read(_OTHER_LAYOUT, schemes)
        if not (is_own and is_held):
            return None
        other = f"{path}-ct"
        convert = ["quark", "convert", str(path), other, "--to", _OTHER_LAYOUT]
        convert += ["--trust_remote_code"] * bool(trust)
        return f"{shlex.join(convert)}\n{shlex.join(['vllm', 'serve', other, *trust])}"


class CopiedFiles:
    """The small files of a checkpoint that do not depend on its weights: tokenizer, code, template.

    Args:
        directory: Directory to copy from.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save_pretrained(self, directory: str | Path) -> None:
        """Copy the files that do not exist in ``directory`` yet."""
        for file in sorted(self.directory.iterdir()):
            is_kept = file.name in _NOT_COPIED or file.name.endswith(".index.json")
            place = Path(directory) / file.name
            if file.suffix in _COPIED and not is_kept and file.is_file() and not place.exists():
                shutil.copyfile(file, place)


def _has_code(config: dict[str, Any]) -> bool:
    """Whether Python code in the directory builds the model."""
    return "auto_map" in config


def _loading_class(path: Path) -> str:
    """Return the class of Transformers that loads a directory: its own, or that of decoders."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = _architectures(read_config_json(path))
    own = names[0] if names else None
    if own in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or own not in transformers.__all__:
        return "AutoModelForCausalLM"
    return str(own)


def _has_conv1d(config: dict[str, Any]) -> bool:
    """Whether the code of a decoder of Transformers has ``Conv1D``, as that of GPT-2.

    vLLM transposes what is stored as ``weight`` of such layers when it loads them, codes too: the
    comment there says that this may break quantized models.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    modules = [getattr(transformers, n).__module__ for n in known & set(_architectures(config))]
    return any(hasattr(sys.modules[module], "Conv1D") for module in modules)


def _architectures(config: dict[str, Any]) -> list[str]:
    """Return the names of classes in a ``config.json``; none if they are not understood."""
    names = config.get("architectures")
    return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


def _transformers_packages(config: dict[str, Any]) -> Mapping[str, str] | None:
    """Return the packages with which Transformers loads a checkpoint; None if it may not."""
    method = str((config.get(SECTION) or {}).get("quant_method"))
    return format_class(method).transformers_packages if method in FORMATS else None


def _needs_gpu_for_inputs(config: dict[str, Any]) -> bool:
    """Whether Transformers on a CPU dequantizes the weights and leaves inputs in float."""
    method = str((config.get(SECTION) or {}).get("quant_method"))
    return method in FORMATS and format_class(method).needs_gpu_for_inputs


def _has_whole_blocks(section: dict[str, Any], entries: Mapping[str, Entry]) -> bool:
    """Whether weights have scales of blocks, all blocks of an axis as long as each other.

    On a CPU, Transformers 5.23 divides the length of an axis by the number of its scales. Example:
    160 rows are blocks of 128 and 32 rows here, and two blocks of 80 in Transformers.
    """
    block = section.get("weight_block_size")
    if block is None:
        return False
    scaled = {n.removesuffix("_scale_inv") for n in entries if n.endswith("_scale_inv")}
    shapes = [entries[name].shape for name in scaled & entries.keys()]
    sides = (pair for shape in shapes for pair in zip(shape[-2:], block, strict=True))
    return all(side <= size or side % size == 0 for side, size in sides)


def _make_format(model: nn.Module, settings: ExportSettings) -> ExportFormat:
    from quark.torch.export.checkpoint.writer import make_format

    return make_format(model, settings.quant_config, settings.options, settings.custom_mode)


def _origin(section: dict[str, Any], notes: dict[str, str]) -> dict[str, Any]:
    """Return how a checkpoint says it was quantized."""
    export = section.get("export")
    export = export if isinstance(export, dict) else {}
    origin = {
        "quant_method": section.get("quant_method", "quark"),
        "version": section.get("version"),
        "weight_format": export.get("weight_format"),
        "pack_method": export.get("pack_method"),
        **notes,
    }
    return {key: value for key, value in origin.items() if value is not None}
