from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.api import fetch
from pega_omni_plugin.api.fetch import FetchError, fetch_recording, is_public

SOUND = bytes(range(256)) * 1_000
LIMIT = 1 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def anyone(_: fetch.Address) -> bool:
    return True


class Server:
    """A server on loopback; counts what reaches it."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[web.Request] = []
        self.handler: Handler = self.sound

    async def sound(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=SOUND, content_type="audio/wav")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        return await self.handler(request)

    async def get(self, path: str = "/voice.wav", **options: Any) -> bytes:
        return await fetch_recording(self.url + path, LIMIT, allowed=anyone, **options)

    async def refusal(self, path: str = "/voice.wav") -> str:
        with pytest.raises(FetchError) as caught:
            await self.get(path)
        return str(caught.value)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


def answer(body: bytes = b"", status: int = 200, **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, headers=named)

    return handler


async def test_a_recording_is_fetched_whole(server: Server) -> None:
    assert await server.get() == SOUND
    headers = server.requests[0].headers
    assert headers["accept-encoding"] == "identity"
    assert "cookie" not in headers and "authorization" not in headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "127.0.0.1."])
async def test_the_servers_own_loopback_is_refused_before_a_connection(server: Server, host: str) -> None:
    url = server.url.replace("127.0.0.1", host) + "/voice.wav"
    with pytest.raises(FetchError):
        await fetch_recording(url, LIMIT)
    assert server.requests == []


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0x7f.0.0.1", "0177.0.0.1", "0"])
async def test_other_spellings_of_loopback_are_refused(server: Server, host: str) -> None:
    url = server.url.replace("127.0.0.1", host) + "/voice.wav"
    with pytest.raises(FetchError):
        await fetch_recording(url, LIMIT)
    assert server.requests == []


@pytest.mark.parametrize(
    "host",
    [
        "10.1.2.3",
        "169.254.169.254",
        "168.63.129.16",
        "[::1]",
        "[fd00:ec2::254]",
        "[64:ff9b::a9fe:a9fe]",
        "[fe80::1%25lo]",
    ],
)
async def test_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(FetchError):
        await fetch_recording(f"http://{host}/voice.wav", LIMIT)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Every name has these addresses; returns the names that were asked for."""
    asked: list[str] = []

    async def resolve(_: object, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        asked.append(host)
        return [
            {"hostname": host, "host": each, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
            for each in addresses
        ]

    monkeypatch.setattr(fetch.aiohttp.ThreadedResolver, "resolve", resolve)
    return asked


async def test_a_name_with_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "8.8.8.8", "10.0.0.1")
    with pytest.raises(FetchError, match="not public"):
        await fetch_recording("http://voices.example/voice.wav", LIMIT)


async def test_the_address_that_was_checked_is_the_one_connected_to(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolving(monkeypatch, "127.0.0.1")
    port = server.url.rsplit(":", 1)[1]
    checked: list[fetch.Address] = []

    def allowed(address: fetch.Address) -> bool:
        checked.append(address)
        return True

    url = f"http://voices.example:{port}/voice.wav"
    assert await fetch_recording(url, LIMIT, allowed=allowed) == SOUND
    assert asked == ["voices.example"]
    assert set(checked) == {IPv4Address("127.0.0.1")} and len(checked) == 2
    assert server.requests[0].headers["host"] == f"voices.example:{port}"


async def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: object, **__: object) -> list[Any]:
        raise OSError("no such name")

    monkeypatch.setattr(fetch.aiohttp.ThreadedResolver, "resolve", resolve)
    with pytest.raises(FetchError, match="cannot be fetched"):
        await fetch_recording("http://voices.example/voice.wav", LIMIT)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://example.com/voice.wav", "must be http"),
        ("file:///etc/passwd", "must be http"),
        ("/etc/passwd", "must be http"),
        ("http:///voice.wav", "malformed|must be http"),
        ("http://", "malformed|must be http"),
        ("gopher://example.com/", "must be http"),
        ("http://me:secret@example.com/voice.wav", "user or password"),
        ("http://me@example.com/voice.wav", "user or password"),
        ("http://example.com:22/voice.wav", "port 22; 80, 443 and from 1024"),
        ("http://example.com:0/voice.wav", "port 0"),
        ("http://example.com:99999/voice.wav", "malformed"),
        ("http://[::1/voice.wav", "malformed"),
        ("http://a..b/voice.wav", "malformed"),
        (f"http://{'a' * 70}.com/voice.wav", "malformed"),
        ("http://xn--/voice.wav", "malformed"),
        ("http://\ud800/voice.wav", "malformed"),
        ("", "0 characters"),
        ("http://example.com/" + "a" * 3_000, "3019 characters; 1 to 2048"),
    ],
)
async def test_urls_against_the_rules_are_refused_by_reason(url: str, reason: str) -> None:
    with pytest.raises(FetchError, match=reason):
        await fetch_recording(url, LIMIT, allowed=anyone)


