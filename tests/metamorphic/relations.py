"""Changes that must not matter: each makes the files of a quantized model in another way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import (
    Journal,
    ModelExporter,
    ModelQuantizer,
    import_model_from_safetensors,
)
from quark.torch.export import convert
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.file_to_file import quantize_files
from quark.torch.export.recognition import load_checkpoint
from quark.torch.pipeline.statistics import digest
from quark.torch.quantization.config.algo import GPTQConfig
from tests.configurations import preset, quantized
from tests.device.stand_in import TYPE, stand_in
from tests.models.test_streamed import streamed
from tests.unit.quantization.same_bits import data, model_of

SHARDS = "20KB"
INDEX = "model.safetensors.index.json"
SEQUENCES = 3


class Case(NamedTuple):
    """A model of a family, quantized by a scheme, with GPTQ or without, written in a layout."""

    family: str
    scheme: str
    layout: str
    solved: bool = False


class Material(NamedTuple):
    """A float model on disk, and the files of its quantized copy."""

    case: Case
    source: Path
    expected: Path

    @property
    def config(self):
        """The configuration."""
        return preset(self.case.scheme, *[GPTQConfig()] * self.case.solved)

    @property
    def batches(self):
        """Sequences, one in each batch."""
        return [batch["input_ids"][:, :24] for batch in data(self.case.family, SEQUENCES)]


def write(model, directory, layout, **options):
    """Write a quantized model in a layout."""
    exporter = ModelExporter(directory)
    exporter.export_safetensors_model(model, custom_mode=layout, **options)
    return directory


def make(case, directory):
    """Write a model and the files of its quantized copy to a directory."""
    made = Material(case, directory / "model", directory / "expected")
    model_of(case.family).to(torch.bfloat16).save_pretrained(made.source)
    model = quantized(load_checkpoint(made.source), made.config, made.batches)
    write(model, made.expected, case.layout)
    return made


def tensors_of(directory):
    """Return the digest of each tensor of a checkpoint, whatever the files are called."""
    digests = {}
    for file in sorted(directory.glob("*.safetensors")):
        digests |= {name: digest(tensor) for name, tensor in load_file(file).items()}
    return digests


def values_of(directory):
    """Return the digest of each parameter and buffer of a checkpoint in float."""
    model = import_model_from_safetensors(None, directory, dequantize=True)
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


def files_of(directory):
    """Return the bytes of each file of a directory."""
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def rename_shards(directory):
    """Give the shards of a checkpoint other names, in another order of the index."""
    index = json.loads((directory / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 1
    others = {name: f"part-{chr(ord('z') - place)}.safetensors" for place, name in enumerate(names)}
    for name, other in others.items():
        (directory / name).rename(directory / other)
    entries = reversed(index["weight_map"].items())
    index["weight_map"] = {tensor: others[name] for tensor, name in entries}
    (directory / INDEX).write_text(json.dumps(index))


# ---- functions of (material, directory) that return a directory ---------------------------------


def other_batches(made, directory):
    """The data is one batch."""
    model = load_checkpoint(made.source)
    model = quantized(model, made.config, [torch.cat(made.batches)])
    return write(model, directory, made.case.layout)


def other_source_shards(made, directory):
    """The float model lies in shards of other names and another order."""
    source = directory.with_name("shards")
    load_checkpoint(made.source).save_pretrained(source, max_shard_size=SHARDS)
    rename_shards(source)
    model = quantized(load_checkpoint(source), made.config, made.batches)
    return write(model, directory, made.case.layout)


def in_parts(made, directory):
    """One unit of the model is in memory at a time."""
    model = quantized(streamed(made.source), made.config, made.batches)
    return write(model, directory, made.case.layout)


def from_files(made, directory):
    """Files are quantized without a model."""
    settings = ExportSettings(custom_mode=made.case.layout)
    quantize_files(made.config, made.source, directory, settings)
    return directory


def killed_and_resumed(made, directory):
    """A run ends after the first block; another one goes on with its journal."""
    place = directory.with_name("journal")

    def run(model, is_killed):
        blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        with Journal(place) as journal:
            if is_killed:
                blocks[1].register_forward_pre_hook(lambda *_: 1 / 0 if journal.finished else None)
            quantizer = ModelQuantizer(made.config, journal=journal)
            return quantizer.freeze(quantizer.quantize_model(model, made.batches))

    with pytest.raises(ZeroDivisionError):
        run(load_checkpoint(made.source), is_killed=True)
    model = run(load_checkpoint(made.source), is_killed=False)
    return write(model, directory, made.case.layout)


def two_threads(made, directory):
    """Torch computes with two threads."""
    torch.set_num_threads(2)
    try:
        model = quantized(load_checkpoint(made.source), made.config, made.batches)
    finally:
        torch.set_num_threads(1)
    return write(model, directory, made.case.layout)


def on_another_device(made, directory):
    """The model is quantized on a device."""
    with stand_in():
        model = load_checkpoint(made.source).to(TYPE)
        batches = [batch.to(TYPE) for batch in made.batches]
        return write(quantized(model, made.config, batches), directory, made.case.layout)


def in_another_process(made, directory):
    """Another process quantizes and writes."""
    command = [sys.executable, __file__, json.dumps([*made.case]), made.source, directory]
    root = str(Path(__file__).parents[2])
    subprocess.run(
        [str(part) for part in command],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    return directory


def read_again(made, directory):
    """The files are loaded and written again."""
    return write(load_checkpoint(made.expected), directory, made.case.layout)


def read_from_other_files(made, directory):
    """The files are shards of other names and another order, loaded and written again."""
    model = quantized(load_checkpoint(made.source), made.config, made.batches)
    shards = write(model, directory.with_name("shards"), made.case.layout, max_shard_size=SHARDS)
    rename_shards(shards)
    return write(load_checkpoint(shards), directory, made.case.layout)


def converted_and_back(other, made, directory):
    """The files are converted to another layout and back."""
    between = directory.with_name("between")
    convert(made.expected, between, other)
    convert(between, directory, made.case.layout)
    return directory


def in_float32(made, directory):
    """The model is loaded in float32, which holds the values of bfloat16."""
    model = load_checkpoint(made.source).float()
    return write(quantized(model, made.config, made.batches), directory, made.case.layout)


def main(case, source, directory):
    """Quantize and write in this process."""
    torch.set_num_threads(1)
    made = Material(Case(*json.loads(case)), Path(source), Path(directory))
    model = quantized(load_checkpoint(made.source), made.config, made.batches)
    write(model, made.expected, made.case.layout)


if __name__ == "__main__":
    main(*sys.argv[1:])
