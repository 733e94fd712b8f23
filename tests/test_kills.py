"""Commands that are killed at random moments end as if they had not been; `tests/kills.py` does it
more often.
"""

import random
from pathlib import Path

import pytest

from tests.kills import jobs, kill_until_done, prepare, train_heads
from tests.training.mishap import forks

pytestmark = [pytest.mark.slow, forks, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data and trained heads."""
    directory = tmp_path_factory.mktemp("kills")
    prepare(directory)
    train_heads(directory)
    return directory


@pytest.mark.parametrize("number", range(4), ids=["qlora", "eagle3", "selfdistill", "evaluation"])
def test_a_job_that_is_killed_ends_as_one_that_was_not(number: int, where: Path) -> None:
    job = jobs(where)[number]
    tally = kill_until_done(job, where / str(number), 2, random.Random(number))
    assert tally.kills.total() >= 2
    assert tally.complete
