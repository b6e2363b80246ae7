"""The embedded voice, as a newcomer starts it: no arguments, and the sentences are heard."""

from __future__ import annotations

import io
from collections.abc import Iterator

import httpx
import pytest
import soundfile

from tests.harness import Server, launch
from tests.speech_check import share_heard, words_heard

SENTENCES = (
    "The weather in the city is warm today.",
    "She opened the door and walked into the garden.",
    "There are seven days in every week.",
    "We will leave for the station in the morning.",
)


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with launch(tmp_path_factory.mktemp("voice")) as server:
        yield server


def said(server: Server, text: str, **fields: object) -> bytes:
    answer = httpx.post(
        f"{server.url}/v1/audio/speech", json={"model": "pega-omni-joe", "input": text, **fields}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.content


def test_four_sentences_are_heard(voice: Server) -> None:
    shares = []
    for sentence in SENTENCES:
        samples, rate = soundfile.read(io.BytesIO(said(voice, sentence)), dtype="int16")
        assert rate == 24_000
        shares.append((share_heard(sentence, words_heard(samples, rate)), len(sentence.split())))
    heard = sum(share * words for share, words in shares) / sum(words for _, words in shares)
    assert heard >= 0.8, shares


def test_the_first_sentence_is_sent_while_the_rest_is_made(voice: Server) -> None:
    body = {"model": "pega-omni-joe", "input": " ".join(SENTENCES * 3), "response_format": "pcm"}
    with httpx.stream("POST", f"{voice.url}/v1/audio/speech", json=body, timeout=60) as answer:
        pieces = [len(piece) for piece in answer.iter_raw()]
    assert len(pieces) > 3
    assert pieces[0] < sum(pieces) / 4


def test_the_printed_request_works(voice: Server) -> None:
    """The line that the launch script prints is the one that a newcomer pastes."""
    printed = voice.log.read_text()
    assert f"curl {voice.url}/v1/audio/speech" in printed
    assert '"model": "pega-omni-joe"' in printed
