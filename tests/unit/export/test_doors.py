"""Damaged files at every way into the package: ``benchmarks/fuzz.py`` does more rounds of this."""

import json
import random
import shutil
from itertools import cycle
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ROUNDS = 8  # of each door: 13 doors, 104 rounds
WITH_TENSORS = [
    "float",
    "report",
    "quark",
    "awq",
    "gptq",
    "compressed-tensors",
    "fp8",
    "native",
    "importer",
    "importer of native",
    "transformers",
    "params",
    "statistics",
]
OTHERS = ["gguf", "options"]


@pytest.fixture(scope="module")
def fuzzer():
    """Return the modules of the fuzzer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import damage
        import doors

        yield doors, damage


@pytest.fixture(scope="module")
def sound(fuzzer, tmp_path_factory):
    """Return the sound files of a door."""
    doors, _ = fuzzer
    place = tmp_path_factory.mktemp("sound")

    def sound(name):
        kind = doors.DOORS[name].kind
        if not (place / kind).exists():
            doors.write(kind, place / kind)
        return place / kind

    return sound


def test_every_door_is_tried(fuzzer):
    doors, _ = fuzzer
    assert {*WITH_TENSORS, *OTHERS, "onnx"} == set(doors.DOORS)


@pytest.mark.parametrize("name", WITH_TENSORS)
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
