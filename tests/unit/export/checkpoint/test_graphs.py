"""Quantized graphs in safetensors and in the native format."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark.torch import (
    ModelExporter,
    export_safetensors,
    import_model_from_safetensors,
    load_params,
    save_params,
)
from quark.torch.export import ModelImporter, export_program, verify
from quark.torch.quantization.config.config import (
    BFP16Spec,
    CLEConfig,
    GPTQConfig,
    QATSpec,
    QuantizationConfig,
    QuantizationSpec,
)
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
    INT8,
    INT32,
    NETWORKS,
    UINT8,
    export,
    frozen_graph,
    images,
    network,
)

GRAPH = "fx_graph_mode"
BFP16 = BFP16Spec(ch_axis=1).to_quantization_spec()
INT4 = QuantizationSpec("int4", qscheme="per_channel", ch_axis=0, symmetric=True, is_dynamic=False)
LAYERS = {
    "int8": (EVERYTHING, {}),
    "uint8": (replace(EVERYTHING, input_tensors=UINT8, output_tensors=UINT8, weight=INT4), {}),
    "bfp16": (QuantizationConfig(BFP16, BFP16, BFP16), {}),
    "int32 bias, excluded": (replace(EVERYTHING, bias=INT32), {"exclude": ["head", "*.conv1"]}),
    "gptq": (EVERYTHING, {"algo_config": GPTQConfig()}),
    "trained": (replace(EVERYTHING, input_tensors=replace(INT8, qat_spec=QATSpec())), {}),
}


def frozen(name="resnet", layer=EVERYTHING, **options):
    return frozen_graph(export(network(name)), layer, **options)


def write_native(model, path):
    ModelExporter(export_dir=path).export_quark_model(model)


def other_weights(name):
    """The graph of a model of the same architecture."""
    model = network(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    return export(model)


def check_same(loaded, model):
    with torch.no_grad():
        for x in images(2):
            assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("case", LAYERS)
def test_graphs_are_written_as_tensors_and_loaded_with_their_bits(tmp_path, case):
    layer, options = LAYERS[case]
    model = frozen("resnet", layer, **options)
    export_safetensors(model, tmp_path / "tensors")
    graph = other_weights("resnet")
    code, before = graph.code, {n: t.clone() for n, t in graph.state_dict().items()}
    loaded = import_model_from_safetensors(graph, tmp_path / "tensors")
    check_same(loaded, model)
    assert graph.code == code
    assert all(torch.equal(t, before[n]) for n, t in graph.state_dict().items())
    assert loaded.quant_config == model.quant_config
    if case == "int8":
        stored = load_file(tmp_path / "tensors" / "model.safetensors")
        assert stored["stem.weight"].dtype == torch.int8
        assert torch.equal(stored["edge_quantizers.x.scale"], model.edge_quantizers.x.scale)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_the_native_format_holds_graphs(tmp_path, name):
    options = {"algo_config": CLEConfig()} if name == "mobilenet" else {}
    model = frozen(name, **options)
    write_native(model, tmp_path / "native")
    loaded = ModelImporter(tmp_path / "native").import_model_info(other_weights(name))
    check_same(loaded, model)


def test_a_loaded_graph_is_written_again(tmp_path):
    model, (x,) = frozen(), images(1)
    export_safetensors(model, tmp_path / "first")
    loaded = import_model_from_safetensors(other_weights("resnet"), tmp_path / "first")
    export_safetensors(loaded, tmp_path / "second")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    save_params(loaded, "net", (x,), export_dir=tmp_path / "d", quant_mode=GRAPH)
    check_same(load_params(pth_path=tmp_path / "d/net_quantized.pth", quant_mode=GRAPH), model)
    program = export_program(loaded, (x,))
    assert str(program.graph) == str(export_program(model, (x,)).graph)
    check_same(program.module(), model)


def refused(directory, graph, message):
    with pytest.raises(ValueError, match=message):
        import_model_from_safetensors(graph, directory)


def test_what_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "d"
    export_safetensors(frozen(), path)
    refused(path, export(network("unet")), "other operators than this one gives")
    refused(path, network("resnet"), r"holds a quantized graph: give torch\.export")
    refused(path, frozen(), "holds a quantized graph")
    tensors = load_file(path / "model.safetensors")
    wide = dict(tensors) | {"head.bias": torch.zeros(11)}
    for change, message in (
        ({"edge_quantizers.x.scale": None}, r"edge_quantizers\.x\.scale is missing"),
        ({"edge_quantizers.x.scale": torch.tensor(0.0)}, r"x\.scale is not finite and positive"),
        ({"edge_quantizers.other.scale": torch.tensor(1.0)}, "edge_quantizers.other.scale"),
        (wide, "head.bias"),
    ):
        changed = {n: t for n, t in {**tensors, **change}.items() if t is not None}
        save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
        refused(path, export(network("resnet")), message)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["graph"]["sha256"] = "0" * 64
    (path / "config.json").write_text(json.dumps(config))
    refused(path, export(network("resnet")), "other operators")
    config["graph"] = []
    (path / "config.json").write_text(json.dumps(config))
    refused(path, export(network("resnet")), "config.json: expected quantization_config")


def test_layouts_of_other_software_and_unnamed_types_are_refused(tmp_path):
    with pytest.raises(ValueError, match="custom_mode='awq' has no place for graphs"):
        export_safetensors(frozen(), tmp_path / "d", custom_mode="awq")
    model = frozen("resnet", layer_type_quant_config={nn.MaxPool2d: QuantizationConfig()})
    with pytest.raises(ValueError, match="files cannot name MaxPool2d"):
        export_safetensors(model, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_edges_with_other_tensors_are_refused(tmp_path):
    """A zero point that is missing is not 0, and bytes of another type are other numbers."""
    layer, _ = LAYERS["uint8"]
    export_safetensors(frozen("resnet", layer), tmp_path / "d")
    file, graph = tmp_path / "d" / "model.safetensors", export(network("resnet"))
    tensors = load_file(file)
    scale, zeros = tensors["edge_quantizers.x.scale"], tensors["edge_quantizers.x.zero_point"]
    for name, tensor, message in (
        ("x.zero_point", None, r"edge_quantizers\.x\.zero_point is missing"),
        (
            "x.scale",
            scale.view(torch.int32),
            r"x\.scale is torch\.int32 \[\], expected one of floats",
        ),
        ("x.zero_point", zeros.view(torch.float32), r"x\.zero_point is torch\.float32 .* integers"),
        ("x.scale", scale.expand(3).clone(), r"x\.scale is torch\.float32 \[3\], expected one"),
    ):
        changed = {**tensors, f"edge_quantizers.{name}": tensor}
        save_file({n: t for n, t in changed.items() if t is not None}, file)
        refused(tmp_path / "d", graph, message)


@pytest.mark.parametrize("case", ["int8", "uint8", "bfp16", "int32 bias, excluded", "trained"])
def test_what_is_written_is_verified_by_running(tmp_path, case):
    layer, options = LAYERS[case]
    model, (x,) = frozen("resnet", layer, **options), images(1)
    expected = model(x)
    for write in ("export_safetensors_model", "export_quark_model"):
        exporter = ModelExporter(None, tmp_path / write, verify=True)
        getattr(exporter, write)(model)
        verdict = exporter.verdict
        assert (verdict.reader, verdict.difference) == ("this package", 0) and verdict.spread > 0
        assert torch.equal(model(x), expected) and model.stem.frozen


@pytest.mark.parametrize("name", ["stem.weight", "edge_quantizers.x.scale", "head.bias"])
def test_tensors_that_say_something_else_are_noticed(tmp_path, name):
    model = frozen()
    export_safetensors(model, tmp_path / "d")
    file = tmp_path / "d" / "model.safetensors"
    stored = load_file(file)
    stored[name] = stored[name] * 2 if stored[name].dim() == 0 else stored[name].flip(0)
    save_file(stored, file)
    with pytest.raises(ValueError, match="does not compute what the model in memory does"):
        verify(tmp_path / "d", model)


def test_a_graph_that_was_loaded_is_not_verified_again(tmp_path):
    export_safetensors(frozen(), tmp_path / "first")
    loaded = import_model_from_safetensors(other_weights("resnet"), tmp_path / "first")
    with pytest.raises(ValueError, match="loaded from a checkpoint is not verified"):
        ModelExporter(None, tmp_path / "out", verify=True).export_safetensors_model(loaded)
    assert not (tmp_path / "out").exists()
