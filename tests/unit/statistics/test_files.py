"""Statistics come back from files as they were, or not at all."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelQuantizer, collect_statistics, load_statistics, save_statistics
from quark.torch.digests import DIGESTS
from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig
from quark.torch.statistics.files import HEADER, TENSORS
from tests.mutations import mutations


@pytest.fixture(scope="module")
def statistics(build, batches):
    return collect_statistics(build(), batches)


@pytest.fixture
def stored(statistics, tmp_path):
    save_statistics(statistics, tmp_path / "kept")
    return tmp_path / "kept"


def test_everything_comes_back(statistics, stored):
    found = load_statistics(stored)
    for field in ("model", "data", "readers", "tokens", "units", "probes", "fine_probes"):
        assert getattr(found, field) == getattr(statistics, field)
    assert list(found.inputs) == list(statistics.inputs)
    for name, gram in statistics.inputs.items():
        assert torch.equal(found.inputs[name].total, gram.total)
        assert torch.equal(found.inputs[name].magnitude, gram.magnitude)
        assert found.inputs[name].tokens == gram.tokens
    assert list(found.samples) == list(statistics.samples)
    for name, tokens in statistics.samples.items():
        assert torch.equal(found.samples[name], tokens)
    assert list(found.ranges) == list(statistics.ranges)
    for name, kept in statistics.ranges.items():
        other = found.ranges[name]
        assert torch.equal(other.channels.lo, kept.channels.lo)
        assert torch.equal(other.channels.hi, kept.channels.hi)
        assert torch.equal(other.histogram.counts, kept.histogram.counts)
        assert other.histogram.limit == kept.histogram.limit


@pytest.mark.parametrize("algorithm", [AWQConfig(), GPTQConfig()], ids=["awq", "gptq"])
def test_results_are_the_same_bits(algorithm, statistics, stored, build, config_of):
    config = config_of("int4_wo_32", algo_config=[algorithm])
    states = [
        ModelQuantizer.freeze(
            ModelQuantizer(config).quantize_model(build(), statistics=given)
        ).state_dict()
        for given in (statistics, load_statistics(stored))
    ]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_experts_without_data_come_back_empty(build, tmp_path):
    model = build("mixtral", num_local_experts=8, num_experts_per_tok=1)
    statistics = collect_statistics(model, [torch.tensor([[5, 5]])])
    idle = {name for name, gram in statistics.inputs.items() if gram.total is None}
    assert idle
    save_statistics(statistics, tmp_path / "kept")
    found = load_statistics(tmp_path / "kept")
    assert {name for name, gram in found.inputs.items() if gram.total is None} == idle
    assert set(found.samples) == set(found.inputs) - idle
    assert found.range_of(min(idle), "input_tensors").is_empty


def test_what_stands_there_is_kept_unless_told(statistics, stored):
    with pytest.raises(FileExistsError):
        save_statistics(statistics, stored)
    (stored / "tokenizer.json").touch()
    save_statistics(statistics, stored, overwrite=True)
    assert sorted(file.name for file in stored.iterdir()) == [DIGESTS, HEADER, TENSORS]


def test_nothing_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_statistics(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"layout": 1}, {"tokens": None}, {"inputs": {}}],
    ids=["layout", "no tokens", "other keys"],
)
def test_another_header_is_refused(change, stored):
    header = json.loads((stored / HEADER).read_text("utf-8"))
    header = {"inputs": {}} if "inputs" in change else {**header, **change}
    (stored / HEADER).write_text(json.dumps(header), "utf-8")
    with pytest.raises(ValueError, match="collect them anew"):
        load_statistics(stored)


def test_damaged_tensors_are_refused(stored):
    data = (stored / TENSORS).read_bytes()
    (stored / TENSORS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="damaged"):
        load_statistics(stored)


def test_missing_tensors_are_refused(stored):
    header = json.loads((stored / HEADER).read_text("utf-8"))
    header["tokens"]["model.layers.7.mlp.up_proj"] = 3
    (stored / HEADER).write_text(json.dumps(header), "utf-8")
    with pytest.raises(ValueError, match="lacks tensors"):
        load_statistics(stored)


@pytest.mark.parametrize("key", ["probes", "fine_probes"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [(-1.0, " is negative"), (math.nan, r"\[2\]: expected a number")],
    ids=["negative", "nan"],
)
def test_probes_that_no_run_gives_are_refused(stored, key, value, problem):
    header = json.loads((stored / HEADER).read_text("utf-8"))
    name = next(iter(header[key]))
    header[key][name][2] = value
    (stored / HEADER).write_text(json.dumps(header), "utf-8")
    with pytest.raises(ValueError, match=f"{key}.{name}{problem}"):
        load_statistics(stored)


@pytest.mark.parametrize("key", ["units", "probes"])
def test_a_header_that_lacks_a_layer(stored, key):
    header = json.loads((stored / HEADER).read_text("utf-8"))
    (name, *_) = header["units"].pop() if key == "units" else [header["probes"].popitem()[0]]
    (stored / HEADER).write_text(json.dumps(header), "utf-8")
    with pytest.raises(ValueError, match=f"{key} lacks the layer '{name}'"):
        load_statistics(stored)


@pytest.mark.parametrize("part", ["total", "magnitude", "sample", "lo"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_tensors_that_are_not_finite_are_refused(stored, part, value):
    tensors = load_file(stored / TENSORS)
    name = next(name for name in tensors if name.endswith(f".{part}"))
    tensors[name].view(-1)[0] = value
    save_file(tensors, stored / TENSORS)
    found, owner = load_statistics(stored), name.rpartition(".")[0]
    of_part = {"sample": found.samples, "lo": found.ranges}
    with pytest.raises(ValueError, match=f"{owner}.{part} holds NaN or infinity.*collect them"):
        of_part.get(part, found.inputs)[owner]


def test_files_of_earlier_versions_have_one_probe(stored):
    expected = load_statistics(stored)
    header = json.loads((stored / HEADER).read_text("utf-8"))
    del header["fine_probes"]
    (stored / HEADER).write_text(json.dumps(header), "utf-8")
    found = load_statistics(stored)
    assert (found.probes, found.fine_probes) == (expected.probes, {})
    for name, probe in found.probes.items():
        assert found.loss(name, 0.5 * probe.error) == pytest.approx(
            0.5 * found.loss(name, probe.error)
        )


@pytest.mark.parametrize("seed", range(3))
def test_mutated_headers(stored, build, config_of, seed):
    """Each is read and used, or refused with one kind of error."""
    sound = json.loads((stored / HEADER).read_text())
    refused = 0
    for what, data in mutations(sound, 100, seed):
        (stored / HEADER).write_text(json.dumps(data))
        try:
            statistics = load_statistics(stored)
            assert {*statistics.probes, *statistics.fine_probes} <= {*statistics.readers}
            for part in (statistics.inputs, statistics.samples, statistics.ranges):
                list(part.items())
            statistics.check(build())
            for name in statistics.readers:
                statistics.range_of(name, "input_tensors")
        except ValueError as error:
            refused += 1
            assert "anew" in str(error) or "twice" in str(error), what
        except Exception as error:
            raise AssertionError(what) from error
    assert refused > 50


@pytest.mark.parametrize("part", ["total", "magnitude", "sample", "lo", "hi", "counts"])
def test_tensors_of_another_shape(stored, part):
    tensors = load_file(stored / TENSORS)
    name = next(name for name in tensors if name.endswith(f".{part}"))
    save_file({**tensors, name: torch.zeros(2, 3, 4)}, stored / TENSORS)
    with pytest.raises(ValueError, match=f"{name} is .*which no such tensor is"):
        load_statistics(stored)


def test_statistics_of_another_width(stored, build, config_of):
    tensors = load_file(stored / TENSORS)
    name = next(name for name in tensors if name.endswith(".total"))
    owner = name.removesuffix(".total")
    parts = {"total": torch.eye(3), "magnitude": torch.ones(3), "sample": torch.ones(2, 3)}
    tensors |= {f"{owner}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, stored / TENSORS)
    config = config_of("int4_wo_32", algo_config=[AWQConfig()])
    with pytest.raises(ValueError, match="have 3 inputs, the layer"):
        ModelQuantizer(config).quantize_model(build(), statistics=load_statistics(stored))
