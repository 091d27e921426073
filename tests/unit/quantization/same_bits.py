"""Ways of quantizing that must give the same bits however the work is divided."""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from quark.torch import Journal, ModelQuantizer
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph.residency import residency_of, resident
from quark.torch.pipeline.journal import PassFiles
from quark.torch.pipeline.statistics import digest
from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    BlockwiseJointTuningConfig,
    GPTAQConfig,
    GPTQConfig,
    OnlineRotationConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SparseGPTConfig,
    SVDQuantConfig,
    WandaConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.presets import kv_cache_scheme
from tests.configurations import preset, quantized
from tests.models.architectures import build, small_config

ONLINE = RotationConfig(
    rotation_size=32,
    online_config=OnlineRotationConfig(online_rotation_layers=["*_proj"], use_input_prescale=True),
)
WAYS = {
    "to nearest": ("int4_wo_32",),
    "static": ("fp8",),
    "cached heads": ("int4_wo_32",),
    "awq": ("uint4_wo_32", AWQConfig()),
    "gptq": ("int4_wo_32", GPTQConfig()),
    "chosen damping": ("int4_wo_32", GPTQConfig(choose_damping=True, random_tokens=0.25)),
    "gptaq": ("int4_wo_32", GPTAQConfig()),
    "qronos": ("int4_wo_32", QronosConfig()),
    "yaqa": ("int4_wo_32", YaqaConfig(choose_damping=True)),
    "autoround": ("int4_wo_32", AutoRoundConfig(iters=2, batch_size=2)),
    "joint tuning": ("uint4_wo_32", BlockwiseJointTuningConfig(epochs=1)),
    "smooth": ("int8", SmoothQuantConfig()),
    "autosmoothquant": ("int8", AutoSmoothQuantConfig()),
    "sparsegpt": ("int4_wo_32", SparseGPTConfig(), GPTQConfig()),
    "wanda": ("uint4_wo_32", WandaConfig(), AWQConfig()),
    "svdquant": ("int8", SVDQuantConfig(svd_rank=4, min_layer_size=0)),
    "all experts": ("fp8", GPTQConfig()),
    "online rotation": ("mxfp4", ONLINE),
    "rotation and gptq": ("int4_wo_32", RotationConfig(), GPTQConfig()),
}


def data(family, sequences):
    """Sequences of 256 tokens, 8 to a chunk; a decoder after an encoder gets others."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (sequences, 256), generator=generator)
    if family not in ("bart", "t5"):
        return [{"input_ids": row} for row in ids.split(1)]
    return [{"input_ids": row, "decoder_input_ids": row.flip(1)} for row in ids.split(1)]


def model_of(family):
    """A small model."""
    if family not in ("bart", "t5"):
        return build(small_config(family, num_hidden_layers=2), torch.float32)
    from transformers import AutoModelForSeq2SeqLM

    config = small_config(family, is_encoder_decoder=True, max_position_embeddings=256)
    torch.manual_seed(0)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def config_of(way):
    """Return the configuration of a way to quantize."""
    name, *algorithms = WAYS[way]
    config = preset(name, *algorithms)
    config.moe_calibrate_all_experts = way == "all experts"
    caches = {"static": "fp8", "cached heads": "int4_per_head"}
    if way in caches:
        config.kv_cache_post_rope = way == "cached heads"
        cache = kv_cache_scheme(caches[way])
        layer = replace(config.global_quant_config, output_tensors=cache)
        config.layer_quant_config = dict.fromkeys(["*k_proj", "*v_proj"], layer)
        config.kv_cache_quant_config = dict(config.layer_quant_config)
    return config


def bits_of(way, batches, family="llama"):
    """Return a digest of each tensor of a model that is quantized on some data."""
    model = quantized(model_of(family), config_of(way), batches)
    return {name: digest(x) for name, x in model.state_dict().items()}


class Killed(Exception):
    """Takes the place of a signal."""


def streamed_bits_of(way, batches, family, directory, blocks=None):
    """Return the digests of a model that is read in parts, with a journal.

    Args:
        way: As in ``bits_of``.
        batches: Likewise.
        family: Its directory in ``directory`` has the model, and will have the journal.
        directory: A directory that all processes see.
        blocks: The run is killed once it has finished so many blocks, and None comes back; None for
            no kill.
    """
    place = directory / f"{family} {way}"
    model = stream_model(place / "model")
    residency_of(model).limit = residency_of(model).activation_limit = 0
    try:
        with Journal(place / "journal") as journal, killed_after(blocks):
            quantizer = ModelQuantizer(config_of(way), journal=journal)
            model = quantizer.quantize_model(model, batches)
    except Killed:
        return None
    model = ModelQuantizer.freeze(model)
    with resident(model, ""):
        return {name: digest(x) for name, x in model.state_dict().items()}


@contextmanager
def killed_after(blocks):
    """End a run in all of its processes as soon as it has finished so many blocks."""
    write, count = PassFiles.write, 0

    def stop(self, *arguments):
        nonlocal count
        entry, count = write(self, *arguments), count + 1
        if count == blocks:
            raise Killed
        return entry

    PassFiles.write = stop
    try:
        yield
    finally:
        PassFiles.write = write


def cut(batches, size):
    """The sequences of some batches, in batches of another size."""
    if isinstance(batches[0], dict):
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        parts = {name: torch.split(rows, size) for name, rows in joined.items()}
        return [dict(zip(parts, rows, strict=True)) for rows in zip(*parts.values(), strict=True)]
    return torch.split(torch.cat(batches), size)


def error_of(way, rank, directory):
    """Return the error of a process where only process 1 has a reason to fail."""
    batches, model = data("llama", 2), model_of("llama")
    if rank and way == "other weights":
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1
    if rank and way == "other data":
        batches = batches[::-1]
    if rank and way == "failure":
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    if way == "other files":
        model = stream_model(directory / f"model-{rank}")
    torch.set_num_threads(1 + (rank and way == "other threads"))
    before = {name: digest(x) for name, x in model.state_dict().items()}
    try:
        quantized(model, preset("int4_wo_32", GPTQConfig()), batches)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        is_whole = before == {name: digest(x) for name, x in model.state_dict().items()}
        return f"{type(error).__name__}: {error}", is_whole
    finally:
        torch.set_num_threads(1)


def journal_error_of(way, rank, directory):
    """Return the error of a process that opens a journal, where only one has a reason to fail."""
    try:
        with Journal(
            directory / (f"journal-{rank}" if way == "unshared" else "journal")
        ) as journal:
            if way == "in use":
                Journal(journal.directory)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def main(store, rank, count, cases, sequences):
    """Quantize as one of several processes, and print the digests of each case as JSON."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(count)
    )
    place = Path(store).parent
    for family, way, *streamed in json.loads(cases):
        if family in ERRORS:
            result = ERRORS[family](way, int(rank), place)
        elif streamed:
            blocks, size = streamed
            batches = cut(data(family, int(sequences)), size)
            result = streamed_bits_of(way, batches, family, place.parent, blocks)
        else:
            result = bits_of(way, data(family, int(sequences)), family)
        print(json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


ERRORS = {"error": error_of, "journal": journal_error_of}


if __name__ == "__main__":
    main(*sys.argv[1:])
