"""Small networks for pictures and sounds, quantized in graph mode, and by other software.

    python benchmarks/vision.py                            # needs scikit-learn and onnxruntime
    python benchmarks/vision.py --nets 'mobilenet;resnet' --ways 'int8 per tensor, CLE;MXFP4'
    python benchmarks/vision.py --nets resnet --peer onnxruntime --peer torchao-graphs
    python benchmarks/vision.py --nets resnet --ways 'layers, GPTQ' --peer modelopt --draws 4

``nets.py`` has the networks and pictures, ``vision_peers.py`` the other software. Every way is
calibrated on the same pictures of the training and judged on the same pictures of the test. *Loss*
is the score of the float network minus that of the quantized one, with the standard error of this
difference over the digits of the test. *Change* is the squared change of the logits, relative to
their squares. *ms* is the time of ONNX Runtime for a batch of 64 pictures on one thread; ways that
differ in their numbers alone have the same time.

``--draws 4`` calibrates on four random draws of the pictures, and prints the mean change with its
standard error, and the difference to the first way, draw by draw. *layers* are ways that quantize
the weights and inputs of layers alone, as ModelOpt does; others quantize every edge of the graph.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import Meter, alternate, in_fresh_process, machine, markdown, say
from nets import (
    BATCH,
    NETS,
    Material,
    Pictures,
    fine_tune,
    load,
    logits_of,
    material,
    mean_and_error,
    scores,
)
from peers import environment
from safetensors.torch import load_file
from torch import nn

from quark.torch import ModelQuantizer, export_onnx
from quark.torch.quantization.config.algo import (
    AlgoConfig,
    AutoRoundConfig,
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
)
from quark.torch.quantization.config.config import (
    Config,
    PassOptions,
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.training import freeze_ranges

PEERS = ("onnxruntime", "torchao-graphs", "brevitas", "modelopt", "amd-quark-graphs")
COLUMNS = {
    "software": "software",
    "way": "way",
    "score": "score",
    "loss": "loss",
    "error": "±",
    "change": "change, %",
    "kib": "KiB",
    "ms": "ms",
    "seconds": "CPU s",
}
OVER_DRAWS = {
    "software": "software",
    "way": "way",
    "change": "change, %",
    "error": "±",
    "difference": "less the first",
    "error of it": "±",
}


@dataclass(frozen=True)
class Way:
    """A way to quantize: specifications of weights, activations and biases, algorithms, training.

    Attributes:
        is_timed: Whether ONNX Runtime is timed on it: it has integer kernels for it.
        is_fused: Whether values before activations such as PReLU are not quantized.
        has_float_outputs: Whether the values that the graph returns are not quantized.
        is_of_layers: Whether inputs and weights of layers are quantized, and nothing else.
    """

    weight: QuantizationSpec
    activation: QuantizationSpec
    algorithms: tuple[AlgoConfig, ...] = ()
    bias: QuantizationSpec | None = None
    epochs: int = 0
    is_timed: bool = False
    is_fused: bool = False
    has_float_outputs: bool = False
    is_of_layers: bool = False

    def config(self) -> Config:
        """Return the configuration of graph mode."""
        outputs = None if self.is_of_layers else self.activation
        layer = QuantizationConfig(self.activation, outputs, self.weight, self.bias)
        types = [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear] if self.is_of_layers else []
        return Config(
            QuantizationConfig() if self.is_of_layers else layer,
            layer_type_quant_config=dict.fromkeys(types, layer),
            quant_mode="fx_graph_mode",  # type: ignore[arg-type]
            exclude=[],
            pass_options=PassOptions(
                fused_activations=self.is_fused, float_outputs=self.has_float_outputs
            ),
            algo_config=list(self.algorithms) or None,
            log_severity_level=3,  # type: ignore[arg-type]
        )


def _spec(dtype: str, qscheme: str, observer: str, symmetric: bool = True) -> QuantizationSpec:
    return QuantizationSpec(
        dtype,  # type: ignore[arg-type]
        observer_cls=observer,  # type: ignore[arg-type]
        qscheme=qscheme,  # type: ignore[arg-type]
        ch_axis=0 if qscheme == "per_channel" else None,
        symmetric=symmetric,
        is_dynamic=False,
    )


def _ways() -> dict[str, Way]:
    observers = [f"PerTensor{name}Observer" for name in ("MinMax", "Percentile", "MSE")]
    extrapolated = _spec("uint8", "per_tensor", "PerTensorExtrapolatedMinMaxObserver", False)
    tensor, _, tensor_mse = (_spec("int8", "per_tensor", name) for name in observers)
    uint8, percentile, mse = (_spec("uint8", "per_tensor", name, False) for name in observers)
    (channel, channel_mse), (int4, int4_mse) = (
        [_spec(d, "per_channel", f"PerChannel{name}Observer") for name in ("MinMax", "MSE")]
        for d in ("int8", "int4")
    )
    mxfp4 = QuantizationSpec("mx", mx_element_dtype="fp4", ch_axis=1)  # type: ignore[arg-type]
    bias = _spec("int32", "per_tensor", observers[0])
    cle, correction, gptq = CLEConfig(), BiasCorrectionConfig(), GPTQConfig()
    absorbing = CLEConfig(absorb_biases=True)
    return {
        "int8 per tensor": Way(tensor, uint8, (), bias, is_timed=True),
        "int8 per tensor, percentile": Way(tensor, percentile, (), bias),
        "int8 per tensor, MSE": Way(tensor_mse, mse, (), bias),
        "int8 per tensor, CLE": Way(tensor, uint8, (cle,), bias, is_timed=True),
        "int8 per tensor, CLE, absorption": Way(tensor, uint8, (absorbing,), bias),
        "int8 per tensor, CLE, bias correction": Way(tensor, uint8, (cle, correction), bias),
        "int8 per tensor, CLE, trained": Way(tensor, uint8, (cle,), bias, 1),
        "int8 per tensor, trained": Way(tensor, uint8, (), bias, 1),
        "int8 per tensor, fused": Way(tensor, uint8, (), bias, is_fused=True),
        "int8 per channel": Way(channel, uint8, (), bias, is_timed=True),
        "int8 per channel, MSE": Way(channel_mse, mse, (), bias),
        "int8 per channel, MSE of weights": Way(channel_mse, uint8, (), bias),
        "int8 per channel, MSE of weights, GPTQ": Way(channel_mse, uint8, (gptq,), bias),
        "int8 per channel, MSE of weights, GPTQ, extrapolated": Way(
            channel_mse, extrapolated, (gptq,), bias
        ),
        "int8 per channel, bias correction": Way(channel, uint8, (correction,), bias),
        "int8 per channel, GPTQ": Way(channel, uint8, (gptq,), bias),
        "int8 per channel, MSE, GPTQ": Way(channel_mse, mse, (gptq,), bias),
        "int8 per channel, fused": Way(channel, uint8, (), bias, is_timed=True, is_fused=True),
        "int8 per channel, MSE of weights, GPTQ, float outputs": Way(
            channel_mse, uint8, (gptq,), bias, has_float_outputs=True
        ),
        "int8 per channel, fused, MSE of weights, GPTQ, float outputs": Way(
            channel_mse, uint8, (gptq,), bias, is_fused=True, has_float_outputs=True
        ),
        "int8 per channel, fused, MSE, GPTQ": Way(channel_mse, mse, (gptq,), bias, is_fused=True),
        "int8 per channel, trained": Way(channel, uint8, (), bias, 1),
        "layers": Way(channel, uint8, (), bias, is_of_layers=True),
        "layers, GPTQ": Way(channel_mse, uint8, (gptq,), bias, is_of_layers=True),
        "int4 per channel": Way(int4, uint8),
        "int4 per channel, MSE": Way(int4_mse, uint8),
        "int4 per channel, MSE, bias correction": Way(int4_mse, uint8, (correction,)),
        "int4 per channel, GPTQ": Way(int4_mse, uint8, (gptq,)),
        "int4 per channel, AutoRound": Way(int4_mse, uint8, (AutoRoundConfig(),)),
        "int4 per channel, trained": Way(int4_mse, uint8, epochs=1),
        "MXFP4": Way(mxfp4, mxfp4),
        "MXFP4, GPTQ": Way(mxfp4, mxfp4, (gptq,)),
        "MXFP4, trained": Way(mxfp4, mxfp4, epochs=1),
    }


WAYS = _ways()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", default=";".join(NETS), help="separated by semicolons")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument(
        "--peer", action="append", choices=PEERS, default=[], help="may be repeated"
    )
    parser.add_argument("--draws", type=int, default=0, help="random draws for calibration")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def quantize(model: torch.nn.Module, way: Way, data: Material) -> torch.fx.GraphModule:
    """Return a frozen graph."""
    batch = torch.export.Dim("batch")
    example = (data.training.images[:BATCH],)
    graph = torch.export.export(model, example, dynamic_shapes=({0: batch},)).module()
    quantizer = ModelQuantizer(way.config())
    quantized = quantizer.quantize_model(graph, data.calibration)
    if way.epochs:
        fine_tune(quantized, data.training, way.epochs, lambda: freeze_ranges(quantized))
    frozen = quantizer.freeze(quantized.eval())
    assert isinstance(frozen, torch.fx.GraphModule)
    return frozen


def kib(model: torch.nn.Module) -> float:
    """Return the size of all parameters: codes and their scales; the others take 32 bits."""
    bits = 32 * sum(p.numel() for p in model.parameters())
    for layer in model.modules():
        if isinstance(layer, FakeQuantizedLayer) and layer.quant_config.weight is not None:
            scheme, elements = layer.quant_config.weight.scheme, layer.weight.numel()
            scales = math.prod(scheme.scale_shape(layer.weight.shape))
            scale_bits = 8 * scheme.scale.stored_dtype.itemsize
            bits += elements * (scheme.fmt.bits - 32) + scale_bits * scales
    return bits / 8 / 1024


def judge(logits: torch.Tensor, original: torch.Tensor, pictures: Pictures) -> dict[str, float]:
    """Return the score, its loss against the float network, and the change of the logits."""
    own, base = scores(logits, pictures), scores(original, pictures)
    loss, error = mean_and_error(base - own)
    change = (logits - original).double().square().sum() / original.double().square().sum()
    score = float(own.mean())
    return {"score": score, "loss": loss, "error": error, "change": 100 * float(change)}


def runner(path: Path, x: torch.Tensor) -> Callable[[], Any]:
    """Return a function that runs an ONNX file on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def own_rows(
    name: str, ways: list[str], folder: Path, draw: int, times: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of the float network and of this package; writes ONNX files.

    Args:
        name: Name of the network.
        ways: Names of ways.
        folder: Where files go to.
        draw: Number of the draw of the pictures for calibration. Draw 0 is timed.
        times: Gets the milliseconds of ONNX Runtime by way.
    """
    model, data = load(name), material(name, draw)
    original = logits_of(model, data.test)
    x = data.test.images[:BATCH]
    axes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(
        model, (x,), folder / "float.onnx", dynamo=True, dynamic_shapes=axes, verbose=False
    )
    work = {"float": runner(folder / "float.onnx", x)} if draw == 0 else {}
    size = sum(p.numel() for p in model.parameters()) / 256
    yield judge(original, original, data.test) | {"way": "float", "kib": size}
    for title in ways:
        way = WAYS[title]
        if way.epochs and not NETS[name].epochs:
            continue  # a network of a package comes without its data
        with Meter() as meter:
            frozen = quantize(model, way, data)
        row = judge(logits_of(frozen, data.test), original, data.test)
        row |= {"way": title, "kib": kib(frozen), "seconds": meter.cpu}
        say(f"{name}, {row}")
        yield row
        if way.is_timed and draw == 0:
            export_onnx(model=frozen, output_dir=folder / title, input_args=x)
            work[title] = runner(folder / title / "quark_model.onnx", x)
    times.update((way, 1000 * seconds) for way, seconds in alternate(work, 15).items())


def peer_rows(name: str, peer: str, folder: Path, draw: int) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of other software, whose logits its own process writes."""
    data = material(name, draw)
    original = logits_of(load(name), data.test)
    stored = str(folder / "logits.safetensors")
    arguments = (peer, name, draw, str(folder / "float.onnx"), stored)
    figures = in_fresh_process("vision_peers.py", *arguments, python=environment(peer))
    for title, logits in load_file(stored).items():
        row = judge(logits, original, data.test)
        yield {"software": peer, "way": title, **row, "seconds": figures["seconds"][title]}
    for title, reason in figures["failures"].items():
        say(f"{peer} cannot compute {title}: {reason}")
        yield {"software": peer, "way": f"{title}: fails"}


def rows_of(name: str, ways: list[str], peers: list[str], draw: int) -> list[dict[str, Any]]:
    """Return the rows of a network for a draw of the pictures for calibration."""
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows = list(own_rows(name, ways, Path(folder), draw, times))
        rows = [{"software": "quark", **row, "ms": times.get(row["way"])} for row in rows]
        for peer in peers:
            rows += peer_rows(name, peer, Path(folder), draw)
    return rows


def over_draws(draws: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each way: its mean change over draws, and the difference to the first."""
    changes: dict[tuple[str, str], list[float]] = {}
    for row in (row for rows in draws for row in rows if row.get("seconds") is not None):
        changes.setdefault((row["software"], row["way"]), []).append(row["change"])
    first = torch.tensor(next(iter(changes.values())), dtype=torch.float64)
    rows = []
    for (software, way), values in changes.items():
        own = torch.tensor(values, dtype=torch.float64)
        if len(own) == len(first):  # a peer may fail on a draw
            figures = (*mean_and_error(own), *mean_and_error(own - first))
            names = ("change", "error", "difference", "error of it")
            rows.append(
                {"software": software, "way": way, **dict(zip(names, figures, strict=True))}
            )
    return rows


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    logging.getLogger("quark").addHandler(logging.NullHandler())
    tables: dict[str, list[dict[str, Any]]] = {}
    ways = [w for w in options.ways.split(";") if w]
    for name in options.nets.split(";"):
        draws = range(1, options.draws + 1) or range(1)
        every = [rows_of(name, ways, options.peer, draw) for draw in draws]
        tables[name] = over_draws(every) if options.draws else every[0]
        say(json.dumps({name: tables[name]}))
    if options.json:
        print(json.dumps({"machine": machine(), "tables": tables}))
        return
    print(machine() + "\n")
    columns = OVER_DRAWS if options.draws else COLUMNS
    for name, rows in tables.items():
        print(markdown(name, list(columns.values()), [[r.get(c) for c in columns] for r in rows]))


if __name__ == "__main__":
    main()
