"""Data sets of the Hub without a network: the cache alone, and a quick answer."""

import socket

import datasets
import pytest
from huggingface_hub import constants

from quark.torch.evaluation import hub_access
from quark.torch.evaluation.datasets import check_named, named_documents
from quark.torch.evaluation.documents import load_documents


@pytest.fixture
def closed(monkeypatch):
    """Let the Hub be at a port of this machine that takes no connection."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")


def test_a_host_that_takes_connections_is_asked(closed, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub_access.find_obstacle() is None


def test_a_proxy_is_asked(closed, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    assert hub_access.find_obstacle() is None


def test_the_reason_and_the_remedy(closed, monkeypatch):
    assert "cannot be reached (Connection refused). Connect" in hub_access.find_obstacle()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_access.find_obstacle() == "HF_HUB_OFFLINE is set. Unset it"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: check_named("pileval"), r"^pileval: 'mit-han-lab/pile-val-backup' is no file"),
        (lambda: named_documents("pileval", held_out=False), "^pileval: .*Connect to the network"),
        (lambda: check_named("pilevall"), "Nearest name: pileval"),
        (lambda: load_documents("owner/name"), "^'owner/name' is no file .*my.txt$"),
    ],
)
def test_the_hub_is_not_asked_again_and_again(ask, said, closed, monkeypatch):
    def get(*_, **__):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("huggingface_hub.utils._http.http_backoff", get)
    monkeypatch.setattr("huggingface_hub.utils._http.get_session", get)
    trials, connect = [], socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *a: trials.append(1) or connect(*a))
    with pytest.raises(FileNotFoundError, match=said):
        ask()
    assert len(trials) == 1  # one connection may take seconds
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


def test_a_data_set_of_the_cache_is_read(closed, monkeypatch):
    asked = []

    def load_dataset(name, configuration, split):
        asked.append(datasets.config.HF_HUB_OFFLINE and constants.HF_HUB_OFFLINE)
        return [{"text": "a"}]

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: asked.append(True))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    check_named("pileval")
    assert named_documents("pileval", held_out=True) == ["a"]
    assert asked == [True, True]
