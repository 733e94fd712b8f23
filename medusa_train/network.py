"""What the environment says about the network: proxies (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY,
NO_PROXY) and certificates (SSL_CERT_FILE).

httpx raises an exception if it cannot use one of them, even if it does not need it.
"""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit
from urllib.request import (  # type: ignore[attr-defined]
    getproxies_environment,
    proxy_bypass_environment,
)

from medusa_train.errors import ConfigError

#: Environment variables of the files that TLS reads or writes.
_TLS_FILES = ("SSL_CERT_FILE", "SSLKEYLOGFILE")


def client_options(url: str) -> dict[str, Any]:
    """Return the arguments with which `httpx.Client` reaches `url`.

    Loopback addresses never use a proxy. Others use the proxy of the environment, unless
    NO_PROXY lists them. Certificates are read only for https.

    Raises:
        ConfigError: the environment's proxy for this address, or its certificates, cannot be used.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = None
    if not is_this_machine(host) and not _is_excluded(host):
        proxy = _proxy(parts.scheme) or _proxy("all")
    verify: ssl.SSLContext | bool = False  # http has nothing to verify
    if parts.scheme == "https":
        verify = _certificates()
    return {"proxy": proxy, "verify": verify, "trust_env": False}


def check_network() -> None:
    """Check all settings that the hub's client reads, whether it needs them or not.

    Raises:
        ConfigError: a proxy or the certificates of the environment cannot be used.
    """
    for scheme in ("http", "https", "all"):
        _proxy(scheme)
    _certificates()


def is_this_machine(host: str) -> bool:
    """Return whether a host is a loopback address, in any notation, or `localhost`.

    The machine's own name is not: like other programs, it is asked through a proxy.
    """
    name = host.rstrip(".").lower()
    if name in ("localhost.localdomain", "ip6-localhost", "ip6-loopback"):
        return True
    if name.split(".")[-1] == "localhost":
        return True
    try:
        entries = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)  # asks no name server
    except (OSError, UnicodeError):
        return False
    address = _address(str(entries[0][4][0]))
    return address.is_loopback or address.is_unspecified


def _address(text: str) -> IPv4Address | IPv6Address:
    """Parse an address; raises ValueError."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_excluded(host: str) -> bool:
    """Return whether NO_PROXY lists a host: its name, a domain, its address or a network such as
    10.0.0.0/8.
    """
    if proxy_bypass_environment(host):
        return True
    for entry in getproxies_environment().get("no", "").split(","):
        with suppress(ValueError):  # entries that are names
            if _address(host) in ip_network(entry.strip(" []"), strict=False):
                return True
    return False


def _proxy(scheme: str) -> str | None:
    """Return the environment's proxy for a scheme; ConfigError if httpx cannot use it."""
    import httpx

    value = getproxies_environment().get(scheme)
    if not value:
        return None
    proxy = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(proxy)
        _ = parts.port  # raises ValueError above 65535, which httpx only finds when it connects
        if not parts.hostname or len(value.split()) != 1:
            raise ValueError
        httpx.HTTPTransport(proxy=proxy, verify=False).close()
    except ImportError:
        problem = "a SOCKS proxy needs the package socksio (pip install 'httpx[socks]')"
    except (ValueError, httpx.InvalidURL):  # the error may show a part of a password
        problem = "expected http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT"
    else:
        return proxy
    names = (name for name in os.environ if name.lower() == f"{scheme}_proxy")
    variable = next(name for name in names if os.environ[name] == value)
    raise ConfigError(
        f"environment variable {variable}: this proxy cannot be used: {problem}. Correct or unset"
        " it"
    )


def _certificates() -> ssl.SSLContext:
    """Return the certificates of the environment, or httpx's own; ConfigError if they cannot be
    read.
    """
    import httpx

    try:
        return httpx.create_ssl_context()
    except OSError as error:
        variables = " or ".join(name for name in _TLS_FILES if os.environ.get(name))
        raise ConfigError(
            f"environment variable {variables}: the file cannot be used: {error}. Correct or unset"
            " it"
        ) from None
