"""Files of integers in words, as gptqmodel and auto-round write them, without this package."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

INNER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def words(fields, bits):
    """Words of rows of fields: the bits of a row follow each other, the lowest first."""
    flags = fields.numpy()[..., None] >> np.arange(bits) & 1
    stream = np.packbits(flags.reshape(len(fields), -1).astype(np.uint8), -1, bitorder="little")
    return torch.from_numpy(stream.view(np.int32))


def write(model, path, scheme_of, section, zero_offset, with_groups=True):
    """Write a model with random codes in its blocks, and return the values of these weights.

    Args:
        model: A float model.
        path: Where to write it.
        scheme_of: Function of the name of a layer that returns bits, inputs of a group, and
            whether the layer is symmetric; None for a layer in float.
        section: ``quantization_config``.
        zero_offset: What is subtracted from zero points when they are stored.
        with_groups: Whether ``g_idx`` is stored.
    """
    model.save_pretrained(path)
    tensors, values = load_file(path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(5)
    for key in [key for key in tensors if key.split(".")[-2] in INNER]:
        name, (outputs, inputs) = key.removesuffix(".weight"), tensors[key].shape
        if scheme_of(name) is None:
            values[key] = tensors[key]
            continue
        bits, size, symmetric = scheme_of(name)
        size = inputs if size < 0 else size
        largest, rows = 1 << bits, inputs // size
        codes = torch.randint(0, largest, (outputs, inputs), generator=generator)
        zeros = torch.randint(1, largest, (rows, outputs), generator=generator)
        if symmetric:
            zeros[:] = largest // 2
        scales = torch.rand((rows, outputs), generator=generator) / largest
        tensors[f"{name}.qweight"] = words(codes, bits).T.contiguous()
        tensors[f"{name}.qzeros"] = words(zeros - zero_offset, bits)
        tensors[f"{name}.scales"] = scales
        groups = torch.arange(inputs) // size
        if with_groups:
            tensors[f"{name}.g_idx"] = groups.int()
        values[key] = (codes - zeros[groups].T) * scales[groups].T
        del tensors[key]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    set_section(path, section)
    return values


def set_section(path, section):
    """Replace ``quantization_config`` of a checkpoint."""
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**described, "quantization_config": section}))


def set_tensors(path, change):
    """Change the tensors of a checkpoint: ``change`` takes and returns a dictionary."""
    tensors = change(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
