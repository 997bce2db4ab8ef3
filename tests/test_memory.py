"""How much memory a run may take."""

import psutil
import pytest

from hesscore import memory
from hesscore.errors import UsageError


@pytest.fixture(autouse=True)
def unlimited():
    yield
    memory.limit(None)


@pytest.fixture
def machine(monkeypatch):
    """10 GB may be taken, and this process has 1 GB."""
    whole, own = psutil.virtual_memory()._replace(available=10**10), psutil.Process().memory_info()._replace(rss=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda process: own)


def test_a_tenth_is_left_to_others(machine):
    assert memory.free() == 9 * 10**9


@pytest.mark.parametrize(
    ("size", "left"),
    [("4GB", 3 * 10**9), ("4GiB", 4 * 2**30 - 10**9), ("1500MB", 5 * 10**8), ("99GB", 9 * 10**9), ("1MB", 0)],
)
def test_a_limit_is_of_the_whole_process_and_of_what_there_is(machine, size, left):
    memory.limit(size)
    assert memory.free() == left


@pytest.mark.parametrize("size", ["much", "-1GB", "", "8 potatoes"])
def test_what_is_no_size(size):
    with pytest.raises(UsageError, match="give it as 8GiB"):
        memory.limit(size)
