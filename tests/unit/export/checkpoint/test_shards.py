"""Shards that are written tensor by tensor are those of the packages that write whole ones."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from quark.torch.export.checkpoint.shards import ShardWriter, write_tensors
from quark.torch.files import read_json

TYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn),
    *(torch.float8_e8m0fnu, torch.int16, torch.uint16, torch.float16, torch.bfloat16),
    *(torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64),
    *(torch.int64, torch.uint64),
)


@pytest.fixture
def tensors():
    made = {f"layers.{i}.{t}": torch.randn(3, 5).to(t) for i in (10, 2) for t in TYPES}
    made['größe "\\\n\x7f'] = torch.randn(7, 4).t()
    strided = torch.ones(1, 8).t()[:1]  # contiguous, with a stride of its own
    assert strided.is_contiguous() and strided.stride() == (1, 8)
    return made | {"number": torch.tensor(3.0), "empty": torch.zeros(0, 4), "one": strided}


@pytest.mark.parametrize("size", ["5GB", 300, 1])
def test_the_bytes_are_those_of_safetensors(tensors, tmp_path, size):
    (tmp_path / "ours").mkdir()
    write_tensors(tensors, tmp_path / "ours", size)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # in memory of their own
    plan = split_torch_state_dict_into_shards(copies, max_shard_size=size)
    for name, keys in plan.filename_to_tensors.items():
        shard = {key: tensors[key].contiguous() for key in keys}
        save_file(shard, tmp_path / name, metadata={"format": "pt"})
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / name).read_bytes()
    names = {path.name for path in (tmp_path / "ours").iterdir()} - {*plan.filename_to_tensors}
    assert names == ({"model.safetensors.index.json"} if plan.is_sharded else set())
    if plan.is_sharded:
        index = read_json(tmp_path / "ours" / names.pop())
        assert index == {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}


def test_neither_order_nor_threads_change_the_files(tensors, tmp_path):
    for directory, turn in ((tmp_path / "a", 1), (tmp_path / "b", -1)):
        directory.mkdir()
        outline = {name: tensor.to("meta") for name, tensor in tensors.items()}
        outline["number"] = torch.empty(100, device="meta")[7]  # a view counts as what it shows
        writer = ShardWriter(directory, outline, 300)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name, w=writer: w.add(name, tensors[name]), [*tensors][::turn]))
        writer.finish()
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "ab")
    assert first == second and len(first) > 3


class TestRefused:
    def writer(self, path):
        return ShardWriter(path, {"a": torch.ones(2, 3), "b": torch.ones(2)}, "5GB")

    @pytest.mark.parametrize(
        ("name", "tensor", "message"),
        [
            ("c", torch.ones(1), r"c is torch.float32 \[1\], but nothing was announced"),
            ("b", torch.ones(3), r"b is torch.float32 \[3\], but torch.float32 \[2\] was"),
            ("b", torch.ones(2).half(), r"torch.float16 \[2\], but torch.float32 \[2\] was"),
        ],
    )
    def test_a_tensor_that_was_not_announced(self, tmp_path, name, tensor, message):
        with pytest.raises(ValueError, match=message):
            self.writer(tmp_path).add(name, tensor)

    def test_a_tensor_that_is_missing_or_twice(self, tmp_path):
        writer = self.writer(tmp_path)
        writer.add("a", torch.ones(2, 3))
        with pytest.raises(ValueError, match="a is written twice"):
            writer.add("a", torch.ones(2, 3))
        with pytest.raises(ValueError, match="b was announced, but not written"):
            writer.finish()

    def test_a_type_that_safetensors_has_not(self, tmp_path):
        with pytest.raises(ValueError, match=r"cannot hold tensors of torch\.complex128"):
            ShardWriter(tmp_path, {"a": torch.ones(2, dtype=torch.complex128)}, "5GB")


def test_the_index_is_the_last_file(tmp_path):
    writer = ShardWriter(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, 8)
    for name in ("a", "b"):
        assert "model.safetensors.index.json" not in {p.name for p in tmp_path.iterdir()}
        writer.add(name, torch.ones(2))
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert [*index["weight_map"]] == ["a", "b"]


def test_rows_in_parts(tmp_path):
    value = torch.randn(7, 4, 3).bfloat16()
    entries = {"a": torch.ones(3), "parts": value.to("meta"), "z": torch.ones(2)}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, parts = (ShardWriter(tmp_path / name, entries, "5GB") for name in ("whole", "parts"))
    whole.add("parts", value)
    parts.add_rows("parts", value[:2])
    with pytest.raises(ValueError, match="parts is written twice"):
        parts.add("parts", value)
    with pytest.raises(ValueError, match="parts was announced, but not written"):
        parts.add("a", entries["a"]), parts.add("z", entries["z"]), parts.finish()
    for start in (2, 5):
        parts.add_rows("parts", value[start : start + 3])
    for name in ("a", "z"):
        whole.add(name, entries[name])
    for writer in (whole, parts):
        writer.finish()
    contents = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("other", torch.ones(1, 4)),
        ("matrix", torch.ones(1, 5)),
        ("matrix", torch.ones(1, 4).half()),
        ("matrix", torch.ones(4, 4)),
        ("number", torch.ones(())),
    ],
    ids=["name", "shape", "type", "too many", "scalar"],
)
def test_rows_that_do_not_fit(name, rows, tmp_path):
    entries = {"matrix": torch.ones(3, 4), "number": torch.ones(())}
    writer = ShardWriter(tmp_path, entries, "5GB")
    with pytest.raises(ValueError, match="follow 0 rows of"):
        writer.add_rows(name, rows)
