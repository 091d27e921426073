"""Other software on the networks of ``nets.py``: its graph mode, or what it has instead.

``python vision_peers.py '"peer"' '"net"' '0' '"float.onnx"' '"logits"'``, run by the environment
of the peer, writes the logits of the pictures of the test for each way, and prints the CPU
seconds. The number is that of the draw of the pictures for calibration; ways that train run for
draw 0 alone. The pictures for calibration and training, and the training itself, are the same for
all. Options that are not set here are the peer's defaults.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import cpu_seconds, say
from nets import BATCH, NETS, Material, fine_tune, load, logits_of, material
from safetensors.torch import save_file

Run = Callable[[torch.Tensor], torch.Tensor]
# Name of a way, and a function that makes it: it returns what computes logits.
Ways = Iterator[tuple[str, Callable[[], Run]]]


def onnxruntime(model: torch.nn.Module, data: Material, path: Path) -> Ways:
    """The quantizer of ONNX Runtime: uint8 activations, int8 weights, quantized sums."""
    import onnxruntime as runtime
    from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    name = runtime.InferenceSession(path).get_inputs()[0].name

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(data.calibration)

        def get_next(self) -> Any:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch.numpy()}

    def run(per_channel: bool, method: CalibrationMethod) -> Run:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            quantize_static(
                path,
                file,
                Reader(),
                per_channel=per_channel,
                calibrate_method=method,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
            session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])

    for kind, per_channel in (("int8 per tensor", False), ("int8 per channel", True)):
        yield kind, lambda p=per_channel: run(p, CalibrationMethod.MinMax)
        yield f"{kind}, percentile", lambda p=per_channel: run(p, CalibrationMethod.Percentile)
        yield f"{kind}, entropy", lambda p=per_channel: run(p, CalibrationMethod.Entropy)


def torchao(model: torch.nn.Module, data: Material, path: Path) -> Ways:
    """Graph mode of torchao with its quantizer for x86: int8 weights per channel."""
    from torchao.quantization.pt2e import (
        allow_exported_model_train_eval,
        move_exported_model_to_eval,
    )
    from torchao.quantization.pt2e.quantize_pt2e import (
        convert_pt2e,
        prepare_pt2e,
        prepare_qat_pt2e,
    )
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    x = data.training.images[:BATCH]
    axes = ({0: torch.export.Dim("batch")},)

    def rounded() -> Run:
        graph = torch.export.export(model, (x,), dynamic_shapes=axes).module()
        how = x86.X86InductorQuantizer()
        how.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(graph, how)
        for batch in data.calibration:
            prepared(batch)
        return convert_pt2e(prepared)

    def trained() -> Run:
        graph = torch.export.export(copy.deepcopy(model).train(), (x,), dynamic_shapes=axes)
        how = x86.X86InductorQuantizer()
        how.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
        prepared = allow_exported_model_train_eval(prepare_qat_pt2e(graph.module(), how))
        observers = torch.ao.quantization.disable_observer
        fine_tune(prepared, data.training, 1, lambda: prepared.apply(observers))
        return convert_pt2e(move_exported_model_to_eval(prepared))

    yield "int8 per channel", rounded
    yield "int8 per channel, trained", trained


def brevitas(model: torch.nn.Module, data: Material, path: Path) -> Ways:
    """Graph mode of brevitas: equalization, int8 weights per tensor, bias correction, GPTQ."""
    from brevitas.graph.calibrate import bias_correction_mode, calibration_mode
    from brevitas.graph.gptq import gptq_mode
    from brevitas.graph.quantize import preprocess_for_quantize, quantize

    def run(equalize: int, corrects: bool, gptq: bool = False) -> Run:
        graph = preprocess_for_quantize(copy.deepcopy(model), equalize_iters=equalize)
        graph = quantize(graph)
        with torch.no_grad():
            with calibration_mode(graph):
                for batch in data.calibration:
                    graph(batch)
            if gptq:
                with gptq_mode(graph) as solver:
                    for _ in range(solver.num_layers):
                        for batch in data.calibration:
                            solver.model(batch)
                        solver.update()
            if corrects:
                with bias_correction_mode(graph):
                    for batch in data.calibration:
                        graph(batch)
        return graph.eval()

    yield "int8 per tensor", lambda: run(0, False)
    yield "int8 per tensor, CLE", lambda: run(20, False)
    yield "int8 per tensor, CLE, bias correction", lambda: run(20, True)
    yield "int8 per tensor, CLE, GPTQ", lambda: run(20, False, True)


def modelopt(model: torch.nn.Module, data: Material, path: Path) -> Ways:
    """ModelOpt, which replaces layers: int8 weights per channel, inputs of layers per tensor."""
    import modelopt.torch.quantization as mtq

    def run(options: dict[str, Any], trains: bool = False) -> Run:
        def calibrate(module: torch.nn.Module) -> None:
            for batch in data.calibration:
                module(batch)

        quantized = mtq.quantize(copy.deepcopy(model), options, calibrate)
        if trains:
            fine_tune(quantized, data.training, 1, lambda: None)
        return quantized.eval()

    yield "int8 per channel, inputs", lambda: run(mtq.INT8_DEFAULT_CFG)
    yield "int8 per channel, inputs, trained", lambda: run(mtq.INT8_DEFAULT_CFG, True)
    yield "MXFP4, inputs", lambda: run(mtq.MXFP4_DEFAULT_CFG)


def amd_quark(model: torch.nn.Module, data: Material, path: Path) -> Ways:
    """Graph mode of amd-quark, which imports under the same name as this package."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import (
        Int8PerTensorSpec,
        QConfig,
        QLayerConfig,
        Uint8PerTensorSpec,
    )
    from quark.torch.quantization.config.type import QuantizationMode

    options = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}

    def run(method: str) -> Run:
        weight = Int8PerTensorSpec(observer_method=method, symmetric=True, **options)
        tensor = Uint8PerTensorSpec(observer_method=method, symmetric=False, **options)
        spec, edge = weight.to_quantization_spec(), tensor.to_quantization_spec()
        layer = QLayerConfig(input_tensors=edge, output_tensors=edge, weight=spec)
        config = QConfig(
            global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode, exclude=[]
        )
        # It takes no axes of any size: smaller batches are filled with pictures of zeros.
        x = data.training.images[:BATCH]
        graph = torch.export.export(model, (x,)).module()
        quantizer = ModelQuantizer(config)
        frozen = quantizer.freeze(quantizer.quantize_model(graph, data.calibration))

        def logits(images: torch.Tensor) -> torch.Tensor:
            filled = torch.cat([images, torch.zeros_like(x)])[:BATCH]
            result: torch.Tensor = frozen(filled)[: len(images)]
            return result

        return logits

    yield "int8 per tensor", lambda: run("min_max")
    yield "int8 per tensor, MSE", lambda: run("MSE")


