"""Models with quantized and packed layers as graphs of torch.export and torch.compile."""

import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.nn import stored_tensor
from quark.torch.quantization.nn.packed_parameter import PackedParameter
from tests.configurations import preset, quantized
from tests.unit.quantization.nn.caches import GROUP, IDS, INT8, R3, config_of

NAMES = [name for name in scheme_names() if not name.endswith(("_64", "_128"))]
CACHES = {"per tensor": config_of(INT8), "groups, rotated": config_of(GROUP, algorithms=[R3])}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}


def _nightly(cases, ordinary):
    return [c if c in ordinary else pytest.param(c, marks=pytest.mark.nightly) for c in cases]


class Operators(nn.Module):
    """One of each operator that can be quantized, with channels that groups of 32 divide."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 64)
        self.bag = nn.EmbeddingBag(32, 64)
        self.linear = nn.Linear(64, 96)
        self.conv1d = nn.Conv1d(96, 32, 3, padding=1)
        self.conv2d = nn.Conv2d(32, 32, (1, 3), padding=(0, 1))
        self.conv3d = nn.Conv3d(32, 32, 1)
        self.up = nn.ConvTranspose2d(32, 32, (1, 2), stride=(1, 2))

    def forward(self, ids):  # (batch, tokens)
        x = self.linear(F.relu(self.tokens(ids))).transpose(1, 2)
        x = self.conv2d(self.conv1d(x).unsqueeze(2))
        x = self.up(self.conv3d(x.unsqueeze(2)).squeeze(2))
        return x.mean((2, 3)).repeat(1, 2) + self.bag(ids)


class Logits(nn.Module):
    """A language model from ids to logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def check_export(module, *inputs):
    """Check a graph of any batch and number of tokens on several inputs, and return it."""
    shapes = ({0: Dim("batch"), 1: Dim("tokens", max=64)},)
    with torch.no_grad():
        program = torch.export.export(module, inputs[:1], dynamic_shapes=shapes)
        for x in inputs:
            assert torch.equal(program.module()(x), module(x))
    return program


def compiled(module, backend="eager"):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend)


def check_compiled(module, x):
    with torch.no_grad():
        assert torch.equal(compiled(module)(x), module(x))


@pytest.fixture
def loaded(build, export):
    """Quantize a model of one block, write it and load it."""

    def loaded(config, model=None, **options):
        model = model or build(num_hidden_layers=1)
        config = preset(config) if isinstance(config, str) else config
        return load_checkpoint(export(quantized(model, config, data=[IDS]), **options)).eval()

    return loaded


@pytest.mark.parametrize("frozen", [False, True], ids=["calibrated", "frozen"])
@pytest.mark.parametrize("name", _nightly(NAMES, ["int8", "w_int4_per_group_asym"]))
@pytest.mark.sampled(2)
def test_every_operator(name, frozen):
    torch.manual_seed(0)
    ids, layer = torch.randint(0, 32, (2, 6)), scheme(name, 32)
    weight = type(layer)(weight=layer.weight)
    config = Config(layer, layer_quant_config={"tokens": weight, "bag": weight})
    model = quantized(Operators().eval(), config, data=[ids], frozen=frozen)
    check_export(model, ids, torch.randint(0, 32, (3, 9)))
    check_compiled(model, ids)