@given(text=st.text(max_size=80).map("http://127.0.0.1:1/".__add__) | st.text(max_size=80))
def test_any_text_is_a_url_under_the_rules_or_refused(text: str) -> None:
    try:
        url = fetch._checked(text)
    except FetchError:
        return
    assert url.scheme in ("http", "https") and url.host and url.user is None


async def test_three_redirects_are_followed_and_a_fourth_is_not(server: Server) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        left = int(request.path.strip("/"))
        if left == 0:
            return await server.sound(request)
        return web.Response(status=302, headers={"location": f"/{left - 1}"})

    server.handler = handler
    assert await server.get("/3") == SOUND
    server.requests.clear()
    assert "redirected more than 3 times" in await server.refusal("/4")
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/passwd", "must be http"),
        ("http://me:secret@example.com/", "user or password"),
        ("http://example.com:25/", "port 25"),
        ("", "0 characters"),
    ],
)
async def test_redirects_are_held_to_the_same_rules(server: Server, location: str, reason: str) -> None:
    server.handler = answer(status=307, location=location)
    assert reason in await server.refusal()


async def test_a_redirect_to_a_private_address_is_refused(server: Server) -> None:
    server.handler = answer(status=301, location="http://10.0.0.1/voice.wav")
    with pytest.raises(FetchError, match="not public"):
        await fetch_recording(server.url, LIMIT, allowed=lambda address: address.is_loopback or is_public(address))


async def test_a_length_over_the_limit_is_refused_unread(server: Server) -> None:
    server.handler = answer(bytes(LIMIT + 1), content_type="audio/wav")
    assert f"more than {LIMIT} bytes" in await server.refusal()


async def test_a_stream_without_a_length_is_left_at_the_limit(server: Server) -> None:
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        stream = web.StreamResponse(headers={"content-type": "audio/wav"})
        await stream.prepare(request)
        for _ in range(1_000):
            await stream.write(bytes(1 << 18))
            sent += 1 << 18
        return stream

    server.handler = handler
    assert f"more than {LIMIT} bytes" in await server.refusal()
    # Besides the limit, what the sockets between hold.
    assert sent < 64 << 20


async def test_a_slow_server_is_left_after_the_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "audio/wav"})
        await stream.prepare(request)
        while True:
            await stream.write(b"x")
            await asyncio.sleep(0.01)

    server.handler = handler
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", 0.2)
    assert "within 0.2 seconds" in await server.refusal()


@pytest.mark.parametrize("kind", ["text/html", "text/html; charset=utf-8", "application/xhtml+xml"])
async def test_a_web_page_is_refused(server: Server, kind: str) -> None:
    server.handler = answer(b"<html>", content_type=kind)
    assert "web page" in await server.refusal()


async def test_compressed_content_is_refused(server: Server) -> None:
    server.handler = answer(b"\x1f\x8b", content_type="audio/wav", content_encoding="gzip")
    assert "compressed" in await server.refusal()


@pytest.mark.parametrize("status", [204, 206, 304, 401, 404, 500])
async def test_other_statuses_are_refused(server: Server, status: int) -> None:
    server.handler = answer(status=status)
    assert f"status {status}" in await server.refusal()


async def test_an_answer_that_breaks_off_is_refused(server: Server) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "audio/wav", "content-length": "1000"})
        await stream.prepare(request)
        await stream.write(bytes(10))
        assert request.transport is not None
        request.transport.close()
        return stream

    server.handler = handler
    assert "cannot be fetched" in await server.refusal()


async def test_nobody_listening_is_refused_without_the_address(server: Server) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(FetchError) as caught:
        await fetch_recording(f"http://127.0.0.1:{port}/", LIMIT, allowed=anyone)
    assert "127.0.0.1" not in str(caught.value)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.0.2.1", "192.168.1.1",
        "168.63.129.16", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::127.0.0.1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "ff02::1", "2001:db8::1",
        "2001:0:808:808::", "64:ff9b:1::1",
    ],
)  # fmt: skip
def test_private_and_special_addresses(address: str) -> None:
    assert not is_public(ip_address(address))


@given(inner=st.integers(0, 2**32 - 1).map(IPv4Address) | st.ip_addresses(v=4, network="10.0.0.0/8"))
def test_an_address_that_carries_an_ipv4_address_is_judged_by_it(inner: IPv4Address) -> None:
    number = int(inner)
    for outer in (0xFFFF << 32 | number, 0x64FF9B << 96 | number, 0x2002 << 112 | number << 80):
        assert is_public(IPv6Address(outer)) == is_public(inner)
