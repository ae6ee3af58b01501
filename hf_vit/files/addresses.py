"""Requests of URLs: only https and public hosts, unless `HF_VIT_ALLOW` allows more; and URLs in messages."""

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from .limits import allowed

_MAX_REDIRECTS = 5
MAX_WAIT = 60.0  # seconds for the headers of an answer; a server that sends them slowly cannot block forever


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
        httpx.RequestError: the host cannot be reached, or does not answer.
    """
    from huggingface_hub import get_session

    session = get_session()
    for _ in range(_MAX_REDIRECTS + 1):
        check_url(url)
        watch: dict[str, Any] = {"trace": partial(_check_connection, url)}
        request = session.build_request("GET", url, headers=headers, timeout=timeout, extensions=watch)
        response = _answer_within(MAX_WAIT, partial(session.send, request, stream=True, follow_redirects=False))
        with closing(response):
            if response.next_request is None:
                yield response
                return
            url = str(response.next_request.url)
    raise UnsafeURLError(f"cannot follow more than {_MAX_REDIRECTS} redirects, here to {redact_secrets(url)}")


def _answer_within(seconds: float, send: Callable[[], Any]) -> Any:
    """Return what `send` returns, or raise what it raises; httpx limits the time between two bytes only.

    Raises:
        httpx.ReadTimeout: there is no answer after so many seconds.
    """
    from huggingface_hub.utils import httpx

    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(send())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()  # one that waits forever does not keep the program from ending
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # `send` itself raised it
            raise
        answer.add_done_callback(_close_late_answer)
        raise httpx.ReadTimeout(f"no answer within {seconds:g} seconds") from None


def _close_late_answer(answer: Future[Any]) -> None:
    if answer.exception() is None:
        answer.result().close()


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

    A fragment is removed if it has an equals sign, and so are query strings of other URLs than those of http: in
    gs://, a question mark may be part of the name.
    """
    text = re.sub(r"(\w://)[^\s/'\"]*@", r"\1", text)
    end = r"(?=[:.,;)]*(?:[\s'\"]|$))"  # of the word, without the punctuation of the sentence
    text = re.sub(rf"(?i)(\bhttps?://[^\s?#'\"]*)\?[^\s'\"]*?{end}", r"\1", text)
    return re.sub(rf"(\w://[^\s?#=&'\"]*)[?#][^\s'\"=]*=[^\s'\"]*?{end}", r"\1", text)
