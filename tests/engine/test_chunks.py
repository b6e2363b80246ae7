"""The chunk policy against a simulated clock.

The bound under which the policy itself never lets playback run dry: no step takes longer than ``MARGIN_SECONDS`` more
than the step time that ``due`` was last told, nor longer than ``AHEAD_SECONDS``. For when ``due`` says no, or soon, the
listener's buffer holds more than ``AHEAD_SECONDS``, or at least the margin and the time of the frames that are missing
(whole ones, so at least one); both outlast the step to the next answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pega_omni_plugin.engine.chunks import AHEAD_SECONDS, MARGIN_SECONDS, REST_SECONDS, ChunkPolicy, Due
from pega_omni_plugin.engine.config import PROFILES, ChunkProfile

FRAME = 0.08
TINY = 1e-9
"""Of rounding, in seconds."""

profiles = st.one_of(
    st.sampled_from(list(PROFILES.values())),
    st.builds(ChunkProfile, first=st.integers(1, 20), steady=st.integers(1, 20)),
)


@dataclass(frozen=True)
class Message:
    at: float
    frames: range
    last: bool


def play(
    policy: ChunkPolicy, steps: list[float], estimates: list[float], busy: frozenset[int] = frozenset()
) -> list[Message]:
    """A stream of one frame a step: step ``i`` takes ``steps[i]``, and then ``estimates[i]`` is said to be its time.

    In the steps of ``busy`` the scheduler has another stream's message to send and leaves one that is due soon.
    """
    now = 100.0
    messages: list[Message] = []
    begin = 0
    for made, (step, estimate) in enumerate(zip(steps, estimates, strict=True), 1):
        now += step
        policy.made(policy.frame_seconds)
        last = made == len(steps)
        due = policy.due(now, estimate)
        if last or due is Due.NOW or (due is Due.SOON and made not in busy):
            policy.sent(policy.pending_seconds, now)
            messages.append(Message(now, range(begin, made), last))
            begin = made
    return messages


def averages(steps: list[float], start: float) -> list[float]:
    """The scheduler's running average, which has been at ``start`` before the stream."""
    seen: list[float] = []
    for step in steps:
        start += 0.2 * (step - start)
        seen.append(start)
    return seen


def targets(profile: ChunkProfile) -> Iterator[int]:
    target = profile.first
    while True:
        yield target
        target = min(2 * target, max(profile.steady, profile.first))


def ahead_before(messages: list[Message], index: int) -> float:
    """Seconds in the buffer of a listener who plays from the first message on, as message ``index`` arrives."""
    return messages[index].frames.start * FRAME - (messages[index].at - messages[0].at)


def stalled(messages: list[Message]) -> float:
    """Seconds without audio of a listener who plays what is there as soon as it is there."""
    dry_at, total = messages[0].at, 0.0
    for message in messages:
        total += max(0.0, message.at - dry_at)
        dry_at = max(dry_at, message.at) + len(message.frames) * FRAME
    return total


any_steps = st.lists(st.floats(0, 0.3), min_size=1, max_size=80)
any_busy = st.frozensets(st.integers(1, 120))


@given(profile=profiles, steps=any_steps, wrong=st.floats(0, 0.5), busy=any_busy)
def test_every_frame_leaves_once_in_order_and_the_first_message_has_exactly_its_frames(
    profile: ChunkProfile, steps: list[float], wrong: float, busy: frozenset[int]
) -> None:
    policy = ChunkPolicy(profile, FRAME)
    messages = play(policy, steps, [wrong] * len(steps), busy)
    assert [frame for message in messages for frame in message.frames] == list(range(len(steps)))
    assert len(messages[0].frames) == min(profile.first, len(steps))
    assert policy.pending_seconds == 0
    assert policy.sent_seconds == pytest.approx(len(steps) * FRAME)


@given(profile=profiles, steps=any_steps, wrong=st.floats(0, 0.5), busy=any_busy)
def test_messages_follow_the_ramp_unless_playback_is_near_its_end_or_far_ahead(
    profile: ChunkProfile, steps: list[float], wrong: float, busy: frozenset[int]
) -> None:
    messages = play(ChunkPolicy(profile, FRAME), steps, [wrong] * len(steps), busy)
    for index, (message, target) in enumerate(zip(messages, targets(profile), strict=False)):
        if index == 0 or message.last:
            continue
        ahead = ahead_before(messages, index)
        if len(message.frames) < target and ahead <= AHEAD_SECONDS:
            assert ahead - (target - len(message.frames)) * wrong < MARGIN_SECONDS + TINY
        if len(message.frames) > target:
            after_previous = message.frames.start * FRAME - (messages[index - 1].at - messages[0].at)
            assert after_previous > AHEAD_SECONDS - TINY


@given(profile=profiles, steps=any_steps, wrong=st.floats(0, 0.5), busy=any_busy)
def test_far_ahead_of_playback_there_is_at_most_one_message_per_rest(
    profile: ChunkProfile, steps: list[float], wrong: float, busy: frozenset[int]
) -> None:
    messages = play(ChunkPolicy(profile, FRAME), steps, [wrong] * len(steps), busy)
    for index, (before, message) in enumerate(pairwise(messages), 1):
        if not message.last and ahead_before(messages, index) > AHEAD_SECONDS + TINY:
            assert message.at - before.at >= REST_SECONDS - TINY


