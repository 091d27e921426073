"""Damaged files at every way into the package: ``benchmarks/fuzz.py`` does more rounds of this."""

import json
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ROUNDS = 8  # of each door: 19 doors, 152 rounds
WITH_TENSORS = [
    "float",
    "report",
    "quark",
    "awq",
    "gptq",
    "compressed-tensors",
    "fp8",
    "modelopt",
    "mxfp8",
    "mlx",
    "torchao",
    "transforms",
    "mxfp4",
    "native",
    "importer",
    "importer of native",
    "transformers",
    "params",
    "statistics",
]
OTHERS = ["gguf", "options"]
# Doors of files from other doors, opened in two ways, and of graphs, programs and journals.
SEVERAL = [
    "float in parts",
    "awq in parts",
    "fp8 blocks in float",
    "float to files",
    "gptq to files",
    "k-quants",
    "k-quants packed",
    "archive",
    "program",
    "graph",
    "journal",
    "int8 fast",
    "attention",
    "attention per head",
    "attention quark",
    "attention probabilities",
]
# Doors of two linear layers alone: a file opens in some 5 ms.
OF_LAYERS = [
    *("layers quark", "layers awq", "layers gptq", "layers compressed-tensors", "layers fp8"),
    *("layers modelopt", "layers mxfp8", "layers mlx", "layers torchao", "layers transforms"),
    *("layers fp8 blocks", "layers native", "layers int8", "layers int5_wo_32", "layers nvfp4"),
    *("layers mxfp6_e2m3", "layers ptpc_fp8", "layers amdfp4", "layers mx6", "layers bfp16"),
    *("layers compressed mxfp8", "layers modelopt fp8", "layers modelopt nvfp4"),
]
MORE = [
    *("quark in parts", "gptq in parts", "compressed-tensors in parts"),
    *("fp8 in parts", "fp8 blocks in parts", "native in parts"),
    *("quark in float", "awq in float", "gptq in float", "compressed-tensors in float"),
    *("fp8 in float", "native in float", "gguf in float"),
    *("quark fast", "awq fast", "gptq fast", "compressed-tensors fast"),
    *("fp8 fast", "fp8 blocks fast", "native fast"),
    *("quark to files", "awq to files", "compressed-tensors to files", "fp8 to files"),
    "fp8 blocks to files",
    *(f"modelopt {way}" for way in ("in parts", "in float", "fast", "to files")),
    *(f"mxfp8 {way}" for way in ("in parts", "in float", "fast", "to files")),
    *(f"mlx {way}" for way in ("in parts", "in float", "fast", "to files")),
    *(f"torchao {way}" for way in ("in parts", "in float", "fast", "to files")),
    *(f"transforms {way}" for way in ("in parts", "in float", "fast", "to files")),
    *(f"mxfp4 {way}" for way in ("in parts", "in float", "fast", "to files")),
    *("attention in parts", "attention per head in parts", "attention quark in parts"),
    "attention probabilities in parts",
    *(f"compressed {name}" for name in ("int5_wo_32", "nvfp4", "mxfp8", "mxfp6_e2m3", "ptpc_fp8")),
]


@pytest.fixture(scope="module")
def fuzzer():
    """Return the modules of the fuzzer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import damage
        import doors

        yield doors, damage


@pytest.fixture(scope="module")
def rounds(fuzzer):
    """Return the module of the fuzzer that runs rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import fuzz

        yield fuzz


@pytest.fixture(scope="module")
def sound(fuzzer, tmp_path_factory):
    """Return the sound files of a door."""
    import sound_files

    doors, _ = fuzzer
    place = tmp_path_factory.mktemp("sound")

    def sound(name):
        kind = doors.DOORS[name].kind
        if not (place / kind).exists():
            sound_files.write(kind, place / kind)
        return place / kind

    return sound


