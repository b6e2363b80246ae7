from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.engine.slots import SlotPool


@given(size=st.integers(1, 8), moves=st.lists(st.integers(0, 15), max_size=60))
def test_a_slot_is_leased_to_one_at_a_time_and_never_lost(size: int, moves: list[int]) -> None:
    """A move below 8 leases; any other gives back one of those leased."""
    pool = SlotPool(size)
    leased: list[int] = []
    for move in moves:
        if move < 8:
            slot = pool.lease()
            assert (slot is None) == (len(leased) == size)
            if slot is not None:
                assert 1 <= slot <= size
                assert slot not in leased
                leased.append(slot)
        elif leased:
            pool.give_back(leased.pop(move % len(leased)))
        assert pool.leased == len(leased)
    for slot in leased:
        pool.give_back(slot)
    assert sorted(pool.lease() or 0 for _ in range(size)) == list(range(1, size + 1))


def test_the_lowest_free_slot_is_leased_first() -> None:
    pool = SlotPool(3)
    assert [pool.lease(), pool.lease(), pool.lease()] == [1, 2, 3]
    pool.give_back(2)
    pool.give_back(1)
    assert [pool.lease(), pool.lease(), pool.lease()] == [1, 2, None]


@pytest.mark.parametrize("slot", [0, 1, 3])
def test_giving_back_what_is_not_leased_is_an_error(slot: int) -> None:
    pool = SlotPool(3)
    assert pool.lease() == 1
    pool.give_back(1)
    with pytest.raises(KeyError):
        pool.give_back(slot)