@given(
    profile=profiles,
    steps=st.lists(st.floats(0, MARGIN_SECONDS), min_size=1, max_size=120),
    wrong=st.floats(0, 1),
    busy=any_busy,
)
def test_a_model_twice_as_fast_as_speech_never_stalls_whatever_the_estimate(
    profile: ChunkProfile, steps: list[float], wrong: float, busy: frozenset[int]
) -> None:
    """Steps within the margin need no estimate at all, and half a frame a step is fast enough."""
    assert stalled(play(ChunkPolicy(profile, FRAME), steps, [wrong] * len(steps), busy)) <= TINY


@given(profile=profiles, step=st.floats(0, FRAME), count=st.integers(1, 120), busy=any_busy)
def test_a_steady_model_as_fast_as_speech_never_stalls(
    profile: ChunkProfile, step: float, count: int, busy: frozenset[int]
) -> None:
    steps = [step] * count
    assert stalled(play(ChunkPolicy(profile, FRAME), steps, averages(steps, step), busy)) <= 1e-6


@given(
    profile=profiles,
    start=st.floats(0, FRAME),
    jitter=st.lists(st.sampled_from([-0.04, -0.02, -0.01, 0.0, 0.01, 0.02, MARGIN_SECONDS]), min_size=1, max_size=120),
    busy=any_busy,
)
def test_within_the_bound_the_policy_adds_no_stall_to_the_models_own(
    profile: ChunkProfile, start: float, jitter: list[float], busy: frozenset[int]
) -> None:
    """Any step times up to the bound, slower than speech too: sending every frame at once would stall no less."""
    steps: list[float] = []
    estimates: list[float] = []
    for late in jitter:
        steps.append(min(max(0.0, start + late), AHEAD_SECONDS))
        estimates.append(start := averages(steps[-1:], start)[0])
    messages = play(ChunkPolicy(profile, FRAME), steps, estimates, busy)
    assume(len(messages) > 1)
    at_once = [messages[0]]
    now = messages[0].at
    for frame in range(messages[0].frames.stop, len(steps)):
        now += steps[frame]
        at_once.append(Message(now, range(frame, frame + 1), frame == len(steps) - 1))
    assert stalled(messages) == pytest.approx(stalled(at_once), abs=1e-6)


@pytest.mark.parametrize(
    ("profile", "ramp"), [("ttfa", [1, 2, 4, 8]), ("balanced", [2, 4, 8]), ("throughput", [4, 8, 16])]
)
def test_a_model_that_costs_nothing_ramps_up_to_one_second_and_then_rests(profile: str, ramp: list[int]) -> None:
    """1 ms a step: the ramp fills the buffer, what is over a second plays away, then 500 frames leave each half second.

    Two seconds of steps make 160 s of speech.
    """
    messages = play(ChunkPolicy(PROFILES[profile], FRAME), [0.001] * 2000, [0.001] * 2000)
    made = [len(message.frames) for message in messages]
    assert made[: len(ramp)] == ramp
    assert set(made[len(ramp) + 1 : -1]) == {500}
    assert len(made) <= 9


def test_a_program_that_makes_a_sentence_at_once_sends_it_at_once() -> None:
    policy = ChunkPolicy(PROFILES["balanced"], FRAME)
    policy.made(3.1)
    assert policy.due(0.0, 0.1) is Due.NOW
    policy.sent(policy.pending_seconds, 0.0)
    policy.made(2.0)
    assert policy.due(0.2, 0.1) is Due.NO
    assert policy.due(0.5, 0.1) is Due.SOON
    assert policy.due(2.0, 0.1) is Due.SOON
    assert policy.due(2.2, 0.1) is Due.NOW


@pytest.mark.parametrize(
    ("step", "due"), [(0.029, Due.NO), (0.031, Due.NOW), (0.069, Due.NOW), (0.071, Due.NOW), (0.5, Due.NOW)]
)
def test_what_is_there_goes_where_the_rest_would_come_within_the_margin(step: float, due: Due) -> None:
    """80 ms were sent 10 ms ago, one more frame is there and one is missing: 70 ms - 40 ms are left for it."""
    policy = ChunkPolicy(PROFILES["ttfa"], FRAME)
    policy.made(FRAME)
    policy.sent(policy.pending_seconds, 0.0)
    policy.made(FRAME)
    assert policy.due(0.01, step) is due


def test_nothing_pending_is_never_due() -> None:
    policy = ChunkPolicy(PROFILES["ttfa"], FRAME)
    assert policy.due(0.0, 0.0) is Due.NO
    policy.made(FRAME)
    policy.sent(policy.pending_seconds, 0.0)
    assert policy.due(100.0, 0.0) is Due.NO


def test_less_than_a_frame_is_not_a_frame_and_nearly_all_of_one_is() -> None:
    policy = ChunkPolicy(PROFILES["ttfa"], FRAME)
    policy.made(0.4 * FRAME)
    assert policy.due(0.0, 0.0) is Due.NO
    policy.made(0.2 * FRAME)
    assert policy.due(0.0, 0.0) is Due.NOW
