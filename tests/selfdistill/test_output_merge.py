import json
from pathlib import Path

import pytest

from medusa_train.errors import ConfigError, DataError
from medusa_train.selfdistill.output import OutputWriter, merge, shard_output
from medusa_train.selfdistill.prompts import Shard

SETTINGS = {"model": "m"}
SEEDS = [f"c{number}" for number in range(6)]


def fill(
    path: Path,
    written: list[str],
    dropped: tuple[str, ...] = (),
    settings: dict[str, str] = SETTINGS,
) -> None:
    with OutputWriter(path, settings) as writer:
        for name in written:
            writer.write({"id": name, "text": "h\u00e9\u2028" * 3})
        for name in dropped:
            writer.drop({"id": name})


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_shards_become_one_file_in_the_order_of_the_seeds(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    one, two, three = (shard_output(out, Shard(i, 3)) for i in (1, 2, 3))
    assert two.name == "out.shard-2-of-3.jsonl"
    fill(one, ["c5", "c1"])
    fill(two, ["c0"], ("c3",))
    fill(three, [], ("c2",))
    merged = merge(out, SETTINGS, SEEDS)
    assert (merged.parts, merged.conversations, merged.dropped.total(), merged.missing) == (
        3,
        3,
        2,
        1,
    )
    assert ids(out) == ["c0", "c1", "c5"]
    assert ids(out.with_suffix(".dropped.jsonl")) == ["c2", "c3"]
    # A run without a shard goes on with what is missing.
    with OutputWriter(out, SETTINGS) as writer:
        assert set(SEEDS) - writer.done == {"c4"}
        writer.write({"id": "c4"})
    again = merge(out, SETTINGS, SEEDS)
    assert (again.parts, again.conversations, again.missing) == (4, 4, 0)
    assert ids(out) == ["c0", "c1", "c4", "c5"]


def test_a_shard_without_its_settings_is_refused(tmp_path: Path) -> None:
    """It would be left out, and its prompts called unanswered."""
    out = tmp_path / "out.jsonl"
    one, two = (shard_output(out, Shard(i, 2)) for i in (1, 2))
    fill(one, ["c0"])
    fill(two, ["c1"])
    (tmp_path / "out.shard-1-of-2.settings.json").unlink()
    with pytest.raises(ConfigError, match=r"1-of-2\.jsonl: the file exists without its settings"):
        merge(out, SETTINGS, SEEDS)
    assert not out.exists()


def test_a_conversation_that_two_shards_hold_is_taken_once_and_one_that_is_no_seed_stays(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.jsonl"
    fill(shard_output(out, Shard(1, 2)), ["c1", "old"], ("c2",))
    fill(shard_output(out, Shard(1, 4)), ["c1", "c2"])
    merged = merge(out, SETTINGS, SEEDS)
    assert ids(out) == ["c1", "c2", "old"]
    assert (merged.conversations, merged.dropped.total()) == (3, 0)


def test_other_settings_no_shards_and_running_shards_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match="nothing to merge"):
        merge(out, SETTINGS, SEEDS)
    fill(shard_output(out, Shard(1, 2)), ["c0"])
    fill(shard_output(tmp_path / "out.other.jsonl", Shard(1, 2)), ["c9"], settings={"model": "x"})
    with (
        OutputWriter(shard_output(out, Shard(1, 2)), SETTINGS),
        pytest.raises(DataError, match="another process"),
    ):
        merge(out, SETTINGS, SEEDS)
    with pytest.raises(ConfigError, match="model: 'm' in the file, 'n' now"):
        merge(out, {"model": "n"}, SEEDS)
    assert not out.exists()
    assert merge(out, SETTINGS, SEEDS).conversations == 1