def test_files_named_after_a_layout_are_in_it(fuzzer, sound):
    import sound_files

    for layout in sound_files.LAYOUTS:
        described = json.loads((sound(layout) / "config.json").read_text())
        method = "compressed-tensors" if layout == "transforms" else layout
        assert described["quantization_config"]["quant_method"] == method, layout


def test_every_door_is_tried(fuzzer):
    doors, _ = fuzzer
    assert {*WITH_TENSORS, *OTHERS, *SEVERAL, *OF_LAYERS, *MORE, "onnx"} == set(doors.DOORS)


@pytest.mark.parametrize("name", WITH_TENSORS)
@pytest.mark.sampled(6)
def test_damaged_tensors_are_refused(fuzzer, sound, tmp_path, name):
    """A tensor is missing, renamed, of another type, or cut. GPTQ can do without group indices."""
    doors, damage = fuzzer
    door = doors.DOORS[name]
    assert door.open(sound(name), door.has_digests) is not None
    refused = 0
    for i, what in zip(range(ROUNDS), cycle(("missing", "renamed", "retyped", "truncated"))):
        path = shutil.copytree(sound(name), tmp_path / str(i))
        place = damage.damage_tensor(path, random.Random(f"{name}-{i}"), what)
        with pytest.raises((ValueError, OSError)) as caught:
            door.open(path, False)
            pytest.fail(f"{place} is loaded")
        assert str(caught.value).strip(), place
        refused += 1
    assert refused == ROUNDS


@pytest.mark.parametrize("name", [*WITH_TENSORS, *OTHERS])
def test_damaged_files(fuzzer, sound, tmp_path, name):
    """A slice of the fuzzer: whatever is not loaded is refused with a message."""
    doors, damage = fuzzer
    door = doors.DOORS[name]
    if name == "gguf":
        pytest.importorskip("gguf")
    for i in range(3):
        path = shutil.copytree(sound(name), tmp_path / str(i))
        damage.damage_file(path, random.Random(f"{name}-{i}"))
        try:
            door.open(path, False)
        except (ValueError, OSError, ImportError) as error:
            assert str(error).strip()
        except Exception as error:
            if door.is_ours:
                pytest.fail(f"{name}, {i}: {error!r}")


@pytest.mark.parametrize(
    "name",
    [*SEVERAL, *OF_LAYERS, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)],
)
@pytest.mark.sampled(3)
def test_rounds_of_the_fuzzer(fuzzer, rounds, sound, tmp_path, name):
    """Outcomes are refusals or results, the same in both ways of opening files."""
    doors, _ = fuzzer
    door = doors.DOORS[name]
    if door.kind in ("gguf", "k-quants"):
        pytest.importorskip("gguf")
    expected = door.open(shutil.copytree(sound(name), tmp_path / "sound"), door.has_digests)
    assert expected is not None
    for i in range(4):
        path = shutil.copytree(sound(name), tmp_path / str(i))
        kind, place = rounds.damage(path, door, random.Random(f"{name}-{i}"))
        outcome = rounds.open_damaged(door, path, kind, expected)
        assert outcome in ("refused", "loaded"), (i, kind, place)


def test_two_ways_that_differ_are_a_defect(fuzzer, rounds, tmp_path):
    doors, _ = fuzzer
    one = torch.ones(1)

    def refuse(path, check_digests):
        raise ValueError("damaged")

    def outcome(first, second, expected=one, **options):
        door = doors.Door("", doors._agree(first, second), **options)
        return rounds.open_damaged(door, tmp_path, "file", expected)

    assert outcome(lambda *_: one, lambda *_: one) == "loaded"
    assert outcome(refuse, refuse) == "refused"
    assert "the results differ by 1" in outcome(lambda *_: one, lambda *_: 2 * one)
    assert "the results differ" in outcome(lambda *_: one, lambda *_: one / 0)
    assert "one way alone refuses: damaged" in outcome(lambda *_: one, refuse)
    assert "another result" in outcome(lambda *_: one, lambda *_: one, 2 * one, is_safe=True)


