"""``quark collect``, ``merge``, ``search`` and what ``quark quantize`` makes of their results."""

import json
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from safetensors.torch import load_file

from quark.torch import load_statistics
from quark.torch.evaluation.predictions import Reference
from quark.torch.quantization.config.config import Config
from quark.torch.search.loss_curve import MIXTURES

FORMATS = "int2_wo_32,int4_wo_32,int8_wo"
DATA = ("--num_calib_data", 4, "--seq_len", 32)


@pytest.fixture
def collected(quark, model_dir, text, tmp_path):
    path = tmp_path / "statistics"
    result = quark(
        *("collect", "--model_dir", model_dir, "--output_dir", path, "--dataset", text, *DATA)
    )
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def search(quark, model_dir, text, tmp_path):
    """Search from statistics and return the result and the configuration file."""

    def search(*flags):
        path = tmp_path / "mixed.json"
        given = ("--model_dir", model_dir, "--output", path, "--formats", FORMATS)
        return quark("search", *given, "--eval_data", text, "--seq_len", 32, *flags), path

    return search


def test_collect_writes_statistics(collected, quark, model_dir):
    statistics = load_statistics(collected)
    assert len(statistics.readers) == 14
    for probes in (statistics.probes, statistics.fine_probes):
        assert probes and all(probe.sensitivity > 0 for probe in probes.values())
    again = quark("collect", "--model_dir", model_dir, "--output_dir", collected)
    assert again.exit_code == 2
    assert "overwrite" in again.output


@pytest.fixture
def parts(quark, model_dir, text, tmp_path):
    """Statistics of either half of a text."""
    lines = text.read_text("utf-8").split(". ")
    paths = []
    for name, half in (("one", lines[:20]), ("two", lines[20:])):
        (tmp_path / f"{name}.txt").write_text(". ".join(half), "utf-8")
        paths.append(tmp_path / name)
        given = ("--dataset", tmp_path / f"{name}.txt", "--output_dir", paths[-1], "--probes", 1)
        result = quark("collect", "--model_dir", model_dir, *given, *DATA)
        assert result.exit_code == 0, result.output
    return paths


def test_statistics_of_parts_are_merged(parts, quark, model_dir, tmp_path):
    path = tmp_path / "merged"
    result = quark("merge", *parts, "--output_dir", path)
    assert result.exit_code == 0, result.output
    assert "size on disk" in result.stdout
    merged, halves = load_statistics(path), [load_statistics(part) for part in parts]
    for name, count in merged.tokens.items():
        assert count == sum(half.tokens[name] for half in halves)
    flags = ("--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", "--statistics", path)
    given = ("--model_dir", model_dir, "--output_dir", tmp_path / "out", "--skip_evaluation")
    result = quark("quantize", *given, *flags)
    assert result.exit_code == 0, result.output
    again = quark("merge", *parts, "--output_dir", path, "--overwrite")
    assert again.exit_code == 0, again.output


def test_what_cannot_be_merged(parts, refused, model_dir, tmp_path):
    target = ("--output_dir", tmp_path / "merged")
    assert "does not exist" in refused("merge", parts[0], tmp_path / "nowhere", *target)
    assert "1 and 3 are of the same data" in refused("merge", *parts, parts[0], *target)
    assert "overwrite" in refused("merge", *parts, "--output_dir", parts[1])
    assert "Missing argument" in refused("merge", *target)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--quant_scheme", "int4_wo_32", "--quant_algo", "awq"),
        ("--quant_scheme", "fp8", "--kv_cache_dtype", "fp8"),
        ("--quant_scheme", "fp8", "--kv_cache_dtype", "fp8", "--weight_matrix_merge"),
    ],
    ids=["awq", "ranges", "shared ranges"],
)
def test_quantizing_from_statistics_takes_no_text(
    flags, collected, quantize, quark, model_dir, tmp_path
):
    expected, _ = quantize(*flags, *DATA)
    path = tmp_path / "from-statistics"
    given = ("--model_dir", model_dir, "--output_dir", path, "--skip_evaluation")
    result = quark("quantize", *given, *flags, "--statistics", collected)
    assert result.exit_code == 0, result.output
    assert "none needed" in result.output
    found, other = (load_file(p / "model.safetensors") for p in (path, expected))
    assert [name for name, tensor in other.items() if not tensor.equal(found[name])] == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--quant_algo", "qronos"), "got qronos"),
        ((), "got none"),
        (("--quant_algo", "gptq", "--statistics", "nowhere"), "nowhere"),
    ],
    ids=["algorithm", "no algorithm", "no statistics"],
)
def test_statistics_that_do_not_serve(flags, said, collected, quark, model_dir, tmp_path):
    given = ("--model_dir", model_dir, "--output_dir", tmp_path / "out", "--skip_evaluation")
    kept = () if "--statistics" in flags else ("--statistics", collected)
    result = quark("quantize", *given, "--quant_scheme", "int4_wo_32", *kept, *flags)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_search_writes_a_configuration_that_quantize_takes(search, quantize, text, tmp_path):
    picture = tmp_path / "mixed.svg"
    result, path = search(
        *("--dataset", text, *DATA, "--target_bits", 5.5, "--quant_algo", "gptq"),
        *("--picture", picture, "--skip_evaluation"),
    )
    assert result.exit_code == 0, result.output
    config = Config.from_dict(json.loads(path.read_text("utf-8")))
    assert [options.name for options in config.algo_config] == ["gptq"]
    assert config.exclude == ["lm_head"]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    out, printed = quantize("--config", path, *DATA)
    (bits,) = (line.split()[-1] for line in printed.splitlines() if "bits per weight" in line)
    assert 4 < float(bits) <= 5.5
    assert (out / "config.json").is_file()


