from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pega_omni_plugin.bench.client import IDLE_SECONDS, Client, RequestFailed, ServerUnreachable
from tests.bench.virtual_time import SECOND

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = CHUNKED + b"4\r\nabcd\r\n0\r\n\r\n"


class Pieces:
    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self._arrived = asyncio.Semaphore(0)

    def write(self, at_ns: int, data: bytes) -> None:
        self.pieces.append((at_ns, data))
        self._arrived.release()

    async def next(self) -> None:
        """Wait for a piece that was not waited for yet."""
        await self._arrived.acquire()

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class Server:
    """Answers each request with the next script: bytes to send, ``None`` to close, an event to wait for."""

    def __init__(self, *scripts: list[bytes | asyncio.Event | None]) -> None:
        self.scripts = list(scripts)
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while self.scripts:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionResetError):
                break
            length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
            self.requests.append(head + await reader.readexactly(length))
            self.asked.set()
            for step in self.scripts.pop(0):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif step is None:
                    writer.close()
                    return
                else:
                    writer.write(step)
                    await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(*scripts: list[bytes | asyncio.Event | None]) -> AsyncIterator[Server]:
    script = Server(*scripts)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()


async def failure(*script: bytes | asyncio.Event | None) -> str:
    async with serving(list(script)) as server:
        client = Client(server.url)
        with pytest.raises(RequestFailed) as caught:
            await client.post("/x", b"{}", Pieces())
        client.close()
    return str(caught.value)


async def test_request_is_what_http_wants() -> None:
    async with serving([WHOLE]) as server:
        await Client(server.url + "/tts/v1").post("/v1/audio/speech", b'{"a":1}', Pieces())
    line, host, *rest = server.requests[0].decode().split("\r\n")
    assert line == "POST /tts/v1/audio/speech HTTP/1.1"
    assert host == f"Host: {server.url.removeprefix('http://')}"
    assert rest == ["Content-Type: application/json", "Content-Length: 7", "", '{"a":1}']


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_body_is_the_same_however_the_response_is_cut(step: int) -> None:
    response = CHUNKED + b"3\r\nabc\r\n10;ext=1\r\n0123456789abcdef\r\n0\r\nTrailer: x\r\n\r\n"
    async with serving([response[at : at + step] for at in range(0, len(response), step)]) as server:
        pieces = Pieces()
        await Client(server.url).post("/x", b"", pieces)
    assert pieces.body == b"abc0123456789abcdef"


async def test_content_length_body_is_streamed_and_ends_at_its_length() -> None:
    go = asyncio.Event()
    async with serving([HEAD + b"content-length: 6\r\n\r\nabc", go, b"def"]) as server:
        pieces = Pieces()
        request = asyncio.create_task(Client(server.url).post("/x", b"", pieces))
        await pieces.next()
        assert pieces.body == b"abc" and not request.done()
        go.set()
        await request
    assert pieces.body == b"abcdef"


async def test_pieces_carry_the_time_at_which_they_arrived_and_the_end_its_own() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    async with serving([CHUNKED + b"1\r\na\r\n", first, b"1\r\nb\r\n", second, b"0\r\n\r\n"]) as server:
        pieces, now = Pieces(), 10
        request = asyncio.create_task(Client(server.url, clock=lambda: now).post("/x", b"", pieces))
        await pieces.next()
        now = 25
        first.set()
        await pieces.next()
        now = 70
        second.set()
        ended_ns = await request
    assert pieces.pieces == [(10, b"a"), (25, b"b")]
    assert ended_ns == 70


async def test_connection_is_used_again() -> None:
    async with serving([WHOLE], [WHOLE], [WHOLE]) as server:
        client = Client(server.url)
        for _ in range(3):
            await client.post("/x", b"", Pieces())
        assert server.connections == 1


async def test_connection_carries_one_request_at_a_time() -> None:
    go = asyncio.Event()
    async with serving([go, WHOLE], [WHOLE]) as server:
        client = Client(server.url)
        slow = asyncio.create_task(client.post("/x", b"", Pieces()))
        await server.asked.wait()
        await client.post("/x", b"", Pieces())
        go.set()
        await slow
        assert server.connections == 2


async def test_connection_idle_for_long_is_not_used_again() -> None:
    assert IDLE_SECONDS < 4
    async with serving([WHOLE], [WHOLE]) as server:
        now = 0
        client = Client(server.url, clock=lambda: now)
        await client.post("/x", b"", Pieces())
        now = round(IDLE_SECONDS * SECOND)
        await client.post("/x", b"", Pieces())
        assert server.connections == 2


