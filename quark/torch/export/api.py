"""Export and import of quantized models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quark.torch.export.containers.base import SHARD_SIZE, ExportSettings, get_container
from quark.torch.export.containers.registry import SAFETENSORS
from quark.torch.export.importer import ModelImporter as ModelImporter
from quark.torch.export.importer import (
    import_model_from_safetensors as import_model_from_safetensors,
)
from quark.torch.export.onnx.writer import MAX_FILE_SIZE, OnnxOptions
from quark.torch.export.transformers_loading import map_to_quark
from quark.torch.export.verification import Verdict
from quark.torch.files import check_vacant, fresh_directory
from quark.torch.numerics.dtypes import type_name
from quark.torch.quantization.arguments import check_module
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import ExporterConfig, JsonExporterConfig
from quark.torch.quantization.config.value_types import check_types
from quark.torch.quantization.preparation import check_plain


class ModelExporter:
    """Writes quantized models to a directory.

    ``ModelExporter("directory")`` and ``ModelExporter(config=…, export_dir=…)`` are the same
    with and without options.

    Args:
        config: Options, or the directory.
        export_dir: Directory to write. It is written beside and renamed when complete.
        overwrite: Whether an existing directory may be replaced.
        verify: Whether what is written is opened again, by other software where it is installed,
            and its predictions compared with those of the model, before it takes its place.

    Attributes:
        verdict: What came of that at the last export, None if it was not asked for.

    Raises:
        TypeError: ``overwrite`` or ``verify`` is no bool, or ``config`` of another class.
        ValueError: No directory is given.
    """

    def __init__(
        self,
        config: ExporterConfig | JsonExporterConfig | str | Path | None = None,
        export_dir: str | Path | None = None,
        overwrite: bool = False,
        verify: bool = False,
    ) -> None:
        check_types(bool, overwrite=overwrite, verify=verify)
        if isinstance(config, (str, Path)):
            config, export_dir = None, config
        if export_dir is None:
            raise ValueError("Give export_dir, the directory to write.")
        if isinstance(config, JsonExporterConfig):
            config = ExporterConfig(config)
        if not isinstance(config, (ExporterConfig, type(None))):
            raise TypeError(
                f"config: expected an ExporterConfig, got a {type(config).__name__}. Leave it out: "
                "the model remembers how it was quantized."
            )
        self.config = config or ExporterConfig()
        self.export_dir = Path(export_dir)
        self.overwrite = overwrite
        self.verify = verify
        self.verdict: Verdict | None = None

    def export_safetensors_model(
        self,
        model: nn.Module,
        quant_config: Config | None = None,
        custom_mode: str = "quark",
        tokenizer: Any | None = None,
        max_shard_size: str | int = SHARD_SIZE,
    ) -> None:
        """Write config.json, *.safetensors and, given a tokenizer, its files.

        Args:
            model: A frozen model, or one that was imported. It is not changed.
            quant_config: How it was quantized; by default what the model remembers. Another one
                must say the same of every layer.
            custom_mode: Checkpoint format, a name of ``FORMATS`` (`export/formats/registry.py`).
            tokenizer: Tokenizer to write beside the model.
            max_shard_size: Size above which tensors are spread over several files.

        Raises:
            FileExistsError: The directory is in use and ``overwrite`` is off.
            ValueError: The model is not quantized or not frozen, ``quant_config`` does not describe
                it, or the format is unknown or cannot hold it.
            OSError: The disk is too full. Nothing is left behind.
        """
        settings = ExportSettings(
            custom_mode=custom_mode,
            options=self.config.json_export_config,
            quant_config=quant_config,
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
        )
        self.export(SAFETENSORS, model, settings)

    def export_quark_model(
        self,
        model: nn.Module,
        quant_config: Config | None = None,
        custom_mode: str = "quark",
    ) -> None:
        """Write the native format: config.json and model_state_dict.pth.

        Arguments and errors are those of ``export_safetensors_model``.
        """
        options = self.config.json_export_config
        settings = ExportSettings(
            custom_mode=custom_mode, options=options, quant_config=quant_config
        )
        self.export("quark_format", model, settings)

    def export_gguf_model(
        self, model: nn.Module, tokenizer_path: str | Path, model_type: str
    ) -> None:
        """Write ``<model_type>.gguf``: weights in blocks, the rest in float, and the tokens.

        Integer weights become Q4_0, Q4_1 or Q8_0 with the codes they have, so that they keep their
        values up to the rounding of scales to float16. Other matrices are F32, F16 or BF16 as in
        the model. Needs the package gguf.

        Args:
            model: A frozen model of the Llama, Mistral, Qwen, Gemma or Phi family. It is not
                changed.
            tokenizer_path: Directory of its tokenizer.
            model_type: Name of the file.

        Raises:
            FileExistsError: The directory is in use and ``overwrite`` is off.
            ImportError: The package gguf is missing.
            ValueError: The family, the tokenizer or the scheme of a layer has no place in GGUF.
        """
        settings = ExportSettings(tokenizer_path=tokenizer_path, file_name=model_type)
        self.export("gguf", model, settings)

    def export_onnx_model(
        self,
        model: nn.Module,
        input_args: Any,
        input_names: Sequence[str] = (),
        output_names: Sequence[str] = (),
        verbose: bool = False,
        opset_version: int | None = None,
        do_constant_folding: bool = True,
        operator_export_type: Any = None,
        uint4_int4_flag: bool = False,
        dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
        matmul_nbits: bool = False,
        max_file_size: int = MAX_FILE_SIZE,
        use_cache: bool = False,
    ) -> None:
        """Write ``quark_model.onnx``: QuantizeLinear and DequantizeLinear, weights as codes.

        Needs the package onnxscript.

        Args:
            model: A frozen model, or one that was imported. It is not changed.
            input_args: Example inputs: a tensor, a tuple of arguments or a mapping of them.
            input_names: Names of the inputs in the graph; by default those of ``forward``.
            output_names: Names of the outputs; by default those that the model gives them.
            verbose: Passed to ``torch.onnx.export``.
            opset_version: Version of the operators; by default 20, 21 where blocks, 4-bit or 16-bit
                codes need it, 25 for 2-bit codes.
            do_constant_folding: Whether the graph is simplified.
            operator_export_type: Must be None or ``OperatorExportTypes.ONNX``.
            uint4_int4_flag: Accepted for compatibility: 4-bit codes always have a type of their
                own.
            dynamic_shapes: Axes of each input that may have any size, with names for them, such as
                ``{"x": {0: "batch"}}``. By default the first axis of every input, and the second
                of integers and flags such as token ids.
            matmul_nbits: Whether linear layers of which only the weight is quantized, to integers
                of up to 8 bits, become the MatMulNBits of ONNX Runtime.
            max_file_size: Bytes above which weights go to ``quark_model.onnx.data``.
            use_cache: Whether keys and values of earlier tokens are inputs and outputs of a decoder
                (see ``docs/onnx.md``). ``input_args`` are still those of a call without a cache.

        Raises:
            FileExistsError: The directory is in use and ``overwrite`` is off.
            ImportError: A package is missing.
            ValueError: An option is not supported; the model does not take the inputs, has no graph
                that computes it, or cannot be traced; or ``verify`` finds other outputs.
        """
        _check_operators(operator_export_type)
        options = OnnxOptions(
            input_names,
            output_names,
            verbose,
            opset_version,
            do_constant_folding,
            dynamic_shapes,
            matmul_nbits,
            max_file_size,
            use_cache,
        )
        self.export("onnx", model, ExportSettings(inputs=input_args, graph=options))

    def export(self, container: str, model: nn.Module, settings: ExportSettings) -> None:
        """Write a model to a container, and verify the result if ``verify`` is set.

        Args:
            container: Name of the container, one of ``CONTAINERS``.
            model: A frozen model, or one that was imported. It is not changed.
            settings: Settings of the export.

        Raises:
            FileExistsError: The directory is in use and ``overwrite`` is off.
            ImportError: A package is missing.
            OSError: The disk is too full. Nothing is left behind.
            TypeError: The model is no module, or is compiled, parallel or has adapters.
            ValueError: The container is unknown or cannot hold the model, or verification failed.
        """
        check_module(model)
        check_plain(model)
        kind = get_container(container)
        kind.check_installed()
        kind.check_in_memory(model)
        if self.verify:
            kind.check_verifiable({type_name(p.dtype) for p in model.parameters()})
        check_vacant(self.export_dir, self.overwrite)

        @contextmanager
        def target(size: int) -> Iterator[Path]:
            with fresh_directory(
                self.export_dir, self.overwrite, size, settings.announce
            ) as directory:
                yield directory
                if settings.card is not None:
                    settings.card(directory)
                self.verdict = (
                    kind.verify(directory, model, inputs=settings.inputs) if self.verify else None
                )

        kind.write(model, target, settings)


def export_safetensors(
    model: nn.Module,
    output_dir: str | Path,
    custom_mode: str = "quark",
    weight_format: str | None = None,
    pack_method: str = "reorder",
    tokenizer: Any | None = None,
    overwrite: bool = False,
) -> None:
    """Write a frozen model as safetensors; see ``ModelExporter.export_safetensors_model``.

    Args:
        model: A frozen model.
        output_dir: Directory to write.
        custom_mode: Checkpoint format.
        weight_format: ``real_quantized`` (default) or ``fake_quantized``.
        pack_method: ``reorder`` or ``order``.
        tokenizer: Tokenizer to write beside the model.
        overwrite: Whether an existing directory may be replaced.
    """
    options = JsonExporterConfig(
        weight_format=weight_format or "real_quantized", pack_method=pack_method
    )
    exporter = ModelExporter(ExporterConfig(options), output_dir, overwrite)
    exporter.export_safetensors_model(model, custom_mode=custom_mode, tokenizer=tokenizer)


def export_gguf(
    model: nn.Module,
    output_dir: str | Path,
    model_type: str,
    tokenizer_path: str | Path,
    overwrite: bool = False,
) -> None:
    """Write a frozen model as GGUF; see ``ModelExporter.export_gguf_model``."""
    ModelExporter(None, output_dir, overwrite).export_gguf_model(model, tokenizer_path, model_type)


def export_onnx(
    model: nn.Module,
    output_dir: str | Path,
    input_args: Any,
    opset_version: int | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    verbose: bool = False,
    do_constant_folding: bool = True,
    operator_export_type: Any = None,
    uint4_int4_flag: bool = False,
    dynamo: bool = True,
    overwrite: bool = False,
    **options: Any,
) -> None:
    """Write a frozen model as ONNX; see ``ModelExporter.export_onnx_model``.

    Args:
        model: A frozen model.
        output_dir: Directory to write.
        input_args: Example inputs.
        opset_version: Version of the operators.
        input_names: Names of the inputs.
        output_names: Names of the outputs.
        verbose: Passed to ``torch.onnx.export``.
        do_constant_folding: Whether the graph is simplified.
        operator_export_type: Must be None or ``OperatorExportTypes.ONNX``.
        uint4_int4_flag: Accepted for compatibility.
        dynamo: Accepted for compatibility.
        overwrite: Whether an existing directory may be replaced.
        **options: ``dynamic_shapes``, ``matmul_nbits`` and ``max_file_size`` of that method.
    """
    ModelExporter(None, output_dir, overwrite).export_onnx_model(
        model,
        input_args,
        input_names,
        output_names,
        verbose,
        opset_version,
        do_constant_folding,
        operator_export_type,
        **options,
    )


def _check_operators(kind: Any) -> None:
    if getattr(kind, "name", "ONNX") != "ONNX":
        raise ValueError(
            f"operator_export_type={kind}: only operators of ONNX are written. Leave it out, or "
            "give OperatorExportTypes.ONNX."
        )


_map_to_quark = map_to_quark  # the name that Transformers imports
