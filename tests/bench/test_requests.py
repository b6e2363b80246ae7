from __future__ import annotations

from typing import Any

import orjson
import pytest

from pega_omni_plugin.bench.client import Client
from pega_omni_plugin.bench.load import WallClock
from pega_omni_plugin.bench.requests import SpeechRequests, speak, synthetic_prompts
from tests.bench.virtual_time import MS


def requests(**changes: Any) -> SpeechRequests:
    fields: dict[str, Any] = {
        "model": "m",
        "prompts": ["one", "two"],
        "voice": "alloy",
        "response_format": "pcm",
        "stream_format": "audio",
        "sample_rate": 24000,
        "extra": {},
        "fields": {},
    }
    return SpeechRequests(**(fields | changes))


def test_body_says_what_was_asked_and_no_more() -> None:
    assert orjson.loads(requests().body(0)) == {
        "model": "m",
        "input": "one",
        "voice": "alloy",
        "response_format": "pcm",
    }


def test_body_carries_stream_format_extra_and_more_fields() -> None:
    body = requests(stream_format="sse", extra={"frames": 13}, fields={"stream": True, "voice": "other"}).body(0)
    document = orjson.loads(body)
    assert (document["stream_format"], document["extra"], document["stream"]) == ("sse", {"frames": 13}, True)
    assert document["voice"] == "other"


def test_prompts_are_used_in_turn() -> None:
    assert [orjson.loads(requests().body(index))["input"] for index in range(3)] == ["one", "two", "one"]


@pytest.mark.parametrize("chars", [1, 7, 120, 4096])
def test_made_up_prompts_have_the_length_and_differ(chars: int) -> None:
    prompts = synthetic_prompts(chars)
    assert {len(prompt) for prompt in prompts} == {chars}
    assert chars < 7 or len(set(prompts)) == len(prompts)
    assert prompts == synthetic_prompts(chars)


async def test_record_counts_from_the_due_moment_and_tells_what_the_client_waited(server: str) -> None:
    clock, client = WallClock(), Client(f"{server}/good")
    record = await speak(client, requests(), 0, clock.now() - 5000 * MS, clock, timeout_s=60)
    client.close()
    assert record.ok and record.error is None
    assert record.ttfp_ms is not None and record.e2e_ms is not None
    assert 5000 <= record.wait_ms <= record.ttfp_ms <= record.e2e_ms
    assert (record.audio_s, record.underrun_ms) == (0.4, 0)


@pytest.mark.parametrize(
    ("what", "changes", "error"),
    [
        ("refuse", {}, "HTTP 429: queue is full"),
        ("abort", {}, "connection closed before the response ended"),
        ("silent", {}, "the response held no audio"),
        ("good", {"response_format": "wav"}, "not a WAV stream"),
        ("good", {"stream_format": "sse"}, "the event stream ended without speech.audio.done"),
        ("slow", {}, "timed out after 0.2 s"),
    ],
)
async def test_failed_request_is_a_record(server: str, what: str, changes: dict[str, Any], error: str) -> None:
    clock, client = WallClock(), Client(f"{server}/{what}")
    timeout_s = 0.2 if what == "slow" else 60
    record = await speak(client, requests(**changes), 0, clock.now(), clock, timeout_s)
    client.close()
    assert not record.ok
    assert record.error is not None and record.error.startswith(error)
    assert (record.ttfp_ms, record.e2e_ms, record.audio_s, record.underrun_ms) == (None, None, None, None)