async def test_connection_is_dropped_where_the_server_says_so() -> None:
    closing = HEAD + b"Connection: close\r\nContent-Length: 1\r\n\r\na"
    async with serving([closing], [WHOLE]) as server:
        client = Client(server.url)
        await client.post("/x", b"", Pieces())
        await client.post("/x", b"", Pieces())
        assert server.connections == 2


async def test_nagle_is_off() -> None:
    async with serving([WHOLE]) as server:
        client = Client(server.url)
        await client.connect()
        ((_, connection),) = client._idle
        raw = connection._transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        client.close()


async def test_chunked_body_cut_short_fails() -> None:
    assert await failure(CHUNKED + b"4\r\nabcd\r\n", None) == "connection closed before the response ended"
    assert await failure(CHUNKED + b"4\r\nab", None) == "connection closed before the response ended"


async def test_content_length_body_cut_short_fails() -> None:
    cut = await failure(HEAD + b"Content-Length: 9\r\n\r\nabcd", None)
    assert cut == "connection closed before the response ended"


async def test_connection_closed_without_an_answer_fails() -> None:
    assert await failure(None) == "connection closed before the response ended"


async def test_body_that_ends_with_the_connection_fails_because_a_cut_one_would_look_whole() -> None:
    assert "neither Content-Length nor Transfer-Encoding" in await failure(HEAD + b"\r\nabcd", None)


async def test_malformed_response_fails() -> None:
    assert (await failure(b"hello\r\n\r\n")).startswith("malformed response")
    assert (await failure(CHUNKED + b"zz\r\n")).startswith("malformed response")


async def test_refusal_carries_status_and_message() -> None:
    body = b'{"error":{"message":"queue is full","type":"server_error"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert await failure(head + body) == "HTTP 429: queue is full"
    plain = b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nNot Found"
    assert await failure(plain) == "HTTP 404: Not Found"


async def test_connection_is_used_again_after_a_refusal() -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    async with serving([refusal], [WHOLE]) as server:
        client, pieces = Client(server.url), Pieces()
        with pytest.raises(RequestFailed, match="HTTP 400"):
            await client.post("/x", b"", Pieces())
        await client.post("/x", b"", pieces)
        assert (server.connections, pieces.body) == (1, b"abcd")


async def test_what_the_sink_raises_reaches_the_caller_and_ends_the_connection() -> None:
    class Refusing(Pieces):
        def write(self, at_ns: int, data: bytes) -> None:
            raise KeyError("sink")

    async with serving([WHOLE], [WHOLE]) as server:
        client = Client(server.url)
        with pytest.raises(KeyError, match="sink"):
            await client.post("/x", b"", Refusing())
        await client.post("/x", b"", Pieces())
        assert server.connections == 2


async def test_request_given_up_leaves_no_connection_to_use_again() -> None:
    never = asyncio.Event()
    async with serving([CHUNKED + b"1\r\na\r\n", never], [WHOLE]) as server:
        client, pieces = Client(server.url), Pieces()
        request = asyncio.create_task(client.post("/x", b"", pieces))
        await pieces.next()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await client.post("/x", b"", Pieces())
        assert server.connections == 2
        never.set()


async def test_bytes_after_the_response_end_the_connection() -> None:
    async with serving([WHOLE + b"HTTP/1.1 200 OK\r\nbogus"], [WHOLE]) as server:
        client, pieces = Client(server.url), Pieces()
        await client.post("/x", b"", pieces)
        await client.post("/x", b"", pieces)
        assert (pieces.body, server.connections) == (b"abcdabcd", 2)


async def test_unreachable_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerUnreachable, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
        await Client(f"http://127.0.0.1:{port}").connect()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http:///v1"])
def test_base_url_must_have_a_scheme_and_a_host(url: str) -> None:
    with pytest.raises(ValueError, match="base URL"):
        Client(url)


async def test_json_document() -> None:
    body = b'{"data":[{"id":"m"}]}'
    async with serving([HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body], [WHOLE]) as server:
        client = Client(server.url + "/v1/")
        assert await client.get_json("/v1/models") == {"data": [{"id": "m"}]}
        assert server.requests[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
        with pytest.raises(RequestFailed, match="GET /v1/models: not JSON"):
            await client.get_json("/v1/models")
