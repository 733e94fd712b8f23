from collections import Counter

from medusa_train.data.mixture import Mixture

ORIGINS = [0] * 30 + [1] * 6 + [2] * 4


def test_an_epoch_is_shared_out_by_weight() -> None:
    mixture = Mixture.by_weight(ORIGINS, [1, 2, 1])
    assert mixture.quotas == (10, 20, 10)
    assert [len(own) for own in mixture.members] == [30, 6, 4]
    assert Mixture.by_weight(ORIGINS, [10, 20, 10]) == mixture
    assert mixture.lines(["a", "b", "c"])[1] == "an epoch takes 20 of b, which has 6 to train on"


def test_what_rounding_leaves_over_is_given_out_too() -> None:
    assert Mixture.by_weight([0, 1, 2, 2], [1, 1, 1]).quotas == (2, 1, 1)
    assert Mixture.by_weight([0, 1, 1, 1, 1], [1, 3]).quotas == (1, 4)


def test_a_source_without_conversations_is_passed_over() -> None:
    mixture = Mixture.by_weight([0, 2, 2, 2], [1, 5, 1])
    assert mixture.quotas == (2, 0, 2)
    assert Counter(mixture.draw(0, 0))[0] == 2


def test_every_source_is_gone_through_evenly_over_the_epochs() -> None:
    mixture = Mixture.by_weight(ORIGINS, [1, 2, 1])
    taken: Counter[int] = Counter()
    for epoch in range(7):
        order = mixture.draw(epoch, seed=5)
        assert [sum(ORIGINS[i] == source for i in order) for source in range(3)] == [10, 20, 10]
        taken.update(order)
        for own in mixture.members:
            counts = [taken[index] for index in own]
            assert max(counts) - min(counts) <= 1
    assert {taken[index] for index in mixture.members[0]} == {2, 3}


def test_the_draw_follows_from_seed_and_epoch() -> None:
    mixture = Mixture.by_weight(ORIGINS, [1, 2, 1])
    assert mixture.draw(3, 1) == mixture.draw(3, 1)
    assert mixture.draw(3, 1) != mixture.draw(3, 2)
    assert set(mixture.draw(0, 1)[:10]) != set(mixture.draw(1, 1)[:10])
