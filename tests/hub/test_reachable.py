from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from medusa_train.hub import hub_is_unreachable


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    hub_is_unreachable.cache_clear()
    yield
    hub_is_unreachable.cache_clear()


def _resolver(monkeypatch: pytest.MonkeyPatch, known: set[str]) -> None:
    def resolve(host: str, port: int) -> list[object]:
        if host not in known:
            raise socket.gaierror("unknown")
        return [host, port]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_a_resolvable_host_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolver(monkeypatch, {"huggingface.co"})
    assert not hub_is_unreachable()


def test_an_unknown_host_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolver(monkeypatch, set())
    assert hub_is_unreachable()


def test_hf_endpoint_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolver(monkeypatch, {"mirror.example"})
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hf")
    assert not hub_is_unreachable()


def test_offline_and_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolver(monkeypatch, set())
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert not hub_is_unreachable()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub_is_unreachable.cache_clear()
    assert hub_is_unreachable()
