"""Several devices of one process that share the samples of each block: the bits of one device."""

import gc
import logging
import tempfile
import threading

import pytest
import torch
from accelerate import dispatch_model
from torch.utils.data import DataLoader

from quark.torch import Journal, ModelQuantizer, export_safetensors
from quark.torch.export.checkpoint.prequantized import ATTRIBUTE
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.activation_store import activation_limit, current_limit
from quark.torch.pipeline.replicas import replicate
from quark.torch.quantization import api
from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    AWQConfig,
    GPTQConfig,
    QuaRotConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.nn.linear_experts import LinearExperts
from tests.configurations import preset
from tests.device.stand_in import counted
from tests.device.test_checkpoints import contents
from tests.models.architectures import build, small_config
from tests.unit.quantization.same_bits import model_of

CONFIGS = {
    "static": with_kv_cache(preset("fp8"), ["*k_proj", "*v_proj"], "fp8"),
    "gptq": preset("int4_wo_32", GPTQConfig()),
    "awq": preset("uint4_wo_32", AWQConfig()),
    "yaqa": preset("int4_wo_32", YaqaConfig()),
    "autoround": preset("int4_wo_32", AutoRoundConfig(iters=2, batch_size=2)),
    "quarot and gptq": preset("int4_wo_32", QuaRotConfig(), GPTQConfig()),
}
FAST = {("static", 3)}
PLENTY = 1 << 40


def cases(fast):
    every = [(name, count) for name in CONFIGS for count in (2, 3)]
    return [pytest.param(*c, marks=() if c in fast else pytest.mark.nightly) for c in every]


@pytest.fixture
def small(plain):
    """Make a model with few columns, which are rounded one after the other."""

    def small(blocks=1):
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        return plain(num_hidden_layers=blocks, num_key_value_heads=1, **sizes)

    return small