def test_search_among_formats_of_inputs(search, collected, quark, model_dir, tmp_path):
    """What does not fit a layer is left out there, and static ranges need no text."""
    formats = "w_int8_per_channel_a_int8_per_tensor_sym,int4_wo_64,int2_wo_32"
    flags = ("--statistics", collected, "--target_bits", 5.5, "--num_eval_data", 2)
    result, path = search(*flags, "--formats", formats)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.split()}
    assert rows["mixed"][-1] == "%"
    assert "int4_wo_64" not in rows  # as one format for all
    assert "int4_wo_64" in [row[1] for name, row in rows.items() if name.startswith("model.")]
    given = ("--model_dir", model_dir, "--output_dir", tmp_path / "out", "--skip_evaluation")
    result = quark("quantize", *given, "--config", path, "--statistics", collected)
    assert result.exit_code == 0, result.output
    assert "statistics suffice" in result.output
    assert any("input_scale" in name for name in load_file(tmp_path / "out/model.safetensors"))


def test_search_shows_each_layer_and_one_format_for_all(search, collected):
    result, _ = search("--statistics", collected, "--target_bits", 5.5, "--num_eval_data", 2)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.split()}
    assert sum(name.startswith("model.layers.") for name in rows) == 14
    assert {"int2_wo_32", "int4_wo_32", "int8_wo", "mixed"} <= set(rows)
    assert float(rows["mixed"][1]) <= 5.5
    assert float(rows["mixed"][6]) <= float(rows["int4_wo_32"][6])  # losses, after two sizes
    assert rows["mixed"][-1] == "%"


def test_predicted_losses_pass_through_measured_mixtures(search, collected):
    """The smallest mixture is one of them, so its predicted loss is the measured one."""
    given = ("--statistics", collected, "--json", "--overwrite", "--target_bits")
    rows = {}
    for bits, flags in ((8.5, ("--skip_evaluation",)), (3.07, ("--num_eval_data", 2))):
        result, _ = search(*given, bits, *flags)
        assert result.exit_code == 0, result.output
        rows[bits] = {row["name"]: row for row in json.loads(result.stdout)["sizes"]}
    sums, measured = rows[8.5], rows[3.07]
    assert {row["divergence"] for row in sums.values()} == {None}
    mixed = measured["mixed"]
    assert mixed["bits_per_weight"] == measured["int2_wo_32"]["bits_per_weight"]
    assert mixed["divergence"] == pytest.approx(mixed["loss"], rel=1e-6)
    assert mixed["loss"] != pytest.approx(sums["int2_wo_32"]["loss"], rel=1e-3)
    assert measured["int8_wo"]["divergence"] is None
    losses = [measured[name]["loss"] for name in ("int2_wo_32", "int4_wo_32", "int8_wo")]
    assert losses == sorted(losses, reverse=True)


def test_a_mixture_is_measured_once(search, collected, monkeypatch):
    """The smallest mixture is the end of the curve, the mixture, and one format for all layers."""
    titles, compare = [], Reference.compare

    def note(reference, *args, title, **options):
        titles.append(title)
        return compare(reference, *args, title=title, **options)

    monkeypatch.setattr(Reference, "compare", note)
    flags = ("--statistics", collected, "--target_bits", 3.07, "--num_eval_data", 2, "--json")
    result, _ = search(*flags)
    assert result.exit_code == 0, result.output
    assert len(titles) == len(set(titles)) <= MIXTURES
    rows = {row["name"]: row for row in json.loads(result.stdout)["sizes"]}
    assert rows["mixed"]["divergence"] == rows["int2_wo_32"]["divergence"] > 0


