from __future__ import annotations

import pytest

from medusa_train.errors import ConfigError
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.select_prompts import Selection, Shard, select_prompts

SEEDS = [Prompt(f"s{n}", (f"question {n}", "and more")) for n in range(200)]


def names(seeds: list[Prompt]) -> list[str]:
    return [seed.id for seed in seeds]


def test_without_a_wish_all_distinct_seeds_come_in_their_order() -> None:
    again = [Prompt("x", ("question 3", "and more")), Prompt("y", ("question 3", "and more"), system="be brief")]
    chosen, left_out = select_prompts([*SEEDS, *again], Selection())
    assert names(chosen) == [*names(SEEDS), "y"]
    assert left_out == {"repeated": 1}


def test_length_is_counted_over_the_turns_that_are_asked() -> None:
    seeds = [Prompt("a", ("1234", "56")), Prompt("b", ("123", "4")), Prompt("c", ("123", "789"))]
    chosen, left_out = select_prompts(seeds, Selection(min_chars=5, max_chars=6))
    assert (names(chosen), left_out) == (["a", "c"], {"short": 1})
    assert select_prompts(seeds, Selection(max_chars=5))[1] == {"long": 2}
    chosen, left_out = select_prompts(seeds, Selection(max_turns=1))
    assert [seed.turns for seed in chosen] == [("1234",), ("123",)]
    assert left_out == {"repeated": 1}


def test_a_larger_sample_holds_the_smaller_and_another_seed_draws_others() -> None:
    small, large = (names(select_prompts(SEEDS, Selection(sample=count))[0]) for count in (20, 60))
    assert set(small) < set(large)
    assert small == sorted(small, key=names(SEEDS).index)
    assert len(large) == 60
    assert names(select_prompts(SEEDS, Selection(sample=20, sample_seed=1))[0]) != small
    assert names(select_prompts(SEEDS, Selection(sample=20, limit=5))[0]) == small[:5]


def test_shards_share_out_every_seed_once_whatever_else_is_chosen() -> None:
    shards = [Shard.parse(f"{i}/3") for i in (1, 2, 3)]
    parts = [[seed.id for seed in SEEDS if shard.holds(seed)] for shard in shards]
    assert sorted(name for part in parts for name in part) == sorted(names(SEEDS))
    assert all(40 < len(part) < 95 for part in parts)  # 67 each on average
    sampled = select_prompts(SEEDS, Selection(sample=50))[0]
    assert all(shards[0].holds(seed) == (seed.id in parts[0]) for seed in sampled)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4"])
def test_a_shard_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected i/n"):
        Shard.parse(text)
