"""Uploads come after the work, refusals before it; headers of the Hub are read like files."""

import json

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo


class Account:
    """A Hub where ``me`` of ``team`` is logged in; what it was asked for, in order."""

    def __init__(self, monkeypatch):
        self.calls, self.role, self.files, self.failure = [], "write", {}, None
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
        for name in ("whoami", "create_repo", "upload_folder"):
            monkeypatch.setattr(HfApi, name, lambda _, *a, n=name, **k: getattr(self, n)(*a, **k))

    def whoami(self):
        self.calls.append("whoami")
        auth = {"accessToken": {"role": self.role}}
        return {"name": "me", "orgs": [{"name": "team"}], "auth": auth}

    def create_repo(self, name, *, private, exist_ok):
        self.calls.append(("create", name, private, exist_ok))
        owned = name if "/" in name else f"me/{name}"
        return huggingface_hub.RepoUrl(
            f"https://hub.example/{owned}", endpoint="https://hub.example"
        )

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if self.failure is not None:
            raise self.failure
        self.calls.append(("upload", repo_id))
        self.files = {path.name: path.read_bytes() for path in folder_path.iterdir()}


@pytest.fixture
def account(monkeypatch):
    return Account(monkeypatch)


FLAGS = ["--quant_scheme", "int8_wo", "--skip_evaluation"]


def test_the_complete_output_is_uploaded_with_its_card(account, quark, model_dir, tmp_path):
    out = tmp_path / "out"
    target = ["--model_dir", model_dir, "--output_dir", out, "--push_to_hub", "team/small"]
    result = quark("quantize", *target, *FLAGS, "--private")
    assert result.exit_code == 0, result.output
    assert account.calls == [
        "whoami",
        ("create", "team/small", True, True),
        ("upload", "team/small"),
    ]
    assert account.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert b"base_model" in account.files["README.md"]
    assert "https://hub.example/team/small" in result.stdout


def test_a_name_without_owner_is_that_of_the_account(account, quark, quantize, tmp_path):
    path, _ = quantize("--quant_scheme", "int8_wo")
    to = ["--to", "compressed-tensors", "--push_to_hub", "small"]
    result = quark("convert", path, tmp_path / "out", *to)
    assert result.exit_code == 0, result.output
    assert account.calls[-1] == ("upload", "me/small")
    assert "model.safetensors" in account.files


def test_a_plan_uploads_nothing(account, quark, model_dir, tmp_path):
    target = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    quark("quantize", *target, *FLAGS, "--push_to_hub", "small", "--plan")
    assert account.calls == []


def test_a_plan_refuses_a_name_that_no_repository_has(refused, model_dir, tmp_path):
    target = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    said = refused("quantize", *target, *FLAGS, "--push_to_hub", "bad name", "--plan")
    assert "'bad name' cannot be the name of a repository. Give NAME or OWNER/NAME" in said


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("a b/c", {}, "cannot be the name of a repository"),
        ("other/small", {}, "not of other. Give me/"),
        ("me/small", {"role": "read"}, "Create one that may write"),
    ],
    ids=["name", "owner", "token"],
)
def test_refusals_come_before_the_work(name, change, said, account, refused, model_dir, tmp_path):
    vars(account).update(change)
    out = tmp_path / "out"
    target = ["--model_dir", model_dir, "--output_dir", out, "--push_to_hub", name]
    assert said in refused("quantize", *target, *FLAGS)
    assert not out.exists()


def test_no_token_and_no_network(account, refused, model_dir, monkeypatch, tmp_path):
    target = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--push_to_hub", "small"]

    def unreachable(_):
        raise RuntimeError("Connection refused\nmore")

    monkeypatch.setattr(HfApi, "whoami", unreachable)
    assert "cannot be reached (Connection refused)" in refused("quantize", *target, *FLAGS)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "Run 'hf auth login'" in refused("quantize", *target, *FLAGS)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    assert "HF_HUB_OFFLINE is set" in refused("quantize", *target, *FLAGS)


def test_flags_without_an_upload(account, refused, model_dir, tmp_path):
    target = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    assert "needs --push_to_hub" in refused("quantize", *target, *FLAGS, "--private")
    said = refused("quantize", *target, "--skip_quantization", "--push_to_hub", "small")
    assert "writes no checkpoint" in said


def test_a_failed_upload_leaves_the_output_and_says_how_to_go_on(
    account, quark, model_dir, tmp_path
):
    out = tmp_path / "out"
    account.failure = OSError("503 Service Unavailable")
    target = ["--model_dir", model_dir, "--output_dir", out, "--push_to_hub", "small"]
    result = quark("quantize", *target, *FLAGS)
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "is complete, but its upload failed: 503 Service Unavailable" in said
    assert f"hf upload small {out}" in said
    assert (out / "model.safetensors").is_file()


def headers(directory):
    """The headers of a directory as the Hub's library returns them."""
    files = {}
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        metadata = header.pop("__metadata__", {})
        tensors = {name: TensorInfo(**info) for name, info in header.items()}
        files[path.name] = SafetensorsFileMetadata(metadata, tensors)
    names = {name: file for file, data in files.items() for name in data.tensors}
    return SafetensorsRepoMetadata(None, False, names, files)


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8"])
def test_inspect_reads_headers_of_the_hub(scheme, quark, quantize, monkeypatch):
    path, _ = quantize("--quant_scheme", scheme)
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(HfApi, "get_safetensors_metadata", lambda _, name: headers(path))
    there = json.loads(quark("inspect", "me/small", "--json").stdout)
    here = json.loads(quark("inspect", path, "--json").stdout)
    assert there.pop("directory") == "me/small"
    here.pop("directory")
    assert there == here
    assert asked == [("me/small", ["*.json"])]


def test_inspect_of_a_name_that_is_not_there(refused):
    said = refused("inspect", "me/gone")
    assert "there is no me/gone here" in said
    assert "Give the directory of a checkpoint" in said