def test_losses_of_solved_weights_are_sums(search, collected):
    """Mixtures are measured with rounding to the nearest, which loses more."""
    given = ("--statistics", collected, "--json", "--overwrite", "--quant_algo", "gptq")
    losses = []
    for flags in (("--skip_evaluation",), ("--num_eval_data", 2)):
        result, _ = search(*given, "--target_bits", 5.5, *flags)
        assert result.exit_code == 0, result.output
        losses.append({row["name"]: row["loss"] for row in json.loads(result.stdout)["sizes"]})
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("kind", "most"), [("size", 545_000), ("read", 283_000)])
def test_search_for_a_size_in_bytes(kind, most, search, collected, quantize):
    result, path = search(
        "--statistics", collected, f"--target_{kind}", most, "--skip_evaluation", "--json"
    )
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["sizes"]}
    found = rows["mixed"]["bytes" if kind == "size" else "bytes_per_token"]
    assert most - 2000 < found <= most
    assert rows["int2_wo_32"]["loss"] > rows["mixed"]["loss"] > rows["int8_wo"]["loss"]
    out, _ = quantize("--config", path, *DATA)
    tensors = load_file(out / "model.safetensors")
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored == rows["mixed"]["bytes"]
    table = tensors["model.embed_tokens.weight"].nbytes
    assert stored - table == rows["mixed"]["bytes_per_token"]


def test_a_size_in_bytes_that_is_too_small(search, collected):
    result, _ = search("--statistics", collected, "--target_size", "20kB", "--skip_evaluation")
    said = " ".join(result.output.split())
    assert result.exit_code == 2
    assert "Invalid value for --target_size: 20,000 bytes are less than" in said
    least = said.split("Give --target_size ")[1].split(",")[0]
    result, _ = search("--statistics", collected, "--target_size", least, "--skip_evaluation")
    assert result.exit_code == 0, result.output


def test_a_perplexity_that_no_mixture_keeps(search, collected, monkeypatch):
    compare = Reference.compare
    monkeypatch.setattr(
        Reference, "compare", lambda *args, **o: replace(compare(*args, **o), perplexity=1e9)
    )
    given = ("--formats", "int2_wo_32", "--max_perplexity_increase", 0, "--num_eval_data", 2)
    result, path = search("--statistics", collected, *given)
    assert result.exit_code == 2
    assert "--max_perplexity_increase: even the largest mixture" in " ".join(result.output.split())
    assert not path.exists()


