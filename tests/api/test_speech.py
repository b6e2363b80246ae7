from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import pytest

from pega_omni_plugin.api.errors import ApiError, InvalidRequest, ModelNotFound, Overloaded, TimedOut, Unavailable
from pega_omni_plugin.api.speech import PIECE_SAMPLES, Caller, CallerGone, SpeechService
from pega_omni_plugin.api.voices import VoiceStore
from pega_omni_plugin.audio.wav import HEADER_BYTES, wav_header
from pega_omni_plugin.engine.errors import EngineBusy, EngineDead, EngineError, EngineTimeout, RequestFailed
from pega_omni_plugin.engine.program import FinishReason, Prompt, RequestError
from pega_omni_plugin.engine.wire import Ending
from tests.api.fake_engine import INFO, ONE_SECOND, FakeEngine, FakeFront, Item, outcomes, pcm, serve, value

FAILURES = [
    (RequestFailed("row is bad"), "failed", ApiError),
    (EngineTimeout("no audio"), "timed_out", TimedOut),
    (EngineDead("process ended"), "engine_dead", Unavailable),
]


async def take(service: SpeechService, caller: Caller | None = None, **document: Any) -> list[bytes]:
    """The whole answer, as a handler sends it."""
    async with service.answer({"input": "Hello.", **document}, caller or Caller()) as answer:
        return [data async for data in (answer.events() if answer.call.sse else answer.audio())]


def events(sent: Sequence[bytes]) -> list[dict[str, Any]]:
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in sent)
    return [orjson.loads(event[len(b"data: ") :]) for event in sent]


async def test_wav_is_a_header_with_the_first_audio_and_then_every_piece_as_it_is_made() -> None:
    service = serve(FakeEngine([pcm(1, -2), pcm(3), Ending("stop", 1)]))
    assert await take(service) == [wav_header(24_000) + b"\x01\x00\xfe\xff", b"\x03\x00"]


async def test_pcm_is_the_samples_alone() -> None:
    service = serve(FakeEngine([pcm(1, -2), pcm(3), Ending("stop", 1)]))
    assert await take(service, response_format="pcm") == [b"\x01\x00\xfe\xff", b"\x03\x00"]


async def test_events_carry_the_same_bytes_and_the_usage_last() -> None:
    service = serve(FakeEngine([pcm(1, -2), pcm(3), Ending("stop", 2)]))
    *deltas, done = events(await take(service, stream_format="sse"))
    assert [event["type"] for event in deltas] == ["speech.audio.delta"] * 2
    audio = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert audio == wav_header(24_000) + b"\x01\x00\xfe\xff\x03\x00"
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 6, "output_tokens": 2, "total_tokens": 8, "finish_reason": "stop"},
    }


@pytest.mark.parametrize("length", [1, PIECE_SAMPLES, PIECE_SAMPLES + 1, 5 * PIECE_SAMPLES + 7])
async def test_a_long_message_is_handed_on_in_pieces_of_bounded_size(length: int) -> None:
    samples = (np.arange(length) % 30_000).astype(np.int16)
    service = serve(FakeEngine([samples, samples, Ending("stop", 1)]))
    raw, wav = await take(service, response_format="pcm"), await take(service)
    assert b"".join(raw) == samples.tobytes() * 2
    assert b"".join(wav) == wav_header(24_000) + samples.tobytes() * 2
    assert max(map(len, raw)) <= 2 * PIECE_SAMPLES
    assert value(service, "pega_audio_seconds_total") == pytest.approx(4 * length / 24_000)


@pytest.mark.parametrize(
    ("document", "media_type"),
    [
        ({}, "audio/wav"),
        ({"response_format": "pcm"}, "audio/pcm"),
        ({"stream_format": "sse", "response_format": "pcm"}, "text/event-stream"),
    ],
)
async def test_media_type_is_that_of_what_is_sent(document: dict[str, Any], media_type: str) -> None:
    async with serve(FakeEngine()).answer({"input": "Hello.", **document}, Caller()) as answer:
        assert answer.media_type == media_type


async def test_a_complete_answer_is_counted_once_with_its_times_and_seconds() -> None:
    service = serve(engine := FakeEngine())
    assert sum(map(len, await take(service))) == HEADER_BYTES + 2 * 24_000
    assert outcomes(service) == {"complete": 1}
    assert value(service, "pega_audio_seconds_total") == 1.0
    assert value(service, "pega_first_audio_seconds_count") == value(service, "pega_request_seconds_count") == 1
    assert engine.left == 1


@pytest.mark.parametrize(
    ("document", "error"),
    [({"input": ""}, InvalidRequest), ({"speed": 9}, InvalidRequest), ({"model": "other"}, ModelNotFound)],
)
async def test_a_wrong_request_is_counted_as_invalid_and_never_reaches_the_engine(
    document: dict[str, Any], error: type[ApiError]
) -> None:
    service = serve(engine := FakeEngine())
    with pytest.raises(error):
        await take(service, **document)
    assert outcomes(service) == {"invalid": 1}
    assert engine.spoken == []


