"""Fetching a recording from a URL that a caller sent, without becoming the caller's way into private networks.

Which address a name has is asked once, by the connector; each is checked there, and once more when a socket is made for
it, so that what was checked is what is connected to. What stays open is for the network's own rules: a server's
addresses that are public but trust their neighbours.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

Address = IPv4Address | IPv6Address

TIMEOUT_SECONDS = 10.0
"""From the first lookup to the last byte, redirects included."""

CONNECT_SECONDS = 3.0
"""For one address of a host, before the next is tried."""

MAX_REDIRECTS = 3
MAX_URL_CHARS = 2048

FIRST_FREE_PORT = 1024
"""Besides 80 and 443, ports from here on are allowed: mail, shells and name servers are below."""

_MALFORMED = "the URL is malformed; send http://host/path or https://host/path"
_REDIRECTS = (301, 302, 303, 307, 308)
_PAGES = ("text/html", "application/xhtml+xml")
_PIECE_BYTES = 1 << 16

_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_HOST_AGENTS = (IPv4Address("168.63.129.16"),)
"""Public by number, private by use: the host's agent in Azure's virtual machines."""


class FetchError(ValueError):
    """A recording cannot be fetched; the message says why, and names no field."""


def is_public(address: Address) -> bool:
    """Whether anyone on the internet reaches the same machine under this address.

    IPv6 addresses that carry an IPv4 address are judged by that: mapped (RFC 4291), NAT64 (RFC 6052) and 6to4
    (RFC 3056). Others must be global unicast, which leaves out multicast, site-local and Teredo addresses.
    """
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast and address not in _HOST_AGENTS
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    carried = address.ipv4_mapped or address.sixtofour
    if carried is not None:
        return is_public(carried)
    return address in _GLOBAL_UNICAST and address.is_global


async def fetch_recording(url: str, max_bytes: int, *, allowed: Callable[[Address], bool] = is_public) -> bytes:
    """The bytes at ``url``. The caller has checked that this server may fetch at all.

    http and https only, without a user or password, to ports 80, 443 and from ``FIRST_FREE_PORT`` on; every address of
    the host must be ``allowed``. At most ``MAX_REDIRECTS`` redirects are followed, under the same rules.

    Raises:
        FetchError: the URL breaks a rule, or what it leads to is out of reach, no file, or over ``max_bytes``.
    """
    gate = _Gate(allowed)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS), _session(gate) as session:
            target = _checked(url)
            for _ in range(1 + MAX_REDIRECTS):
                async with session.get(target, allow_redirects=False) as answer:
                    if answer.status not in _REDIRECTS:
                        return await _body(answer, max_bytes)
                    target = _checked(answer.headers.get("location", ""), target)
            raise FetchError(f"the URL is redirected more than {MAX_REDIRECTS} times")
    except TimeoutError as error:
        raise FetchError(f"the URL did not answer in full within {TIMEOUT_SECONDS:g} seconds") from error
    except aiohttp.ClientError as error:
        # Which address, and how it failed, is nobody's business outside.
        raise FetchError(f"the URL cannot be fetched ({type(error).__name__})") from error


class _Gate(AbstractResolver):
    """Looks names up and makes sockets, for allowed addresses only."""

    def __init__(self, allowed: Callable[[Address], bool]) -> None:
        self._allowed = allowed
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """All addresses of a name, if all are allowed."""
        try:
            found = await self._resolver.resolve(host, port, family)
        except UnicodeError as error:
            raise FetchError(_MALFORMED) from error
        for entry in found:
            self._check(entry["host"])
        return found

    async def close(self) -> None:
        """There is nothing to release."""

    def socket(self, info: tuple[Any, ...]) -> socket.socket:
        """A socket for an address: also for one that stands in the URL itself, where no name is looked up."""
        family, kind, protocol, _, address = info
        self._check(address[0])
        return socket.socket(family, kind, protocol)

    def _check(self, text: str) -> None:
        if not self._allowed(ip_address(text)):
            raise FetchError("the URL leads to an address that is not public")


def _session(gate: _Gate) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        resolver=gate,
        socket_factory=gate.socket,
        use_dns_cache=False,
        # One address after the other: races raise what they like.
        happy_eyeballs_delay=None,
        force_close=True,
    )
    return aiohttp.ClientSession(
        connector=connector,
        # The whole is bounded in ``fetch_recording``.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        # A small answer must not unpack to a large one.
        auto_decompress=False,
        headers={"accept": "audio/*, application/octet-stream", "accept-encoding": "identity"},
        trust_env=False,
    )


def _checked(text: str, base: URL | None = None) -> URL:
    """The URL, joined to where it was found if it was a redirect's."""
    if not text or len(text) > MAX_URL_CHARS:
        raise FetchError(f"the URL has {len(text)} characters; 1 to {MAX_URL_CHARS} are allowed")
    try:
        url = URL(text) if base is None else base.join(URL(text))
        host, port = url.host, url.port
    except ValueError as error:  # which UnicodeError is
        raise FetchError(_MALFORMED) from error
    if url.scheme not in ("http", "https") or not host:
        raise FetchError("the URL must be http://host/path or https://host/path")
    if url.user is not None or url.password is not None:
        raise FetchError("the URL has a user or password in it; leave them out")
    if port not in (80, 443) and (port is None or port < FIRST_FREE_PORT):
        raise FetchError(f"the URL has port {port}; 80, 443 and from {FIRST_FREE_PORT} on are allowed")
    return url


async def _body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    if answer.status != 200:
        raise FetchError(f"the URL answered with status {answer.status}")
    if answer.content_type in _PAGES:
        raise FetchError("the URL leads to a web page; send the address of the recording itself")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise FetchError("the URL answered with compressed content, which was not asked for")
    too_large = FetchError(f"the URL leads to more than {max_bytes} bytes, which is the most allowed")
    if (answer.content_length or 0) > max_bytes:
        raise too_large
    data = bytearray()
    async for piece in answer.content.iter_chunked(_PIECE_BYTES):
        data += piece
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)