def test_a_text_that_is_too_short_to_evaluate(search, collected, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("Yes.")
    result, _ = search("--statistics", collected, "--target_bits", 5.5, "--eval_data", short)
    assert result.exit_code == 2
    assert "--eval_data" in result.output and "--dataset" not in result.output


def test_formats_that_fit_none_of_some_layers(quark, model_dir, text, build, tmp_path):
    """The formats that are left take more than the budget."""
    directory, path = tmp_path / "odd", tmp_path / "odd.json"
    shutil.copytree(model_dir, directory)
    build(intermediate_size=40, vocab_size=2048).save_pretrained(directory)
    formats = ("--formats", "int2_wo_32,int8_wo", "--target_bits", 3.5)
    given = ("--output", path, "--dataset", text, "--skip_evaluation", *DATA)
    result = quark("search", "--model_dir", directory, *formats, *given)
    assert result.exit_code == 2, result.output
    assert "--target_bits: 3.5 bits per weight are less than" in " ".join(result.output.split())


def test_search_for_a_perplexity(search, collected):
    sizes = []
    for percent in (0.5, 20):
        result, _ = search(
            *("--statistics", collected, "--max_perplexity_increase", percent),
            *("--num_eval_data", 2, "--overwrite"),
        )
        assert result.exit_code == 0, result.output
        (row,) = (line.split() for line in result.stdout.splitlines() if " mixed " in line)
        assert float(row[-2]) <= percent
        sizes.append(float(row[1]))
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--max_perplexity_increase"),
        (("--target_size", "many"), "a size such as 8GB or 500MiB, got 'many'"),
        (("--target_size", "1MB", "--target_read", "1MB"), "give one of"),
        (("--target_bits", 4, "--max_perplexity_increase", 2), "--target_bits"),
        (("--max_perplexity_increase", 2, "--skip_evaluation"), "the perplexity is needed"),
        (("--target_bits", 4, "--formats", "int9"), "'int9' is unknown"),
        (("--target_bits", 4, "--formats", ","), "one or more"),
        (("--target_bits", 4, "--formats", "w_fp8_a_fp8_o_fp8"), "output_tensors"),
        (("--target_bits", 4, "--quant_algo", "smoothquant"), "smooth"),
        (("--target_bits", 4, "--runtime", "fast"), "only --target_ms measures"),
        (("--target_ms", 4, "--runtime", "slow"), "runtime='slow' is unknown"),
        (("--target_bits", 4, "--statistics", "nowhere"), "nowhere"),
        (("--target_bits", 4, "--statistics", "x", "--num_calib_data", 4), "contains this already"),
        (("--target_bits", 4, "--output", "nowhere/mixed.json"), "no directory nowhere"),
        (("--target_bits", 4, "--output", "/"), "is a directory"),
        (("--target_bits", 4, "--output", "a", "--picture", "./a"), "is the file of --output too"),
    ],
)
def test_wrong_calls(flags, said, search):
    result, path = search(*flags)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--target_bits", 2), r"2 is out of reach: .* take 3\.\d+ to 9\.\d+ bits per weight"),
        (("--target_bits", 99), r"99 is out of reach: .* take 3\.\d+ to 9\.\d+ bits per weight"),
        (
            ("--target_bits", 4, "--formats", "int4_wo_32"),
            r"int4_wo_32 take 5\.125 bits per weight",
        ),
        (("--target_bits", 6, "--formats", "int4_wo_128"), "--formats: None of int4_wo_128 fits"),
        (("--target_size", "9TB"), r"9\.0 TB limits nothing: the float model takes \d"),
        (("--target_read", "1GB"), r"1\.0 GB limits nothing: the float model takes \d"),
        (("--target_ms", 1e6), r"1e\+06 limits nothing: the layers take \d.* ms or less"),
        (("--target_ms", 1e-6), r"1e-06 ms are less than \d.* ms, the time of a token"),
    ],
)
@pytest.mark.sampled(2)
def test_budgets_out_of_reach(flags, said, search, collected):
    result, path = search("--statistics", collected, *flags, "--skip_evaluation")
    assert result.exit_code == 2
    assert re.search(said, " ".join(result.output.split())), result.output
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--target_bits", 99), "99 is out of reach"),
        (("--exclude_layers", "*down_porj"), "'*down_porj'. Nearest: down_proj"),
    ],
)
def test_what_does_not_fit_is_refused_before_data_runs(search, text, monkeypatch, flags, said):
    monkeypatch.setattr("quark.cli.search.command.collect", lambda *_: pytest.fail("data ran"))
    result, _ = search("--dataset", text, *DATA, "--target_bits", 6, *flags)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())


def test_search_for_milliseconds(search, collected, quantize, monkeypatch):
    """14 layers: int4 takes 14 ms, int8 28 ms, int2 42 ms; the times are given."""
    per_layer = {"int2_wo_32": 3e-3, "int4_wo_32": 1e-3, "int8_wo": 2e-3}
    runtimes = []

    def times(model, formats, exclude, runtime, device):
        runtimes.append(runtime)
        names = [name for name, _ in model.named_modules() if name.endswith("_proj")]
        return {name: dict.fromkeys(names, per_layer[name]) for name in formats}

    monkeypatch.setattr("quark.torch.search.times.measure_times", times)
    given = ("--statistics", collected, "--skip_evaluation")
    result, _ = search(*given, "--target_ms", 13.9)
    assert result.exit_code == 2
    assert "13.9 ms are less than 14 ms" in " ".join(result.output.split())
    result, path = search(*given, "--target_ms", 20.5, "--runtime", "exact", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["sizes"]}
    chosen = json.loads(result.stdout)["layers"]
    assert sorted(chosen.values()).count("int8_wo") == 6 and "int2_wo_32" not in chosen.values()
    assert rows["mixed"]["milliseconds"] == pytest.approx(20)
    assert rows["int2_wo_32"]["milliseconds"] == pytest.approx(42)
    quantize("--config", path, *DATA)
    result, _ = search(*given, "--target_ms", 20.5, "--overwrite")
    assert "ms per" in result.stdout and runtimes == ["fast", "exact", "fast"]


def test_routers_of_a_mixture_of_experts(quark, mixtral_dir, text, tmp_path):
    flags = ("--model_dir", mixtral_dir, "--output", tmp_path / "mixed.json", "--target_bits", 3.6)
    given = ("--formats", "int2_wo_32,int4_wo_32", "--dataset", text, "--eval_data", text, *DATA)
    result = quark("search", *flags, *given)
    assert result.exit_code == 0, result.output
    assert re.search(r"Routers choose \d\d\.\d% of the experts", result.output)
