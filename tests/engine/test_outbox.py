"""Audio on its way out: nothing lost or out of order, long messages bounded, one after the other and paced."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.engine import outbox
from pega_omni_plugin.engine.chunks import Due
from pega_omni_plugin.engine.config import PROFILES
from pega_omni_plugin.engine.outbox import LONG_SAMPLES_PER_SECOND, MESSAGE_SAMPLES, LongMessages, Outgoing
from pega_omni_plugin.engine.wire import Ending

RATE, FRAME = 24_000, 1920


def outgoing() -> Outgoing:
    return Outgoing(PROFILES["balanced"], RATE, FRAME)


@given(
    pieces=st.lists(st.integers(0, 3 * FRAME), max_size=40),
    takes=st.lists(st.integers(0, 40), max_size=10),
    limit=st.integers(1, 10 * FRAME),
)
def test_what_is_taken_is_what_was_added(pieces: list[int], takes: list[int], limit: int) -> None:
    stream, made, taken = outgoing(), [], []
    with patch.object(outbox, "MESSAGE_SAMPLES", limit):
        for index, length in enumerate(pieces):
            made.append(np.arange(length, dtype=np.int16))
            stream.add(made[-1])
            if index in takes:
                taken.append(stream.take(0.0))
        stream.ending = Ending("stop", 0)
        while not stream.complete:
            taken.append(stream.take(0.0))
    expected = np.concatenate([np.zeros(0, np.int16), *made])
    assert np.concatenate([np.zeros(0, np.int16), *taken]).tolist() == expected.tolist()
    assert stream.samples == len(expected)
    assert all(len(message) < limit + 3 * FRAME + 1 for message in taken)


def test_the_last_message_goes_at_once_unless_it_is_long() -> None:
    stream = outgoing()
    stream.add(np.zeros(MESSAGE_SAMPLES, np.int16))
    stream.ending = Ending("stop", 125)
    assert stream.due(0.0, 0.0) is Due.NOW
    stream.add(np.zeros(1, np.int16))
    assert stream.due(0.0, 0.0) is Due.SOON
    stream.take(0.0)
    assert not stream.complete
    assert stream.goes_on(0.0, 0.0)
    stream.take(0.0)
    assert stream.complete
    assert not stream.goes_on(0.0, 0.0)


def test_a_full_message_need_not_rest() -> None:
    stream = outgoing()
    for _ in range(30):
        stream.add(np.zeros(FRAME, np.int16))
    assert stream.due(0.0, 0.0) is Due.NOW
    stream.take(0.0)
    stream.add(np.zeros(FRAME, np.int16))
    assert stream.due(0.01, 0.0) is Due.NO
    stream.add(np.zeros(MESSAGE_SAMPLES, np.int16))
    assert stream.due(0.01, 0.0) is Due.SOON


def test_a_taken_message_is_a_copy() -> None:
    stream, buffer = outgoing(), np.ones(FRAME, np.int16)
    stream.add(buffer)
    taken = stream.take(0.0)
    buffer[:] = 7
    assert taken.tolist() == [1] * FRAME


def test_long_messages_leave_in_the_order_asked_each_once_and_paced() -> None:
    line = LongMessages()
    for name in ("a", "b", "a", "c"):
        line.ask(name)
    line.drop("b")
    assert line.next(10.0) == "a"
    line.sent(MESSAGE_SAMPLES, 10.0)
    free = 10.0 + MESSAGE_SAMPLES / LONG_SAMPLES_PER_SECOND
    assert line.next(free - 1e-6) is None
    assert line.next(free) == "c"
    assert line.next(free + 1) is None


@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(1, 3 * MESSAGE_SAMPLES)), min_size=1, max_size=100))
def test_no_faster_than_the_pace(messages: list[tuple[float, int]]) -> None:
    """Whatever the sizes: over any time, at most the pace and the one message that is under way."""
    line, now, sent, largest = LongMessages(), 0.0, 0, 0
    for wait, samples in messages:
        now += wait
        line.ask("a")
        if line.next(now) is None:
            continue
        line.sent(samples, now)
        sent, largest = sent + samples, max(largest, samples)
        assert sent <= now * LONG_SAMPLES_PER_SECOND + largest * (1 + 1e-9)


def test_short_messages_count_against_the_pace() -> None:
    line = LongMessages()
    line.sent(LONG_SAMPLES_PER_SECOND, 0.0)
    line.ask("a")
    assert line.next(0.99) is None
    assert line.next(1.0) == "a"
