"""What holds for every draft: greedy text is plain decoding's, alone and in batches, and rows are independent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_train.inference.accept import Rule
from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Proposer
from medusa_train.trees.tree import Tree


def check_equals_plain(
    backbone: Backbone, draft: Proposer, prompts: Sequence[list[int]], tree: Tree | None, tokens: int = 24
) -> tuple[list[Generation], list[Generation]]:
    """Compare greedy answers with plain decoding's: alone, in a batch, and in one whose rows end at different times.

    Returns:
        The answers alone and those of the batch.
    """
    plain = [Decoder(backbone).generate(prompt, tokens).tokens for prompt in prompts]
    alone = [Decoder(backbone, draft, tree).generate(prompt, tokens) for prompt in prompts]
    assert [out.tokens for out in alone] == plain
    together = BatchDecoder(backbone, draft, tree).generate_batch(prompts, tokens)
    assert [out.tokens for out in together] == plain
    eos = [plain[1][4], plain[2][9]]
    short = [Decoder(backbone).generate(prompt, 24, eos).tokens for prompt in prompts]
    assert [out.tokens for out in BatchDecoder(backbone, draft, tree).generate_batch(prompts, 24, eos)] == short
    return alone, together


def check_rows_are_independent(
    backbone: Backbone, draft: Proposer, prompts: Sequence[list[int]], tree: Tree | None, rule: Rule, tokens: int = 30
) -> None:
    """Compare answers that are drawn with the same random numbers alone and in a batch: tokens and accepted guesses.

    Padding of rows with smaller trees is never accepted and draws no numbers; caches hold the same as alone.
    """

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(i) for i in range(len(prompts))]

    one = Decoder(backbone, draft, tree)
    alone = [one.generate(p, tokens, (), rule, each) for p, each in zip(prompts, generators(), strict=True)]
    drawn = generators() if isinstance(rule, Sampling) else None
    together = BatchDecoder(backbone, draft, tree).generate_batch(prompts, tokens, (), rule, drawn)
    assert [out.tokens for out in together] == [out.tokens for out in alone]
    assert [out.accepted for out in together] == [out.accepted for out in alone]
    assert sum(sum(out.accepted) for out in alone) > 0
