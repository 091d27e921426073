"""Each operator against the same operator of torch on tensors quantized by hand."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch import ModelExporter, ModelImporter, ModelQuantizer
from quark.torch.export import ExporterConfig, JsonExporterConfig
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.spec_classes import BFP16Spec, MX6Spec, OCP_MXFP4Spec
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.packed import PackedLayer
from tests.configurations import spec

GROUP, RAGGED = 4, 10
EPS = 2.0**-23  # scale of zeros, such as the padding row of an embedding


class Net(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, *args):
        return self.op(*args)


def transposed_linear():
    op = Conv1D(12, 32)
    nn.init.normal_(op.bias.detach())
    return op


def ids(*shape):
    return (torch.randint(0, 40, shape),)


def bags():
    return torch.randint(0, 40, (11,)), torch.tensor([0, 4, 4, 9])


def values(*shape):
    return lambda: (torch.randn(shape),)


# Name -> (makes the operator, makes its arguments).
OPERATORS = {
    "Linear": (lambda: nn.Linear(32, 12), values(3, 5, 32)),
    "Linear without bias": (lambda: nn.Linear(32, 12, bias=False), values(3, 32)),
    "Conv1d": (
        lambda: nn.Conv1d(8, 12, 3, padding=1, padding_mode="circular"),
        values(2, 8, 9),
    ),
    "Conv2d": (lambda: nn.Conv2d(8, 12, 3, stride=2, padding=1), values(2, 8, 9, 9)),
    "Conv2d in groups": (
        lambda: nn.Conv2d(16, 12, 3, groups=4, dilation=2, padding="same", padding_mode="reflect"),
        values(2, 16, 8, 8),
    ),
    "Conv2d by channel": (
        lambda: nn.Conv2d(8, 8, (2, 4), groups=8, padding=(1, 0), padding_mode="replicate"),
        values(8, 7, 7),
    ),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2, stride=(1, 2, 1)), values(1, 4, 4, 5, 4)),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1, groups=2),
        values(2, 8, 5, 5),
    ),
    "Embedding": (lambda: nn.Embedding(40, 32, padding_idx=3), lambda: ids(2, 7)),
    "EmbeddingBag of sums": (lambda: nn.EmbeddingBag(40, 32, mode="sum"), bags),
    "EmbeddingBag of means": (lambda: nn.EmbeddingBag(40, 32), lambda: ids(2, 7)),
    "Conv1D": (transposed_linear, values(3, 5, 32)),
}
LOOKUPS = [name for name in OPERATORS if name.startswith("Embedding")]
each_operator = pytest.mark.parametrize("name", OPERATORS)


INT8 = spec("int8", "per_tensor", symmetric=True)
UINT8 = spec("uint8", "per_tensor", symmetric=False)


def int8(x, amax):
    scale = (amax / 127.5).clamp(min=EPS)
    return (x * (1 / scale)).round().clamp(-128, 127) * scale


def per_tensor(x, seen=None):
    return int8(x, (x if seen is None else seen).abs().max())


def asymmetric(x, seen):
    lo, hi = seen.min().clamp(max=0), seen.max().clamp(min=0)
    scale = (hi - lo) / 255
    zero = (-lo / scale).round()
    return (((x * (1 / scale)).round() + zero).clamp(0, 255) - zero) * scale


def per_channel(x):
    return int8(x, x.flatten(1).abs().amax(1).reshape(-1, *[1] * (x.dim() - 1)))


def per_second_axis(x):
    return per_channel(x.transpose(0, 1)).transpose(0, 1)


def per_group(x):
    groups = x.reshape(-1, GROUP)
    scale = (groups.abs().amax(1, keepdim=True) / 7.5).clamp(min=EPS)
    return ((groups * (1 / scale)).round().clamp(-8, 7) * scale).reshape(x.shape)


def ragged_groups(x):
    rows = []
    for row in x.flatten(1):
        for group in row.split(RAGGED):
            scale = (group.abs().max() / 448).clamp(min=EPS)
            codes = (group * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
            rows.append(codes.float() * scale)
    return torch.cat(rows).reshape(x.shape)


# Name -> (specification of a weight, the same by hand).
WEIGHTS = {
    "tensor": (INT8, per_tensor),
    "channel": (spec("int8", "per_channel", ch_axis=0, symmetric=True), per_channel),
    "second axis": (spec("int8", "per_channel", ch_axis=1, symmetric=True), per_second_axis),
    "group": (
        spec("int4", "per_group", ch_axis=-1, group_size=GROUP, symmetric=True),
        per_group,
    ),
    "ragged": (spec("fp8_e4m3", "per_group", ch_axis=-1, group_size=RAGGED), ragged_groups),
}
# Formats whose values are checked elsewhere; their last blocks are ragged here.
BLOCKS = {
    "mxfp4": OCP_MXFP4Spec(ch_axis=-1).to_quantization_spec(),
    "mx6": MX6Spec(ch_axis=-1, block_size=16).to_quantization_spec(),
    "bfp16": BFP16Spec(ch_axis=-1).to_quantization_spec(),
}


def config(**tensors):
    return Config(
        global_quant_config=QuantizationConfig(),
        layer_quant_config={"op": QuantizationConfig(**tensors)},
    )


def quantized(op, data, **tensors):
    with torch.no_grad():
        return ModelQuantizer(config(**tensors)).quantize_model(Net(copy.deepcopy(op)), data)


def problem(name):
    make, arguments = OPERATORS[name]
    return make(), arguments(), arguments()


def weight_by_hand(op, by_hand):
    weight = op.weight.detach()
    return by_hand(weight.T).T if isinstance(op, Conv1D) else by_hand(weight)


@each_operator
@pytest.mark.parametrize("kind", WEIGHTS)
@torch.no_grad()
def test_weight(name, kind):
    op, seen, x = problem(name)
    how, by_hand = WEIGHTS[kind]
    net = quantized(op, [list(seen)], weight=how)
    assert type(net.op).__name__ == f"Quant{type(op).__name__}"
    reference = copy.deepcopy(op)
    reference.weight.data = weight_by_hand(op, by_hand).contiguous()
    expected = reference(*x)
    assert torch.equal(net(*x), expected)
    assert not torch.equal(expected, op(*x))
    assert torch.equal(ModelQuantizer.freeze(net)(*x), expected)
    assert torch.equal(net.op.weight, reference.weight)


@each_operator
@torch.no_grad()
def test_all_tensors(name):
    op, seen, x = problem(name)
    tensors = {"weight": INT8, "bias": INT8, "input_tensors": INT8, "output_tensors": UINT8}
    if name in LOOKUPS:
        del tensors["input_tensors"]
    net = quantized(op, [list(seen)], **tensors)
    reference = copy.deepcopy(op)
    for parameter in reference.parameters():
        parameter.data = per_tensor(parameter.data)
    inputs = x if name in LOOKUPS else (per_tensor(x[0], seen[0]),)
    expected = asymmetric(reference(*inputs), op(*seen))
    assert torch.equal(net(*x), expected)
    assert torch.equal(ModelQuantizer.freeze(net)(*x), expected)


@pytest.mark.parametrize(
    ("name", "where"),
    [("Conv2d", "72 elements along axis 1"), ("Conv1D", "32 elements along axis 0")],
)
def test_groups_that_do_not_divide(name, where):
    op, seen, _ = problem(name)
    how = spec("int4", "per_group", ch_axis=-1, group_size=5, symmetric=True)
    with pytest.raises(ValueError, match=f"op.weight: group_size=5 does not divide its {where}"):
        quantized(op, [list(seen)], weight=how)


@torch.no_grad()
def test_output_size_of_a_transposed_convolution():
    op = nn.ConvTranspose2d(4, 6, 3, stride=2)
    net = quantized(op, None, weight=INT8)
    reference = copy.deepcopy(op)
    reference.weight.data = per_tensor(op.weight.data)
    x = torch.randn(1, 4, 5, 5)
    for size in ([11, 11], [12, 12]):
        y = net(x, size)
        assert list(y.shape[2:]) == size
        assert torch.equal(y, reference(x, size))


class TestWhatIsQuantized:
    @pytest.fixture
    def net(self):
        return nn.ModuleDict({name: OPERATORS[name][0]() for name in OPERATORS})

    @staticmethod
    def names(net):
        return {name for name, module in net.items() if isinstance(module, FakeQuantizedLayer)}

    def quantize(self, net, **rest):
        layer = QuantizationConfig(weight=INT8)
        rest = {"global_quant_config": layer, **rest}
        return self.names(ModelQuantizer(Config(**rest)).quantize_model(net))

    def test_global(self, net):
        assert self.quantize(net) == {
            "Linear",
            "Linear without bias",
            "Conv2d",
            "Conv2d in groups",
            "Conv2d by channel",
            "ConvTranspose2d",
            "Conv1D",
        }

    @pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv3d, nn.Embedding, nn.EmbeddingBag])
    def test_by_type(self, net, kind):
        found = self.quantize(
            net,
            global_quant_config=QuantizationConfig(),
            layer_type_quant_config={kind: QuantizationConfig(weight=INT8)},
        )
        assert found == {name for name in OPERATORS if name.split()[0] == kind.__name__}

    @pytest.mark.parametrize("name", ["Conv1d", "Conv3d", "Embedding", "EmbeddingBag of sums"])
    def test_by_name(self, net, name):
        found = self.quantize(
            net,
            global_quant_config=QuantizationConfig(),
            layer_quant_config={name: QuantizationConfig(weight=INT8)},
        )
        assert found == {name}


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda net: pickle.loads(pickle.dumps(net))}


class TestCopies:
    @each_operator
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("state", ["quantized", "frozen", "packed"])
    @torch.no_grad()
    @pytest.mark.sampled(3, covers=True)
    def test_are_equal_and_apart(self, name, way, state, tmp_path):
        op, seen, x = problem(name)
        tensors = {"weight": WEIGHTS["group"][0], "output_tensors": UINT8}
        net = quantized(op, [list(seen)], **tensors)
        if state != "quantized":
            ModelQuantizer.freeze(net)
        if state == "packed":
            ModelExporter(tmp_path / "export").export_safetensors_model(net)
            net = ModelImporter(tmp_path / "export", "safetensors").import_model_info(
                Net(OPERATORS[name][0]())
            )
        expected = net(*x)
        other = WAYS[way](net)
        assert type(other.op) is type(net.op)
        assert torch.equal(other(*x), expected)
        other.op.state_dict()["weight"].zero_()
        assert torch.equal(net(*x), expected)

    @torch.no_grad()
    def test_a_pickle_in_another_process(self, tmp_path):
        """Where the class of an operator of Transformers was not made yet."""
        op, seen, _ = problem("Conv1D")
        net = quantized(op, [list(seen)], weight=INT8, output_tensors=UINT8).op
        torch.save(net, tmp_path / "op.pt")
        code = "import sys, torch; print(type(torch.load(sys.argv[1], weights_only=False)))"
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "op.pt"], capture_output=True, text=True
        )
        assert "QuantConv1D" in done.stdout, done.stderr


class TestCheckpoints:
    @pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
    @pytest.mark.parametrize("kind", [*WEIGHTS, *BLOCKS])
    @each_operator
    @torch.no_grad()
    @pytest.mark.sampled(3)
    def test_a_module(self, name, kind, weight_format, tmp_path):
        op, seen, x = problem(name)
        how = BLOCKS[kind] if kind in BLOCKS else WEIGHTS[kind][0]
        tensors = {"weight": how, "bias": INT8, "output_tensors": UINT8}
        if name not in LOOKUPS:
            tensors["input_tensors"] = INT8
        net = ModelQuantizer.freeze(quantized(op, [list(seen)], **tensors))
        options = ExporterConfig(JsonExporterConfig(weight_format=weight_format))
        path = tmp_path / "export"
        ModelExporter(options, path).export_safetensors_model(net)
        expected = net(*x)
        for device in ("cpu", "meta"):
            with torch.device(device):
                fresh = Net(OPERATORS[name][0]())
            loaded = ModelImporter(path, "safetensors").import_model_info(fresh)
            assert isinstance(loaded.op, PackedLayer)
            assert type(loaded.op).__name__ == f"QParams{type(op).__name__}"
            assert torch.equal(loaded.op.value("weight"), net.op.weight)
            assert torch.equal(loaded(*x), expected)

    @pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
    @pytest.mark.parametrize("kind", ["channel", "group", "ragged", "mxfp4", "bfp16"])
    def test_gpt2(self, build, quantize, export, logits, kind, weight_format):
        from transformers import AutoModelForCausalLM

        how = BLOCKS[kind] if kind in BLOCKS else WEIGHTS[kind][0]
        layer = QuantizationConfig(weight=how, input_tensors=INT8)
        model = quantize(build("gpt2"), Config(global_quant_config=layer, exclude=["lm_head"]))
        block = model.transformer.h[0]
        assert type(block.mlp.c_fc).__name__ == "QuantConv1D"
        expected = logits(model)
        path = export(model, weight_format=weight_format)
        loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(report.values()), report
        imported = ModelImporter(path, "safetensors").import_model_info(
            build("gpt2", device="meta")
        )
        for other in (loaded, imported):
            assert type(other.transformer.h[0].mlp.c_fc).__name__ == "QParamsConv1D"
            assert torch.equal(logits(other), expected)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag], ids=lambda k: k.__name__)
def test_a_look_up_leaves_the_quantized_weight_alone(kind):
    """Torch rescales rows above ``max_norm`` in the weight it is given."""
    layer = kind(20, 8, max_norm=0.5)
    spec = QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=0)
    config = Config(layer_type_quant_config={kind: QuantizationConfig(weight=spec)})
    model = ModelQuantizer(config).quantize_model(nn.Sequential(layer))
    ids = torch.arange(6).view(2, 3)
    model(ids).sum().backward()
    ModelQuantizer.freeze(model)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model(ids)
    assert torch.equal(model[0].weight, before)
