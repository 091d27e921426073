"""A container that is not part of the package: one .npz file with the tensors of a checkpoint."""

import json

import numpy as np
import torch

from quark.torch.export.checkpoint.architecture import empty_model, made_config
from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.checkpoint.reader import prepare_load
from quark.torch.export.checkpoint.writer import collect, make_format
from quark.torch.export.checkpoint_contents import Contents, summarize
from quark.torch.export.containers.base import Container
from quark.torch.export.formats.base import format_class
from quark.torch.export.verification import verify_own
from quark.torch.files import size_of

ENTRY = "tests.unit.export.containers.toy:Toy"
FILE = "model.npz"
DESCRIPTION = "description"  # name of the array that holds the configuration


class ToyReader:
    """The tensors of a file."""

    def __init__(self, path):
        arrays = dict(np.load(path))
        self.description = json.loads(str(arrays.pop(DESCRIPTION)))
        self.state = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.entries = {
            name: TensorHeader(FILE, tuple(tensor.shape), tensor.dtype)
            for name, tensor in self.state.items()
        }

    def tensor(self, key):
        return self.state[key]

    def tensors(self):
        return iter(self.state.items())


class Toy(Container):
    name = "toy"
    title = "a toy file"
    patterns = (FILE,)

    def holds(self, path):
        return (path / FILE).is_file() or path.name == FILE

    def open(self, path, trust_remote_code=False, **options):
        reader = self.reader(path)
        config = made_config(reader.description["model"], path)
        return prepare_load(empty_model(config, reader.entries, path), self.format(reader), reader)

    def contents(self, path):
        reader = self.reader(path)
        summary = summarize(reader.entries, self.format(reader))
        return Contents(
            reader.description["model"]["model_type"], {"quant_method": "toy"}, "", summary
        )

    def check_writable(self, model, settings):
        make_format(model, None, settings.options, "quark")

    def write(self, model, target, settings):
        fmt = make_format(model, None, settings.options, "quark")
        tensors = {name: tensor.contiguous() for name, tensor in collect(model, fmt).items()}
        description = {"model": model.config.to_dict(), "section": fmt.config_section()}
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        with target(size_of(tensors)) as directory:
            np.savez(directory / FILE, **arrays, **{DESCRIPTION: json.dumps(description)})

    def verify(self, path, model, trust_remote_code=False, inputs=None):
        return verify_own(model, self.size(path), self.loader(path), "toys are read here alone")

    def load_code(self, path):
        return f"model = toy.load({str(path)!r})"

    def reader(self, path):
        return ToyReader(path / FILE if path.is_dir() else path)

    def format(self, reader):
        return format_class("quark").from_section(reader.description["section"])
