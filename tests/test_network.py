"""Proxies and certificates of the environment: used where they work, named where they do not."""

import asyncio
import json
import os
import ssl
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest

from medusa_train.errors import ConfigError
from medusa_train.network import check_network, client_options, is_this_machine
from medusa_train.servers.client import Servers
from tests.fake_server import completion, serving

REMOTE = "http://example.invalid/v1"
NO_SOCKS = "needs the package socksio"
NO_PROXY_ADDRESS = "expected http://HOST:PORT"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.lower().endswith("_proxy") or name.startswith("SSL"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST", "localhost.", "api.localhost", "localhost.localdomain"),
        *("ip6-localhost", "127.0.0.1", "127.8.9.10", "127.1", "2130706433", "0x7f.1", "0.0.0.0"),
        *("::1", "0:0:0:0:0:0:0:1", "::", "::ffff:127.0.0.1"),
    ],
)
def test_every_address_of_this_machine_is_known(host: str) -> None:
    assert is_this_machine(host)


@pytest.mark.parametrize(
    "host",
    [
        "example.invalid",
        "localhost.example",
        "128.0.0.1",
        "10.0.0.1",
        "::2",
        "fe80::1",
        "ä" * 70,
        "",
    ],
)
def test_other_hosts_are_not_this_machine(host: str) -> None:
    assert not is_this_machine(host)


@pytest.mark.parametrize(
    "url", ["http://localhost:1/v1", "https://127.1:1/v1", "http://[::1]:1/v1"]
)
@pytest.mark.parametrize("proxy", ["http://proxy.example:3128", "socks5://h:1", "socks://h", "?"])
def test_this_machine_is_reached_without_a_proxy_whatever_is_set(
    monkeypatch: pytest.MonkeyPatch, url: str, proxy: str
) -> None:
    for name in ("ALL_PROXY", "HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, proxy)
    assert client_options(url)["proxy"] is None


@pytest.mark.parametrize(
    ("variable", "value", "proxy"),
    [
        ("HTTP_PROXY", "http://p:1", "http://p:1"),
        ("http_proxy", "https://p:1", "https://p:1"),
        ("http_proxy", "p:1", "http://p:1"),
        ("ALL_PROXY", "http://me:secret@p:1", "http://me:secret@p:1"),
        ("HTTPS_PROXY", "socks://p", None),  # not for http
        ("HTTP_PROXY", "", None),
    ],
)
def test_a_proxy_that_works_is_used_for_other_hosts(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, proxy: str | None
) -> None:
    monkeypatch.setenv(variable, value)
    assert client_options(REMOTE)["proxy"] == proxy


def test_requests_to_other_hosts_go_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with serving() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("NO_PROXY", "::1/128,localhost,.example.org")
        answer = json.dumps(completion(body)).encode()
        proxy.others[f"{REMOTE}/chat/completions"] = lambda body: (200, {}, answer)
        servers = Servers(
            [REMOTE], key_variable="NONE", timeout=5.0, retry_seconds=0.0, concurrency=1
        )

        async def ask() -> dict[str, Any]:
            async with servers:
                return await servers.complete(body)

        assert asyncio.run(ask())["choices"][0]["message"]["content"] == "answer to hi"


@pytest.mark.parametrize(
    ("listed", "host", "is_excluded"),
    [
        ("example.invalid", "example.invalid", True),
        (".invalid", "example.invalid", True),
        ("*", "example.invalid", True),
        ("other.invalid", "example.invalid", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("a, 10.1.2.3/8 ,b", "10.9.9.9", True),
        ("fd00::/8", "[fd00::7]", True),
        ("[fd00::7]", "[fd00::7]", True),
        ("::1/128", "example.invalid", False),
        ("::1/128,fe80::/10,[::1],https://x:y/,300.0.0.0/99", "example.invalid", False),
    ],
)
def test_hosts_and_networks_of_no_proxy_have_none(
    monkeypatch: pytest.MonkeyPatch, listed: str, host: str, is_excluded: bool
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://p:1")
    monkeypatch.setenv("NO_PROXY", listed)
    assert (client_options(f"http://{host}:8000/v1")["proxy"] is None) is is_excluded
    monkeypatch.setenv("ALL_PROXY", "socks://p:1")  # of no interest to an excluded host
    if is_excluded:
        client_options(f"http://{host}:8000/v1")


@pytest.mark.parametrize("variable", ["ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("socks5://h:1", NO_SOCKS),
        ("socks5h://h:1", f"{NO_SOCKS}|{NO_PROXY_ADDRESS}"),  # httpx 0.27 does not know it
        *((value, NO_PROXY_ADDRESS) for value in ("socks://h:1", "socks4://h:1", "ftp://h:1")),
        *((value, NO_PROXY_ADDRESS) for value in ("http://h:port", "http://h:99999", "http://")),
        *((value, NO_PROXY_ADDRESS) for value in ("http://[::1", "http://a b:1", " http://h:1")),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "socksio", None)
    monkeypatch.setenv(variable, value)
    for use in (lambda: client_options(REMOTE), check_network):
        with pytest.raises(ConfigError, match=f"environment variable {variable}: .*({problem})"):
            use()


def test_no_part_of_a_proxy_s_password_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("http://me:pass/word@h:1", "socks://me:pass@h", "http://me:pass@h:port"):
        monkeypatch.setenv("ALL_PROXY", value)
        with pytest.raises(ConfigError) as caught:
            client_options(REMOTE)
        assert "pass" not in str(caught.value)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSLKEYLOGFILE"])
@pytest.mark.parametrize("kind", ["gone", "a directory", "no certificate"])
def test_certificates_that_cannot_be_read_are_named_by_their_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, kind: str
) -> None:
    path = tmp_path / "gone" / "certs.pem"
    if kind == "a directory":
        path = tmp_path
    elif kind == "no certificate":
        path = tmp_path / "certs.pem"
        path.write_text("hello")
    monkeypatch.setenv(variable, str(path))
    assert client_options(REMOTE)["verify"] is False  # http needs none
    if variable == "SSLKEYLOGFILE" and kind == "no certificate":
        return  # a file that can be written
    for use in (lambda: client_options("HTTPS://example.invalid/v1"), check_network):
        with pytest.raises(ConfigError, match=f"environment variable {variable}: the file cannot"):
            use()


def test_certificates_of_the_environment_are_used_for_https(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    (tmp_path / "one.pem").write_text(f"{first[0]}{first[1]}\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "one.pem"))
    for url in ("https://example.invalid/v1", "https://127.0.0.1/v1"):
        options = client_options(url)
        assert isinstance(options["verify"], ssl.SSLContext)
        assert len(options["verify"].get_ca_certs()) == 1
        httpx.Client(**options).close()
