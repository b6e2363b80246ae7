from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from pega_omni_plugin.engine.errors import EngineDead, EngineTimeout, RequestFailed
from pega_omni_plugin.engine.program import Pcm
from pega_omni_plugin.engine.stream import SpeechStream
from pega_omni_plugin.engine.wire import Ending
from tests.bench.virtual_time import run

ENDING = Ending("stop", 3)


def piece(value: int) -> Pcm:
    return np.full(4, value, np.int16)


async def collect(stream: SpeechStream) -> list[int]:
    return [int(pcm[0]) async for pcm in stream]


def test_pieces_come_in_order_and_the_ending_after_them() -> None:
    async def story() -> None:
        stream = SpeechStream(1, 10)
        for value in (1, 2, 3):
            stream.put(piece(value))
        stream.put(ENDING)
        assert stream.ending is None
        assert await collect(stream) == [1, 2, 3]
        assert stream.ending == ENDING
        assert await collect(stream) == []

    run(story())


def test_a_waiting_caller_gets_each_piece_as_it_is_made() -> None:
    async def story() -> None:
        stream = SpeechStream(1, 10)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for value in (1, 2):
            loop.call_later(0.4 * value, stream.put, piece(value))
        loop.call_later(1.2, stream.put, ENDING)
        came = [(int(pcm[0]), round(loop.time() - begun, 3)) async for pcm in stream]
        assert came == [(1, 0.4), (2, 0.8)]

    run(story())


@pytest.mark.parametrize("kind", [RequestFailed, EngineDead])
def test_a_failure_comes_after_what_is_there_already(kind: Callable[[str], Exception]) -> None:
    async def story() -> None:
        stream = SpeechStream(1, 10)
        stream.put(piece(1))
        stream.fail(error := kind("gone"))
        assert int((await anext(stream))[0]) == 1
        with pytest.raises(type(error), match="gone"):
            await anext(stream)
        assert stream.ending is None

    run(story())


def test_a_failure_wakes_a_waiting_caller() -> None:
    async def story() -> None:
        stream = SpeechStream(60, 600)
        asyncio.get_running_loop().call_later(1, stream.fail, EngineDead("gone"))
        with pytest.raises(EngineDead):
            await anext(stream)
        assert asyncio.get_running_loop().time() == pytest.approx(1)

    run(story())


def test_silence_for_too_long_is_a_timeout_and_audio_resets_it() -> None:
    async def story() -> None:
        stream = SpeechStream(2, 100)
        loop = asyncio.get_running_loop()
        for second in (1.5, 3.0, 4.5):
            loop.call_later(second, stream.put, piece(1))
        for _ in range(3):
            await anext(stream)
        with pytest.raises(EngineTimeout, match="no audio for 2 s"):
            await anext(stream)
        assert loop.time() == pytest.approx(6.5)

    run(story())


def test_a_request_ends_when_its_time_is_over_however_steady_its_audio() -> None:
    async def story() -> None:
        stream = SpeechStream(2, 5)
        loop = asyncio.get_running_loop()
        for second in range(1, 20):
            loop.call_later(second, stream.put, piece(second))
        heard = []
        with pytest.raises(EngineTimeout, match="ran out of time"):
            async for pcm in stream:
                heard.append(int(pcm[0]))
        assert heard in ([1, 2, 3, 4], [1, 2, 3, 4, 5])
        assert loop.time() == pytest.approx(5)

    run(story())


def test_cancelling_a_waiting_caller_is_no_timeout() -> None:
    async def story() -> None:
        stream = SpeechStream(1, 10)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(story())


def test_a_caller_that_has_left_hears_nothing_more_whatever_is_there() -> None:
    async def story() -> None:
        stream = SpeechStream(1, 10)
        stream.put(piece(1))
        stream.put(piece(2))
        stream.put(ENDING)
        await anext(stream)
        stream.abandon(error := RequestFailed("left"))
        with pytest.raises(RequestFailed) as raised:
            await anext(stream)
        assert raised.value is error
        assert stream.ending is None

    run(story())


def test_a_slow_reader_runs_out_of_time_though_audio_is_there() -> None:
    async def story() -> None:
        stream = SpeechStream(5, 10)
        stream.put(piece(1))
        stream.put(piece(2))
        await anext(stream)
        await asyncio.sleep(10)
        with pytest.raises(EngineTimeout):
            await anext(stream)

    run(story())