class TestLoadedModels:
    @pytest.mark.parametrize("name", _nightly(NAMES, ["int8", "nvfp4"]))
    def test_every_scheme(self, loaded, name):
        layers, x = loaded(name).model.layers[0].mlp, torch.randn(2, 12, 64)
        check_export(layers, x, x[:1, :5].repeat(3, 1, 1))
        check_compiled(layers, x)

    @pytest.mark.parametrize(
        ("name", "mode"),
        [
            ("uint4_wo_32", "awq"),
            ("uint4_wo_32", "gptq"),
            ("fp8", "fp8"),
            ("int4_wo_32", "compressed-tensors"),
            ("nvfp4", "compressed-tensors"),
        ],
    )
    @pytest.mark.sampled(2)
    def test_every_layout(self, loaded, name, mode):
        layers = loaded(name, custom_mode=mode).model.layers[0].mlp
        x = torch.randn(2, 12, 64)
        check_export(layers, x)
        check_compiled(layers, x)

    def test_programs_on_disk_hold_the_codes(self, loaded):
        model = Logits(loaded("int4_wo_32"))
        program = check_export(model, IDS, IDS[:1, :5].repeat(3, 1))
        state = model.state_dict()
        assert program.state_dict.keys() == state.keys()
        for name, tensor in program.state_dict.items():
            assert torch.equal(tensor, state[name])
            assert tensor.dtype == torch.int32 or not name.endswith("proj.weight")
        assert sum(t.nbytes for t in program.constants.values()) < 100  # of rotary embedding
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        again = torch.export.load(buffer)
        with torch.no_grad():
            expected = model(IDS)
            assert torch.equal(again.module()(IDS), expected)
            decomposed = again.run_decompositions()
            torch.testing.assert_close(decomposed.module()(IDS), expected)
        nbytes = sum(t.nbytes for t in state.values())
        assert sum(t.nbytes for t in decomposed.state_dict.values()) == nbytes

    def test_a_program_leaves_the_layer_as_it_was(self, loaded):
        layer, x = loaded("int8").model.layers[0].mlp.up_proj, torch.randn(2, 64)
        before = {name: t.clone() for name, t in layer.state_dict().items()}
        torch.export.export(layer, (x,))
        with pytest.raises(Exception, match="reduction dim"):
            torch.export.export(layer, (x[:, :3],))
        weight = dict(layer.named_parameters())["weight"]
        assert type(weight) is PackedParameter and weight.shape == (96, 64)
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())

    @pytest.mark.parametrize("how", ["deep", "flat", "pickle"])
    def test_copies(self, loaded, how):
        layer = loaded("int8").model.layers[0].mlp.up_proj
        if how == "pickle":
            buffer = io.BytesIO()
            torch.save(layer, buffer)
            buffer.seek(0)
            assert buffer.getbuffer().nbytes < 64 * 96 + 8192  # codes once
            other = torch.load(buffer, weights_only=False)
        else:
            other = copy.deepcopy(layer) if how == "deep" else copy.copy(layer)
        x = torch.randn(3, 64)
        with torch.no_grad():
            assert torch.equal(compiled(other)(x), layer(x))

    def test_converted_layers_and_other_codes(self, loaded):
        layer = loaded("int8").model.layers[0].mlp.up_proj.to(torch.bfloat16)
        x, graph = torch.randn(3, 64, dtype=torch.bfloat16), compiled(layer)
        with torch.no_grad():
            before = layer(x)
            assert torch.equal(graph(x), before)
            layer.weight.data = torch.zeros_like(layer.state_dict()["weight"])
            assert not torch.equal(layer(x), before)
            assert torch.equal(graph(x), layer(x))

    def test_models_that_read_the_weight_itself(self, loaded):
        class Reader(nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer

            def forward(self, x):
                weight = self.layer.weight
                return F.linear(x.to(weight.dtype), weight) * weight.shape[0]

        reader, x = Reader(loaded("int4_wo_32").model.layers[0].mlp.up_proj), torch.randn(3, 64)
        with torch.no_grad():
            assert torch.equal(torch.export.export(reader, (x,)).module()(x), reader(x))
            assert torch.equal(compiled(reader)(x), reader(x))


@pytest.mark.parametrize("name", _nightly(CACHES, ["groups, rotated"]))
def test_keys_after_rotary_embedding(loaded, name):
    model = Logits(loaded(CACHES[name]))
    check_export(model, IDS)
    check_compiled(model, IDS)


@pytest.mark.parametrize("name", _nightly(["int8", "mxfp4"], ["mxfp4"]))
def test_experts(loaded, build, name):
    experts = loaded(name, build("mixtral", **MOE)).model.layers[0].mlp
    x = torch.randn(2, 12, 64)
    check_export(experts, x, x[:1, :1])  # one token leaves two experts without any
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_compiled(experts, x)


class CountGraphs:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph


@pytest.mark.parametrize("is_loaded", [False, True], ids=["frozen", "loaded"])
def test_equal_layers_share_a_graph(loaded, build, is_loaded):
    model = build()
    model = loaded("nvfp4", model) if is_loaded else quantized(model, preset("nvfp4"), data=[IDS])
    torch._dynamo.reset()
    count, x = CountGraphs(), torch.randn(2, 64)
    with torch.no_grad():
        for block in model.model.layers:
            graph = torch.compile(block.mlp, backend=count, fullgraph=True)
            assert torch.equal(graph(x), block.mlp(x))
    assert count.graphs == 1


class TestOtherProcesses:
    @pytest.mark.nightly
    def test_programs_need_the_operators_alone(self, loaded, tmp_path):
        layers, x = loaded("int8").model.layers[0].mlp, torch.randn(2, 64)
        torch.export.save(torch.export.export(layers, (x,)), tmp_path / "model.pt2")
        torch.save((x, layers(x)), tmp_path / "data.pt")
        code = (
            "import torch; from quark.torch import register_custom_operators;"
            "register_custom_operators();"
            f"x, y = torch.load({str(tmp_path / 'data.pt')!r});"
            f"program = torch.export.load({str(tmp_path / 'model.pt2')!r});"
            "assert torch.equal(program.module()(x), y)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_strict_programs_say_what_they_need(self, loaded, monkeypatch):
        layer, x = loaded("int8").model.layers[0].mlp.up_proj, torch.randn(2, 64)
        program = torch.export.export(layer, (x,), strict=True)
        assert torch.equal(program.module()(x), layer(x))
        monkeypatch.setattr(stored_tensor, "_STORED", {})
        with pytest.raises(LookupError, match=r"without strict=True"):
            program.module()(x)


def test_generation(loaded):
    model = loaded("int8")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(model.generate(IDS, **options, cache_implementation="static"), expected)


@pytest.mark.parametrize("name", _nightly(["int8", "mxfp4"], ["int8"]))
def test_gradients(build, name):
    model = quantized(build(num_hidden_layers=1), preset(name), data=[IDS], frozen=False)
    layers, x = model.model.layers[0].mlp, 3 * torch.randn(2, 12, 64)
    inputs = [x.requires_grad_(), *layers.parameters()]
    expected = torch.autograd.grad((layers(x) ** 2).sum(), inputs)
    grads = torch.autograd.grad((compiled(layers, "aot_eager")(x) ** 2).sum(), inputs)
    assert len(grads) == 4
    for grad, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, wanted)
        assert grad.abs().sum() > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["int8", "nvfp4", "int4_wo_32"])
def test_inductor(loaded, name):
    layer, x = loaded(name).model.layers[0].mlp.up_proj, torch.randn(5, 64)
    with torch.no_grad():
        assert torch.equal(compiled(layer, "inductor")(x), layer(x))
