"""Locks of torch's C++ extensions: what a killed build leaves is removed, what a running build
holds is kept.
"""

import os
import threading
import time

import pytest

from medusa_train.training.distributed import remove_stale_build_locks


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    path = tmp_path / "deepspeed_shm_comm" / "lock"
    path.touch()
    return path


def grow_old(lock, seconds):
    then = time.time() - seconds
    os.utime(lock, (then, then))


def test_a_killed_builds_lock_is_removed(lock):
    grow_old(lock, 3600)
    remove_stale_build_locks()
    assert not lock.exists()


def test_a_lock_is_kept_while_a_process_holds_it(lock):
    grow_old(lock, 3600)
    with lock.open():
        remove_stale_build_locks()
    assert lock.exists()


def test_a_young_lock_is_waited_for(lock):
    """Its owner may be on another machine."""
    started = time.monotonic()
    remove_stale_build_locks(age=1.5)
    assert not lock.exists()
    assert time.monotonic() - started > 1.0


def test_a_released_lock_ends_the_wait(lock):
    timer = threading.Timer(0.3, lock.unlink)
    started = time.monotonic()
    timer.start()
    remove_stale_build_locks(age=60)
    assert 0.2 < time.monotonic() - started < 30
    timer.join()
