import socket
from collections.abc import Iterator

import pytest

from medusa_train.hub import hub_is_unreachable


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
        "HF_HUB_OFFLINE",
        "HF_ENDPOINT",
    ):
        monkeypatch.delenv(name, raising=False)
    hub_is_unreachable.cache_clear()
    yield
    hub_is_unreachable.cache_clear()


@pytest.mark.parametrize(
    ("known", "variables", "reachable"),
    [
        ("huggingface.co", {}, True),
        ("", {}, False),
        ("mirror.example", {"HF_ENDPOINT": "https://mirror.example/hf"}, True),
        ("", {"HTTPS_PROXY": "http://proxy.example:3128"}, True),  # resolves names itself
        ("huggingface.co", {"HF_HUB_OFFLINE": "1"}, False),
    ],
)
def test_whether_the_hub_is_reachable(
    monkeypatch: pytest.MonkeyPatch, known: str, variables: dict[str, str], reachable: bool
) -> None:
    def resolve(host: str, port: int) -> list[object]:
        if host != known:
            raise socket.gaierror("unknown")
        return [host, port]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_is_unreachable() is not reachable