PEERS = {
    "onnxruntime": onnxruntime,
    "torchao-graphs": torchao,
    "brevitas": brevitas,
    "modelopt": modelopt,
    "amd-quark-graphs": amd_quark,
}


def _ways(peer: str, model: torch.nn.Module, data: Material, path: Path) -> Ways:
    """Iterate over the ways of a peer; one that cannot be imported has one way, which fails."""
    try:
        yield from PEERS[peer](model, data, path)
    except ImportError as error:
        message = str(error)

        def fail() -> Run:
            raise ImportError(message)

        yield "import", fail


def main(peer: str, net: str, draw: int, path: str, stored: str) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    model, data = load(net), material(net, draw)
    logits, seconds, failures = {}, {}, {}
    save_file(logits, stored)
    for title, make in _ways(peer, model, data, Path(path)):
        if title.endswith("trained") and (draw or not NETS[net].epochs):
            continue  # a network of a package comes without its data
        start = cpu_seconds()
        try:
            run = make()
            logits[title] = logits_of(run, data.test).contiguous()
        except Exception as error:  # what a peer cannot do is a figure too
            failures[title] = f"{type(error).__name__}: {error}"[:500]
            say(f"{peer}, {title}: {failures[title]}")
            continue
        seconds[title] = cpu_seconds() - start
        save_file(logits, stored)
    print("\n" + json.dumps({"seconds": seconds, "failures": failures}))


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
