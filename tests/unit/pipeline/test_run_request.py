"""What tells a run from another one: its files by size, header and sample, and its threads."""

import os

import torch

from quark.torch.pipeline.run_request import identify_files, thread_count


def identify(path):
    return identify_files([path])[path.name]


def test_files_of_other_values_differ(tmp_path, build):
    build().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    first, size = identify(path), path.stat().st_size
    os.utime(path, (1, 1))
    assert identify(path) == first  # another time is that of another copy
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    places = {"the start": 8 + header, "the end": size - 1, "the middle": size // 63 * 30}
    for name, place in places.items():
        data[place] ^= 1
        path.write_bytes(data)
        assert identify(path)["sample"] != first["sample"], name
        assert identify(path)["header"] == first["header"]
        data[place] ^= 1
    data[9] ^= 1
    path.write_bytes(data)
    assert identify(path)["header"] != first["header"]
    os.truncate(path, size - 1)
    assert identify(path)["size"] == size - 1


def test_threads_count_on_the_cpu():
    torch.set_num_threads(1)
    assert thread_count(["cpu"]) == 1 and thread_count(["cuda"]) is None
