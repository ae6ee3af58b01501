"""Requests of URLs: only https and public hosts, unless `HF_VIT_ALLOW` allows more; and URLs in messages."""

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from .limits import allowed

_MAX_REDIRECTS = 5


class UnsafeURLError(ValueError):
    """A URL that must not be requested."""


@contextmanager
def open_url(url: str, timeout: float, headers: Mapping[str, str]) -> Iterator[Any]:
    """Request a URL. It and every redirect must use https and a public host.

    All IP addresses of the host name are checked before the request. The address of the connection is checked before
    anything is sent.

    Args:
        url: the URL.
        timeout: connect and read timeout, in seconds.
        headers: HTTP headers.

    Yields:
        The response of httpx, before its body is read.

    Raises:
        UnsafeURLError: a URL is not encrypted or its host is not public, and `HF_VIT_ALLOW` does not allow it.
        httpx.RequestError: the host cannot be reached.
    """
    from huggingface_hub import get_session

    for _ in range(_MAX_REDIRECTS + 1):
        check_url(url)
        watch: dict[str, Any] = {"trace": partial(_check_connection, url)}
        request: dict[str, Any] = {"headers": headers, "timeout": timeout, "extensions": watch}
        with get_session().stream("GET", url, follow_redirects=False, **request) as response:
            if response.next_request is None:
                yield response
                return
            url = str(response.next_request.url)
    raise UnsafeURLError(f"cannot follow more than {_MAX_REDIRECTS} redirects, here to {redact_secrets(url)}")


def check_url(url: str) -> None:
    """Raise UnsafeURLError unless a URL uses https and its host is public, see `allowed`."""
    parts = urlsplit(url)
    if parts.scheme not in (("http", "https") if allowed("http") else ("https",)) or not parts.hostname:
        raise UnsafeURLError(f"{redact_secrets(url)} is not https://HOST/... (HF_VIT_ALLOW=http also allows http://)")
    port = parts.port or 443
    try:
        found = [] if allowed("private") else socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # a proxy may resolve the name; the connection is checked later
    for *_, address in found:
        check_public(url, str(address[0]))


def _check_connection(url: str, event: str, about: Mapping[str, Any]) -> None:
    """Check the IP address of a new connection, since DNS may have changed; the user's proxy is trusted."""
    if event != "connection.connect_tcp.complete" or allowed("private"):
        return
    from urllib.request import getproxies, proxy_bypass  # imports http.client and email

    parts, proxies = urlsplit(url), getproxies()
    if (proxies.get(parts.scheme) or proxies.get("all")) and not proxy_bypass(parts.hostname or ""):
        return
    try:
        check_public(url, about["return_value"].get_extra_info("server_addr")[0])
    except UnsafeURLError:
        about["return_value"].close()
        raise


def check_public(url: str, address: str) -> None:
    """Raise UnsafeURLError unless an IP address is public; `url` is for the message."""
    if not _is_public(ip_address(address)):
        raise UnsafeURLError(f"{redact_secrets(url)} leads to {address}, which is not public (HF_VIT_ALLOW=private)")


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if int(address) >> 32 == 0x0064FF9B << 64:  # NAT64: 64:ff9b::/96 (RFC 6052)
            embedded = IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return _is_public(embedded)
    return address.is_global and not address.is_multicast


def redact_secrets(text: str) -> str:
    """Remove user names, passwords and query strings from the URLs in a text, for messages.

    In gs:// URLs, a question mark is part of the name and does not begin a query string.
    """
    text = re.sub(r"(\w://)[^\s/'\"]*@", r"\1", text)
    return re.sub(r"(?i)(\bhttps?://[^\s?'\"]*)\?[^\s'\"),;]*?(?=[:.]?(?:[\s'\"),;]|$))", r"\1", text)