@pytest.mark.parametrize(
    ("refusal", "outcome", "error"),
    [(EngineBusy("full"), "rejected", Overloaded), (EngineDead("gone"), "engine_dead", Unavailable)],
)
async def test_a_refusal_by_the_engine_is_counted_by_its_kind(
    refusal: EngineError, outcome: str, error: type[ApiError]
) -> None:
    engine = FakeEngine()
    engine.refusal = refusal
    service = serve(engine)
    with pytest.raises(error, match=str(refusal)):
        await take(service)
    assert outcomes(service) == {outcome: 1}
    assert value(service, "pega_first_audio_seconds_count") == 0


@pytest.mark.parametrize(("failure", "outcome", "error"), FAILURES)
async def test_failure_before_the_first_audio_is_an_error_and_no_answer(
    failure: EngineError, outcome: str, error: type[ApiError]
) -> None:
    service = serve(engine := FakeEngine([failure]))
    with pytest.raises(error) as raised:
        async with service.answer({"input": "Hello."}, Caller()):
            raise AssertionError("there is no audio to answer with")
    assert str(failure) in raised.value.message
    assert outcomes(service) == {outcome: 1}
    assert engine.left == 1


@pytest.mark.parametrize(("failure", "outcome", "error"), FAILURES)
async def test_failure_in_the_middle_of_audio_is_raised_and_counted_once(
    failure: EngineError, outcome: str, error: type[ApiError]
) -> None:
    service = serve(engine := FakeEngine([pcm(*[1] * 2400), failure]))
    heard = []
    with pytest.raises(error):
        async with service.answer({"input": "Hello."}, Caller()) as answer:
            async for data in answer.audio():
                heard.append(data)
    assert len(heard) == 1
    assert outcomes(service) == {outcome: 1}
    assert value(service, "pega_audio_seconds_total") == 0.1
    assert value(service, "pega_request_seconds_count") == 0
    assert engine.left == 1


@pytest.mark.parametrize(("failure", "outcome", "error"), FAILURES)
async def test_failure_in_the_middle_of_events_is_the_last_event_and_counted_once(
    failure: EngineError, outcome: str, error: type[ApiError]
) -> None:
    service = serve(FakeEngine([pcm(1), failure]))
    sent = []
    with pytest.raises(error):
        async with service.answer({"input": "Hello.", "stream_format": "sse"}, Caller()) as answer:
            async for event in answer.events():
                sent.append(event)
    delta, last = events(sent)
    assert delta["type"] == "speech.audio.delta"
    assert last["type"] == "speech.audio.error"
    assert str(failure) in last["error"]["message"]
    assert outcomes(service) == {outcome: 1}


async def test_an_ending_without_audio_is_an_error_and_no_empty_file() -> None:
    service = serve(FakeEngine([Ending("stop", 0)]))
    with pytest.raises(ApiError, match="no audio") as raised:
        await take(service)
    assert raised.value.status == 500
    assert outcomes(service) == {"failed": 1}


async def test_a_caller_who_leaves_in_the_queue_frees_the_request_and_is_counted_as_cancelled() -> None:
    service, caller = serve(engine := FakeEngine([])), Caller()
    asked = asyncio.create_task(take(service, caller))
    await engine.entered.wait()
    caller.leave()
    with pytest.raises(CallerGone):
        await asked
    assert engine.in_flight == 0
    assert outcomes(service) == {"cancelled": 1}


async def test_a_caller_who_left_before_the_engine_was_asked_is_noticed() -> None:
    service, caller = serve(engine := FakeEngine([])), Caller()
    caller.leave()
    with pytest.raises(CallerGone):
        await take(service, caller)
    assert engine.in_flight == 0
    assert outcomes(service) == {"cancelled": 1}


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_a_caller_who_leaves_in_the_middle_is_counted_as_cancelled(stream_format: str) -> None:
    service, caller = serve(engine := FakeEngine([pcm(1)])), Caller()
    asked = asyncio.create_task(take(service, caller, stream_format=stream_format))
    await engine.entered.wait()
    await asyncio.sleep(0)
    caller.leave()
    with pytest.raises(CallerGone):
        await asked
    assert engine.in_flight == 0
    assert outcomes(service) == {"cancelled": 1}


async def test_a_handler_that_stops_early_is_counted_as_cancelled() -> None:
    service = serve(engine := FakeEngine())
    async with service.answer({"input": "Hello."}, Caller()) as answer:
        await anext(answer.audio())
    assert outcomes(service) == {"cancelled": 1}
    assert engine.left == 1


async def test_a_handler_that_is_cancelled_is_counted_as_cancelled() -> None:
    service = serve(engine := FakeEngine([pcm(1)]))
    asked = asyncio.create_task(take(service))
    await engine.entered.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert outcomes(service) == {"cancelled": 1}
    assert engine.left == 1