def test_damage_beside_the_values_changes_no_result(fuzzer, rounds, tmp_path):
    doors, damage = fuzzer
    sound = (8).to_bytes(8, "little") + b"{header}" + b"values"
    damaged = {"header": sound.replace(b"head", b"HEAD"), "cut": sound[:-1], "both": sound[:8]}
    assert all(damage.keeps_values(sound, bytearray(data)) for data in damaged.values())
    assert not damage.keeps_values(sound, bytearray(sound.replace(b"val", b"VAL")))
    door = doors.Door("", lambda *_: torch.ones(1))
    kinds = ("file", "description")
    outcomes = [rounds.open_damaged(door, tmp_path, kind, torch.zeros(1)) for kind in kinds]
    assert outcomes == ["loaded", "another result, without a word"]


def test_counts_go_on_where_they_end(rounds, tmp_path):
    file = tmp_path / "counts.json"
    file.write_text('{"rows": [3]}')
    for refused, loaded in ((2, 1), (4, 0)):
        kept = rounds.Kept(file, 0)
        kept.add("mlx", Counter(refused=refused, loaded=loaded))
    assert rounds.Kept(file, 0).row("mlx") | {"date": ""} == {
        **{"door": "mlx", "seed": 0, "rounds": 7, "date": ""},
        **{"refused": 6, "loaded": 1, "defect": 0},
    }
    assert rounds.Kept(file, 1).row("mlx")["rounds"] == 0
    assert json.loads(file.read_text())["rows"] == [3]


@pytest.mark.parametrize("name", ["float", "native", "gguf"])
def test_a_flipped_bit_is_noticed(fuzzer, sound, tmp_path, name):
    doors, damage = fuzzer
    if name == "gguf":
        pytest.importorskip("gguf")
    path = shutil.copytree(sound(name), tmp_path / "copy")
    damage.damage_data(path, random.Random(0))
    with pytest.raises(ValueError, match="has changed since it was written"):
        doors.DOORS[name].open(path, True)


def test_the_result_of_a_sound_load(fuzzer, sound):
    doors, _ = fuzzer
    first = doors.DOORS["quark"].open(sound("quark"), True)
    for name in ("native", "importer", "transformers"):
        assert torch.equal(doors.DOORS[name].open(sound(name), False), first)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("quantization_config", {"quant_method": ["awq"]}, "quant_method"),
        ("architectures", 7, "is not a list of names"),
    ],
)
def test_types_that_rounds_of_the_fuzzer_had(fuzzer, sound, tmp_path, key, value, said):
    doors, _ = fuzzer
    path = shutil.copytree(sound("quark"), tmp_path / "copy")
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**described, key: value}))
    with pytest.raises(ValueError, match=said):
        doors.DOORS["quark"].open(path, False)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no such timer")
def test_the_fuzzer_limits_cpu_time():
    """Waiting does not count: another program may have the processor."""
    code = (
        "import fuzz, time; fuzz.limit_cpu_time(0.5); time.sleep(1); print('waited', flush=True)\n"
        "while True: pass"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("waited", -signal.SIGPROF), done.stderr


@pytest.mark.parametrize("wrong", [[64], [63, 64], [64, 6400], [64.0, 64.0]], ids=str)
def test_a_stored_shape_that_is_not_that_of_its_weight_is_refused(fuzzer, sound, tmp_path, wrong):
    doors, damage = fuzzer
    path, last = shutil.copytree(sound("compressed-tensors"), tmp_path / "out"), "weight_shape"
    for file in damage.tensor_files(path):
        tensors = damage.read_tensors(file)
        changed = {n: torch.tensor(wrong) for n in tensors if n.endswith(f"q_proj.{last}")}
        damage.write_tensors(file, tensors | changed)
    with pytest.raises(
        ValueError, match=r"weight_shape is .*, expected two integers: the 64 outputs"
    ):
        doors.DOORS["compressed-tensors"].open(path, False)
