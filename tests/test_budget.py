"""Time is shared out in proportion to work, and what is left over goes on."""

from time import monotonic, sleep

import pytest

from hesscore.budget import NEVER, Budget, Stop


def test_without_a_limit_nothing_stops():
    assert Budget(None, 3.0).step(1.0, (0.5, 0.5)) == [NEVER, NEVER]
    assert not NEVER()
    assert NEVER.left() == float("inf")


def test_a_step_gets_its_share():
    start = monotonic()
    budget = Budget(100.0, 10.0)
    (stop,) = budget.step(2.0)
    assert stop.end - start == pytest.approx(20, abs=0.5)
    first, second = budget.step(4.0, (0.75, 0.25))
    assert second.end - start == pytest.approx(50, abs=0.5)  # of 100 for 8, as the first has taken none of its time
    assert first.end - start == pytest.approx(37.5, abs=0.5)
    (last,) = budget.step(4.0)
    assert last.end - start == pytest.approx(100, abs=0.5)


def test_when_all_is_used_every_step_stops_at_once():
    budget = Budget(0.01, 2.0)
    sleep(0.02)
    assert all(stop() for stop in budget.step(1.0, (0.5, 0.5)))


def test_more_work_than_was_said_gets_no_more_than_there_is():
    start = monotonic()
    budget = Budget(10.0, 1.0)
    (stop,) = budget.step(5.0)
    assert stop.end - start == pytest.approx(10, abs=0.5)
    (stop,) = budget.step(5.0)
    assert stop.end - start == pytest.approx(10, abs=0.5)


def test_a_stop_is_a_moment():
    assert Stop(monotonic() - 1)()
    assert not Stop(monotonic() + 10)()
    assert 9 < Stop(monotonic() + 10).left() <= 10