async def test_a_bug_in_a_handler_is_not_hidden_and_counted_as_failed() -> None:
    service = serve(engine := FakeEngine())
    with pytest.raises(ZeroDivisionError):
        async with service.answer({"input": "Hello."}, Caller()):
            raise ZeroDivisionError
    assert outcomes(service) == {"failed": 1}
    assert engine.left == 1


async def test_every_outcome_is_counted_once() -> None:
    """One request after the other on one service: the counters add up to the requests."""
    engine = FakeEngine()
    service = serve(engine)
    scripts: list[Sequence[Item]] = [ONE_SECOND, [Ending("stop", 0)], *[[pcm(1), one[0]] for one in FAILURES]]
    for script in scripts:
        engine.script = script
        await _ignoring_errors(take(service))
    await _ignoring_errors(take(service, input=" "))
    engine.refusal = EngineBusy("full")
    await _ignoring_errors(take(service))
    assert outcomes(service) == {
        "complete": 1,
        "failed": 2,
        "timed_out": 1,
        "engine_dead": 1,
        "invalid": 1,
        "rejected": 1,
    }
    assert engine.in_flight == 0


async def test_the_engine_gets_the_checked_request() -> None:
    service = serve(engine := FakeEngine())
    await take(service, voice={"id": "echo"}, speed=2, instruct="softly", extra={"frames": 3}, seed=5)
    (speech,) = engine.spoken
    assert (speech.input, speech.voice, speech.speed, speech.instructions) == ("Hello.", "echo", 2.0, "softly")
    assert (speech.extra, speech.seed) == ({"frames": 3}, 5)


async def test_the_engine_gets_the_prompt_and_its_units_are_the_usage() -> None:
    service = serve(engine := FakeEngine([pcm(1), Ending("stop", 2)], front=FakeFront()))
    done = events(await take(service, stream_format="sse"))[-1]
    assert engine.prompts == [Prompt(7, {"text_ids": [1, 2]})]
    assert done["usage"] == {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9, "finish_reason": "stop"}


@pytest.mark.parametrize("reason", get_args(FinishReason))
async def test_the_usage_says_why_the_speech_ended(reason: FinishReason) -> None:
    service = serve(FakeEngine([pcm(1), Ending(reason, 1)]))
    async with service.answer({"input": "Hello."}, Caller()) as answer:
        assert answer.usage == {"input_tokens": 6, "output_tokens": 0, "total_tokens": 6, "finish_reason": None}
        assert len([data async for data in answer.audio()]) == 1
        assert answer.usage == {"input_tokens": 6, "output_tokens": 1, "total_tokens": 7, "finish_reason": reason}
    assert outcomes(service) == {"complete": 1}


async def test_what_the_front_refuses_is_counted_as_invalid_and_never_reaches_the_engine() -> None:
    front = FakeFront()
    front.refusal = RequestError("language", "language 'x' is unknown")
    service = serve(engine := FakeEngine(front=front))
    with pytest.raises(InvalidRequest, match="'x' is unknown"):
        await take(service)
    assert outcomes(service) == {"invalid": 1}
    assert engine.spoken == []


async def test_a_front_that_breaks_is_not_hidden_and_counted_as_failed() -> None:
    front = FakeFront()
    front.refusal = ZeroDivisionError()
    service = serve(FakeEngine(front=front))
    with pytest.raises(ZeroDivisionError):
        await take(service)
    assert outcomes(service) == {"failed": 1}


async def test_a_model_with_voices_of_its_own_knows_no_stored_ones(tmp_path: Path) -> None:
    """The store is shared by all models of a user, and this one would speak in its default voice."""
    store = VoiceStore(tmp_path)
    store.create(name="Carla", pcm=None, transcript=None, description="A deep voice.", now=1)
    with pytest.raises(InvalidRequest, match="voice 'Carla' is unknown"):
        await take(serve(FakeEngine(), store), voice="Carla")
    engine = FakeEngine(info=replace(INFO, clones="description"))
    await take(serve(engine, store), voice="Carla")
    assert [speech.instructions for speech in engine.spoken] == ["A deep voice."]


async def test_warm_up_speaks_the_sample_of_the_front() -> None:
    service = serve(engine := FakeEngine(front=FakeFront()))
    await service.warm_up()
    assert ([speech.input for speech in engine.spoken], engine.prompts) == (["One."], [Prompt(4)])


async def test_warm_up_speaks_before_the_service_is_ready() -> None:
    service = serve(engine := FakeEngine())
    assert not service.ready
    await service.warm_up()
    assert service.ready
    assert len(engine.spoken) == engine.left == 1


async def test_an_engine_that_cannot_speak_is_never_ready() -> None:
    service = serve(FakeEngine([RequestFailed("no voice")]))
    with pytest.raises(EngineError, match="no voice"):
        await service.warm_up()
    assert not service.ready


async def _ignoring_errors(answer: Any) -> None:
    with suppress(ApiError):
        await answer
