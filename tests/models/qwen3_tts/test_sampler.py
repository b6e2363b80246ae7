"""Which codes frames get: the rules around the draws."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pega_omni_plugin.models.qwen3_tts.config import Sampling
from pega_omni_plugin.models.qwen3_tts.sampler import CpuSampler, DrawSettings
from pega_omni_plugin.nn.sampling import Uniforms

GROUPS, ALLOWED, END = 4, 10, 10
LIKELIEST = Sampling(0.0, 0, 1.0)
ANY = Sampling(1.0, 0, 1.0)


def sampler(*admitted: tuple[int, Sampling, float, int], slots: int = 4) -> CpuSampler:
    """One with requests of ``(slot, settings, penalty, seed)``."""
    made = CpuSampler(slots, GROUPS, ALLOWED)
    for slot, settings, penalty, seed in admitted:
        made.admit(slot, DrawSettings(settings, settings, penalty), seed)
    return made


def logits(**likely: float) -> torch.Tensor:
    """One row: zeros but for ``c3=5.0`` and the like."""
    row = torch.zeros(1, ALLOWED + 1)
    for name, value in likely.items():
        row[0, int(name[1:])] = value
    return row


def firsts(made: CpuSampler, given: torch.Tensor, slot: int = 1) -> Iterator[int]:
    """Codes of group 0, frame after frame, from the same logits."""
    frame = 0
    while True:
        made.begin([slot], np.array([frame]))
        yield int(made.first(given.clone())[0])
        frame += 1


def test_the_end_cannot_come_before_two_frames_and_can_then() -> None:
    codes = firsts(sampler((1, LIKELIEST, 1.0, 0)), logits(c10=9.0, c3=1.0))
    assert [next(codes) for _ in range(3)] == [3, 3, END]


def test_the_end_is_held_back_for_new_rows_only() -> None:
    made = sampler((1, LIKELIEST, 1.0, 0), (2, LIKELIEST, 1.0, 0))
    made.begin([1, 2], np.array([2, 1]))
    assert made.first(logits(c10=9.0, c3=1.0).repeat(2, 1)).tolist() == [END, 3]


@pytest.mark.parametrize("settings", [LIKELIEST, ANY, Sampling(1.0, 1, 1.0), Sampling(1.0, 5, 0.5)])
def test_code_zero_can_be_drawn(settings: Sampling) -> None:
    made = sampler((1, settings, 1.0, 0))
    codes = firsts(made, logits(c0=30.0))
    assert [next(codes) for _ in range(4)] == [0] * 4
    assert made.next(1, logits(c0=30.0)[:, :ALLOWED]).tolist() == [0]


def test_a_code_that_came_is_penalised_from_then_on() -> None:
    codes = firsts(sampler((1, LIKELIEST, 2.0, 0)), logits(c3=4.0, c5=3.0, c7=2.5))
    # 4, 3, 2.5; then 2, 3, 2.5; then 2, 1.5, 2.5; then 2, 1.5, 1.25, once and not once more.
    assert [next(codes) for _ in range(6)] == [3, 5, 7, 3, 3, 3]


def test_only_codes_of_group_zero_that_were_generated_count() -> None:
    made = sampler((1, LIKELIEST, 2.0, 0))
    made.begin([1], np.array([0]))
    for group in range(1, GROUPS):
        made.next(group, logits(c3=9.0)[:, :ALLOWED])  # 3 is drawn here, which is another codebook's
    assert made.first(logits(c3=4.0, c5=3.0)).tolist() == [3]


def test_other_groups_have_no_penalty() -> None:
    made = sampler((1, LIKELIEST, 2.0, 0))
    for frame in range(4):
        made.begin([1], np.array([frame]))
        made.first(logits(c3=4.0))
        assert [int(made.next(group, logits(c3=4.0, c5=3.0)[:, :ALLOWED])[0]) for group in (1, 2, 3)] == [3, 3, 3]


def test_a_new_request_has_no_past() -> None:
    made = sampler((1, LIKELIEST, 2.0, 0))
    given = logits(c3=4.0, c5=3.0)
    codes = firsts(made, given)
    assert [next(codes), next(codes)] == [3, 5]
    made.admit(1, DrawSettings(LIKELIEST, LIKELIEST, 2.0), 0)
    assert next(firsts(made, given)) == 3


def test_settings_of_a_new_request_hold_although_the_rows_are_the_same() -> None:
    made = sampler((1, LIKELIEST, 1.0, 0))
    given = logits(c3=0.1)
    codes = firsts(made, given)
    assert {next(codes) for _ in range(5)} == {3}
    made.admit(1, DrawSettings(ANY, ANY, 1.0), 0)
    codes = firsts(made, given)
    assert len({next(codes) for _ in range(20)}) > 3


def test_both_kinds_of_draw_have_settings_of_their_own() -> None:
    made = CpuSampler(1, GROUPS, ALLOWED)
    made.admit(1, DrawSettings(LIKELIEST, ANY, 1.0), 0)
    given, first, following = logits(c3=0.1), set(), set()
    for frame in range(20):
        made.begin([1], np.array([frame]))
        first.add(int(made.first(given)[0]))
        following.add(int(made.next(1, given[:, :ALLOWED])[0]))
    assert first == {3}
    assert len(following) > 3


def test_numbers_are_those_of_the_requests_seed_frame_and_group() -> None:
    """Past the block in which they are made, too. Ten codes as likely as each other: the number says which."""
    made = sampler((2, ANY, 1.0, 77))
    flat = torch.zeros(1, ALLOWED + 1)
    flat[0, END] = -torch.inf
    for frame in range(130):
        made.begin([2], np.array([frame]))
        drawn = [made.first(flat), *(made.next(group, flat[:, :ALLOWED]) for group in range(1, GROUPS))]
        wanted = np.floor(Uniforms(77, GROUPS).frames(frame, 1)[0] * 10)
        np.testing.assert_allclose(torch.cat(drawn).numpy(), wanted, rtol=0, atol=0)


def test_rows_have_their_own_numbers_and_padding_takes_the_likeliest() -> None:
    """Slot 1 is two frames ahead of slot 3."""
    made = sampler((1, ANY, 1.0, 5), (3, ANY, 1.0, 6))
    given = torch.zeros(4, ALLOWED + 1)
    given[:, END] = -torch.inf
    given[[1, 3], 4] = 0.01
    for frame in (0, 1):
        made.begin([1], np.array([frame]))
    for frame in range(8):
        made.begin([3, 0, 1, 0], np.array([frame, 0, frame + 2, 0]))
        mine, other = (Uniforms(seed, GROUPS).frames(had, 1)[0, 0] for seed, had in ((6, frame), (5, frame + 2)))
        assert made.first(given).tolist() == [int(mine * 10), 4, int(other * 10), 4]
