import io
import json
import pickle
import re
import zipfile

import pytest
import torch
from torch import nn

from quark.torch.export.archive_check import checked_archive
from quark.torch.export.graph_archive import load_graph_archive


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x).reshape(x.shape[0] * 2, -1) + torch.tensor([1.0])
        with torch.no_grad():
            return {"y": torch.nn.functional.pad(y, (0, 1), mode="constant"), "n": x.shape[0]}


@pytest.fixture(scope="module")
def archive():
    """Name -> contents of the members of an archive with an axis of any size."""
    shapes = ({0: torch.export.Dim("rows", max=64)},)
    program = torch.export.export(Model().eval(), (torch.ones(3, 4),), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    with zipfile.ZipFile(file) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def write(path, members):
    with zipfile.ZipFile(path, "w") as target:
        for name, content in members.items():
            target.writestr(name, content)
    return path


def test_archives_of_torch_are_loaded(tmp_path, archive):
    graph = load_graph_archive(write(tmp_path / "m.pth", archive))
    for rows in (1, 7):
        y = graph(torch.ones(rows, 4))
        assert y["n"] == rows and y["y"].shape == (2 * rows, 3)


class Code:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("the pickle ran",)


def edited(archive, change):
    """The archive with a changed graph."""
    (name,) = (n for n in archive if n.endswith("models/model.json"))
    graph = json.loads(archive[name])
    change(graph)
    return {**archive, name: json.dumps(graph)}


def edit_node(key, value):
    def change(graph):
        graph["graph_module"]["graph"]["nodes"][0][key] = value

    return lambda archive: edited(archive, change)


def edit_text(pattern, text):
    """Replace the first match in the graph."""

    def change(archive):
        (name,) = (n for n in archive if n.endswith("models/model.json"))
        changed, count = re.subn(pattern, lambda m: text, archive[name].decode(), count=1)
        assert count == 1
        return {**archive, name: changed}

    return change


def with_pickle(archive, name):
    content = io.BytesIO()
    torch.save(Code(), content)
    return {**archive, name: content.getvalue()}


def as_pickle(archive):
    (name,) = (n for n in archive if n.endswith("model_weights_config.json"))
    config = json.loads(archive[name])
    entry = config["config"]["fc.weight"]
    entry["use_pickle"] = True
    member = f"{name.rpartition('/')[0]}/{entry['path_name']}"
    return {**with_pickle(archive, member), name: json.dumps(config)}


ATTACK = "__import__('os').system('touch ran')"
HOSTILE = {
    "sample inputs": lambda a: with_pickle(a, "archive/data/sample_inputs/model.pt"),
    "weights": as_pickle,
    "weights of earlier versions": lambda a: with_pickle(a, "archive/data/weights/model.pt"),
    "objects": lambda a: {**a, "archive/data/constants/opaque_obj_0": pickle.dumps(Code())},
    "a library": lambda a: {**a, "archive/data/aotinductor/model/model.so": b"\x7fELF"},
    "a function of torch": edit_node("target", "torch.hub.load"),
    "a function of python": edit_node("target", "_operator.methodcaller"),
    "a file": edit_node("target", "torch.ops.aten.from_file.default"),
    "an expression": edit_text(r"Symbol\('s\d+'[^\"]*\)", ATTACK),
    "an expression of names": edit_text(r"Symbol\('s\d+'[^\"]*\)", "Symbol.__class__"),
    "a name of an argument": edit_text(r'"forward_arg_names": \["x"\]', json.dumps(ATTACK)[1:-1]),
    "an argument": lambda a: edited(
        a,
        lambda g: g["graph_module"]["module_call_graph"][0]["signature"].update(
            forward_arg_names=[f"x={ATTACK}"]
        ),
    ),
    "a name of a node": edit_node("name", ATTACK),
    "a parameter": edit_text('"parameter_name": "fc.weight"', f'"parameter_name": "{ATTACK}"'),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_contents_that_could_run_code_are_refused(tmp_path, archive, change, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "m.pth", change(archive))
    with pytest.raises(ValueError, match=r"m\.pth"):
        load_graph_archive(path)
    assert not (tmp_path / "ran").exists() and "ran" not in capsys.readouterr().out


def test_guards_are_left_out(tmp_path, archive):
    guarded = edited(archive, lambda graph: graph.update(guards_code=[ATTACK]))
    content = checked_archive(write(tmp_path / "m.pth", guarded))
    assert ATTACK.encode() not in content.getvalue()


@pytest.mark.parametrize("content", [b"", b"no archive", None], ids=["empty", "text", "two"])
def test_other_files_are_refused(tmp_path, archive, content):
    path = tmp_path / "m.pth"
    if content is None:
        with zipfile.ZipFile(path, "w") as target, pytest.warns(UserWarning, match="Duplicate"):
            for _ in range(2):
                target.writestr("archive/models/model.json", "{}")
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is no archive of torch\.export\.save"):
        load_graph_archive(path)


def test_damaged_archives_are_refused(tmp_path, archive):
    (name,) = (n for n in archive if n.endswith("models/model.json"))
    with pytest.raises(ValueError, match="cannot open the archive"):
        load_graph_archive(write(tmp_path / "m.pth", {**archive, name: "{}"}))


def compressed(path, archive):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in archive.items():
            target.writestr(name, content)


def flipped(path, archive):
    """One bit of a weight is another one."""
    (name,) = (n for n in archive if n.endswith("weights/weight_0"))
    data = write(path, archive).read_bytes()
    at = data.index(archive[name])
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def encrypted(path, archive):
    """The members have the flag of encryption, in the list of them and before each."""
    data = bytearray(write(path, archive).read_bytes())
    for mark, place in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        at = data.find(mark)
        while at >= 0:
            data[at + place] |= 1
            at = data.find(mark, at + 4)
    path.write_bytes(data)


def overlapping(path, archive):
    """Two entries of the list of members claim one large member."""
    large = {**archive, "large/1": bytes(100_000), "large/2": b""}
    data = bytearray(write(path, large).read_bytes())
    first, second = (data.rindex(name) - 46 for name in (b"large/1", b"large/2"))
    for start, stop in ((16, 28), (42, 46)):  # digest and sizes, place
        data[second + start : second + stop] = data[first + start : first + stop]
    path.write_bytes(data)


def with_list(content):
    def change(path, archive):
        (name,) = (n for n in archive if n.endswith("constants_config.json"))
        write(path, {**archive, name: content})

    return change


DAMAGES = {
    "compressed": (compressed, "is compressed"),
    "a flipped bit": (flipped, "Bad CRC-32"),
    "encrypted": (encrypted, "encrypted"),
    "a list of numbers": (with_list('{"config": [1]}'), "is no list of tensors"),
    "an entry without a path": (with_list('{"config": {"a": {}}}'), "is no list of tensors"),
    "text": (with_list("{"), "is no list of tensors"),
    "deep": (with_list("[" * 100_000), "is no list of tensors"),
    "overlapping": (overlapping, "more than the"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_of_damaged_archives_are_refused(tmp_path, archive, damage):
    make, message = DAMAGES[damage]
    make(tmp_path / "m.pth", archive)
    with pytest.raises(ValueError, match=rf"m\.pth.*{message}"):
        load_graph_archive(tmp_path / "m.pth")
