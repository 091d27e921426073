"""Models of any size without values: files with true headers that take no room on the disk."""

import torch
from transformers import AutoModelForCausalLM

from quark.torch.export.checkpoint.shards import ShardWriter


def write_headers(config, directory, dtype=torch.bfloat16):
    """Write the configuration of a model, and files whose tensors are holes."""
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    config.architectures = [type(model).__name__]
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tensors = {name: t for name, t in model.state_dict().items() if name not in tied}
    writer = ShardWriter(directory, tensors, "5GB")
    writer._missing.clear()  # as if all had been written
    writer.finish()
    return model
