"""How many conversations of each source an epoch takes, and which; knows no tokens and no files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """Sources mixed by weight (`datasets[].weight`).

    An epoch is as long as all sources together. A source has its weight's share of it: one with more conversations
    than its share gives some of them, and others in the next epoch; one with fewer gives some several times. Over
    the epochs each source is gone through evenly: no conversation is taken twice more often than another of it.

    Attributes:
        members: the numbers of each source's conversations.
        quotas: how many of them an epoch takes; adds up to the number of conversations in all.
    """

    members: tuple[tuple[int, ...], ...]
    quotas: tuple[int, ...]

    @classmethod
    def by_weight(cls, origins: Sequence[int], weights: Sequence[float]) -> Mixture:
        """Share out an epoch.

        Args:
            origins: for each conversation the number of its source.
            weights: of each source, above 0; only their ratios count. Sources without conversations are passed over.
        """
        members = tuple(
            tuple(index for index, origin in enumerate(origins) if origin == source) for source in range(len(weights))
        )
        shares = [weight if own else 0.0 for weight, own in zip(weights, members, strict=True)]
        exact = [len(origins) * share / sum(shares) for share in shares]
        quotas = [int(count) for count in exact]
        # what rounding down left over goes to those who lost most by it
        by_loss = sorted(range(len(exact)), key=lambda source: (quotas[source] - exact[source], source))
        for source in by_loss[: len(origins) - sum(quotas)]:
            quotas[source] += 1
        return cls(members, tuple(quotas))

    def lines(self, names: Sequence[str]) -> list[str]:
        """Return one sentence on each source, for people."""
        rows = zip(names, self.members, self.quotas, strict=True)
        return [f"an epoch takes {quota} of {name}, which has {len(own)} to train on" for name, own, quota in rows]

    def draw(self, epoch: int, seed: int) -> list[int]:
        """Return the conversations of one epoch, source by source; the same for the same arguments."""
        taken: list[int] = []
        for source, (own, quota) in enumerate(zip(self.members, self.quotas, strict=True)):
            # an endless line of shuffled passes over the source, of which each epoch takes the next `quota`
            for place in range(epoch * quota, (epoch + 1) * quota):
                turn, at = divmod(place, len(own))
                if at == 0 or place == epoch * quota:
                    line = random.Random(f"{seed}/{source}/{turn}").sample(own, len(own))
                taken.append(line[at])
        return taken