@pytest.fixture
def data():
    """Seven chunks: sequences of one length run together."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (2, size), generator=generator) for size in range(6, 13)]


@pytest.fixture
def names(device):
    """Return the names of some devices, the first of them where that is one."""

    def names(count):
        if torch.get_device_module(device).device_count() < count:
            pytest.skip(f"this machine has fewer than {count} devices")
        return [f"{device}:{number}" for number in range(count)]

    return names


def quantized(model, config, data, devices, **options):
    quantizer = ModelQuantizer(config, devices=devices, **options)
    return ModelQuantizer.freeze(quantizer.quantize_model(model, data))


def token_counts(model):
    return [m.token_counts for m in model.modules() if isinstance(m, LinearExperts)]


def values(model):
    return {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}


def assert_same(model, other):
    a, b = values(model), values(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(("name", "count"), cases(FAST))
def test_a_model_in_memory(name, count, names, small, data):
    config, devices = CONFIGS[name], names(count)
    one = quantized(small(2).to(devices[0]), config, data, devices[:1])
    several = quantized(small(2).to(devices[0]), config, data, devices)
    assert {str(x.device) for x in several.state_dict().values()} == {devices[0]}
    assert_same(several, one)


@pytest.mark.parametrize(("name", "count"), cases({("gptq", 2)}))
def test_a_model_larger_than_memory(name, count, names, small, data, tmp_path, monkeypatch):
    small(2).save_pretrained(tmp_path / "float")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    devices, sizes = names(count), []
    for number in (1, count):
        model = stream_model(
            tmp_path / "float", PLENTY, device=devices[0], attn_implementation="eager"
        )
        residency_of(model).limit = 0
        model = quantized(model, CONFIGS[name], data, devices[:number])
        changed = [p.stat().st_size for p in tmp_path.glob("temporary/quark-weights-*/*")]
        sizes.append(sum(changed))
        export_safetensors(model, tmp_path / str(number))
        del model
        gc.collect()
    assert contents(tmp_path / "1") == contents(tmp_path / str(count))
    assert sizes[0] == sizes[1]  # the scratch files of the copies are gone


@pytest.mark.parametrize(("name", "count"), cases({("gptq", 2)}))
def test_a_model_on_several_devices(name, count, names, small, data):
    """The blocks of each copy are on other devices than those of the model."""
    config, devices = CONFIGS[name], names(count)
    places = {"lm_head": devices[1], "model.norm": devices[1], "model.rotary_emb": devices[0]}
    places |= {"model.embed_tokens": devices[0]}
    places |= {f"model.layers.{number}": devices[number] for number in range(2)}
    model = dispatch_model(small(2), places, main_device=devices[0], force_hooks=True)
    assert_same(
        quantized(model, config, data, devices),
        quantized(small(2).to(devices[0]), config, data, None),
    )
    for number, block in enumerate(model.model.layers):
        assert {str(x.device) for x in block.state_dict().values()} == {devices[number]}


@pytest.mark.nightly
@pytest.mark.parametrize("memory", [None, PLENTY])
@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "bart"])
def test_other_models(family, memory, names, data, tmp_path):
    """Experts, and a decoder that reads the states of an encoder, in memory and in parts."""
    model_of(family).save_pretrained(tmp_path / "float")
    if family == "bart":
        data = [{"input_ids": x, "decoder_input_ids": x.flip(1)} for x in data]
    devices = names(2)
    for number in (1, 2):
        model = load_checkpoint(tmp_path / "float", max_memory=memory, device=devices[0])
        if memory:
            residency_of(model).limit = 0
        export_safetensors(
            quantized(model, CONFIGS["gptq"], data, devices[:number]), tmp_path / str(number)
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.nightly
def test_a_quantized_source(names, small, data, tmp_path):
    """Layers that stay in float keep the codes of the source."""
    source = ModelQuantizer(preset("fp8")).quantize_model(small(), data)
    export_safetensors(ModelQuantizer.freeze(source), tmp_path / "fp8")
    config, devices = preset("int4_wo_32", exclude=["lm_head", "*self_attn*"]), names(2)
    for number in (1, 2):
        model = load_in_float(tmp_path / "fp8", max_memory=PLENTY, device=devices[0])
        replica = replicate(model, list(map(torch.device, devices)), 1)
        assert vars(replica)[ATTRIBUTE] is vars(model)[ATTRIBUTE]  # which holds the codes
        export_safetensors(quantized(model, config, None, devices[:number]), tmp_path / str(number))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_the_devices_share_the_memory_for_activations(names, small, monkeypatch):
    limits = []
    check = api.check
    monkeypatch.setattr(api, "check", lambda *args: limits.append(current_limit()) or check(*args))
    devices = names(2)
    with activation_limit(1000):
        quantized(small().to(devices[0]), preset("int4_wo_32"), None, devices)
    assert limits == [500, 500]


@pytest.mark.parametrize("kind", ["mixtral", "llama4_text"])
def test_experts(kind, names, data):
    """Tokens of experts are counted on all devices."""
    devices = names(2)
    sizes = {"num_hidden_layers": 1, "num_experts_per_tok": 1 + (kind == "mixtral")}
    shape = small_config(kind, attn_implementation="eager", **sizes)
    one, several = (build(shape, torch.float32).to(devices[0]) for _ in range(2))
    assert_same(
        quantized(several, preset("int8"), data, devices),
        quantized(one, preset("int8"), data, None),
    )
    assert token_counts(several) == token_counts(one)
    assert any(token_counts(one))


def test_each_device_runs_its_part(standin, names, small, data):
    """Of a pass over the data and of the rounding, no device does more than its share."""

    def count(devices, blocks):
        with counted() as counts:
            model = small(blocks).to(devices[0])
            quantized(model, CONFIGS["gptq"], data, devices)
            return counts.by_device()

    def of_a_block(devices):
        one, two = count(devices, 1), count(devices, 2)
        return {
            place: [b - a for a, b in zip(one[place], two[place], strict=True)] for place in two
        }

    ((launches, waits),) = of_a_block(names(1)).values()
    both = of_a_block(names(2))
    assert both.keys() == {0, 1}
    for own, waiting in both.values():
        assert own <= 0.65 * launches
        assert waiting <= 0.9 * waits


def test_data_in_another_order_each_time(names, small, data):
    """Batches are read once, so all devices have the same."""
    rows = [row for batch in data for row in batch]
    loader = DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(0))
    devices = names(2)
    quantized(small().to(devices[0]), CONFIGS["static"], loader, devices)


def test_the_first_device_logs(names, small, data, caplog):
    devices = names(2)
    model = small().to(devices[0])
    with caplog.at_level(logging.INFO, "quark"):
        quantized(model, CONFIGS["gptq"], data, devices)
    assert [r.message for r in caplog.records].count("Model quantization has been completed.") == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_failure_of_one_device(place, names, small, data):
    """The reason is raised, no thread is left, and the model is as it was."""
    devices = names(2)
    model = small().to(devices[0])

    def fail(module, args):
        if str(args[0].device) == devices[place]:
            raise ArithmeticError("the reason")

    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(fail)
    before, threads = values(model), threading.active_count()
    with pytest.raises(ArithmeticError, match="the reason"):
        quantized(model, CONFIGS["gptq"], data, devices)
    assert threading.active_count() == threads
    assert all(torch.equal(x, before[name]) for name, x in values(model).items())


def test_an_interrupt(names, small, data, monkeypatch):
    devices, join = names(2), threading.Thread.join
    model = small().to(devices[0])
    before, threads = values(model), threading.active_count()

    def interrupt(thread, timeout=None):
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantized(model, CONFIGS["gptq"], data, devices)
    assert threading.active_count() == threads
    assert all(torch.equal(x, before[name]) for name, x in values(model).items())


def test_on_after_an_end_with_more_devices(names, small, data, tmp_path):
    """Two devices go on after the first block, which one device has finished."""
    devices, config = names(2), CONFIGS["gptq"]
    one = quantized(small(2).to(devices[0]), config, data, None)
    model = small(2).to(devices[0])
    handle = model.model.layers[1].register_forward_pre_hook(
        lambda *_: 1 / 0 if list(tmp_path.glob("blocks/*")) else None
    )
    with Journal(tmp_path) as journal:
        with pytest.raises(ZeroDivisionError):
            quantized(model, config, data, None, journal=journal)
        handle.remove()
        assert journal.finished == 1
        several = quantized(model, config, data, devices, journal=journal)
        assert journal.finished == 2
    assert_same(several, one)


class TestRefused:
    """What cannot share the work is refused before any work."""

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (["{0}", "cpu"], "cannot share the work"),
            (["cpu", "cpu"], "start several processes"),
            (["{0}", "{0}"], "each device once"),
            (["{0}", "{type}:99"], "each device once"),
            (["{type}", "{0}"], "with its number"),
            (["{1}", "{2}"], "the model lies on {0}. Put it on {1}"),
        ],
    )
    def test_devices(self, given, message, names, small, data):
        every = names(3)

        def fill(text):
            return text.format(*every, type=every[0].partition(":")[0])

        with pytest.raises(ValueError, match=fill(message)):
            quantized(small().to(every[0]), CONFIGS["static"], data, list(map(fill, given)))

    def test_a_model_on_the_cpu(self, names, small, data):
        with pytest.raises(ValueError, match=r"lies on cpu\. Put it on"):
            quantized(small(2), CONFIGS["static"], data, names(2))

    def test_too_little_room_for_a_copy(self, standin, names, small, data, monkeypatch):
        devices = names(2)
        model = small().to(devices[0])
        size = sum(x.numel() * x.itemsize for x in model.parameters())
        monkeypatch.setattr(type(torch.standin), "free", size)  # buffers have no room
        with pytest.raises(ValueError, match=r"GB of \w+:1, .* Load the model in parts"):
            quantized(model, CONFIGS["static"], data, devices)

    def test_no_list(self):
        with pytest.raises(TypeError, match=r"give a list, such as \['cuda:0'\]"):
            ModelQuantizer(CONFIGS["static"], devices="cuda:0")

    def test_a_process_group(self, names, small, data, monkeypatch):
        devices = names(2)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(ValueError, match="start one process for each"):
            quantized(small(2).to(devices[0]), CONFIGS["static"], data, devices)

    def test_a_model_that_cannot_be_copied(self, names, small, data):
        devices = names(2)
        model = small().to(devices[0])
        model.lock = threading.Lock()
        with pytest.raises(TypeError, match=r"cannot be copied to .*: give one device"):
            quantized(model, CONFIGS["static"], data, devices)


def test_copies_stay_tied(names, small):
    """A copy has the values and the ties of the model, and none of its memory."""
    devices = names(2)
    model = small().to(devices[0])
    model.lm_head.weight = model.model.embed_tokens.weight
    replica = replicate(model, list(map(torch.device, devices)), 1)
    assert replica.lm_head.weight is replica.model.embed_tokens.weight
    assert {str(x.device) for x in replica.state_dict().values()} == {devices[1]}
    assert replica.config is not model.config
    assert_same(replica, model)
