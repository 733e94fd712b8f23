"""What holds for every draft: greedy text is plain decoding's, alone and in batches, and rows are
independent.
"""

from collections.abc import Collection, Sequence

from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.families import digest_of

#: Answers of `plain_answers`, by everything that they depend on.
_PLAIN: dict[tuple[object, ...], list[Generation]] = {}


def plain_answers(
    target_model: TargetModel,
    prompts: Sequence[list[int]],
    tokens: int,
    eos: Collection[int] | None = None,
) -> list[Generation]:
    """Greedy answers of plain decoding, one by one. Tests of many drafts compare with the same
    answers, so that each process computes them once.
    """
    ends = None if eos is None else tuple(eos)
    model = (digest_of(target_model), str(target_model.device), target_model.max_context)
    key = (*model, str(prompts), tokens, ends)
    if key not in _PLAIN:
        decoder = Decoder(target_model)
        _PLAIN[key] = [decoder.generate(prompt, tokens, eos) for prompt in prompts]
    return _PLAIN[key]


def check_equals_plain(
    target_model: TargetModel,
    draft: Proposer,
    prompts: Sequence[list[int]],
    tree: Tree | None,
    tokens: int = 24,
) -> tuple[list[Generation], list[Generation]]:
    """Compare greedy answers with plain decoding's: alone, in a batch, and in one whose rows end at
    different times.

    Returns:
        The answers alone and those of the batch.
    """
    plain = [out.tokens for out in plain_answers(target_model, prompts, tokens)]
    alone = [Decoder(target_model, draft, tree).generate(prompt, tokens) for prompt in prompts]
    assert [out.tokens for out in alone] == plain
    together = BatchDecoder(target_model, draft, tree).generate_batch(prompts, tokens)
    assert [out.tokens for out in together] == plain
    eos = [plain[1][4], plain[2][9]]
    short = [out.tokens for out in plain_answers(target_model, prompts, 24, eos)]
    assert [
        out.tokens
        for out in BatchDecoder(target_model, draft, tree).generate_batch(prompts, 24, eos)
    ] == short
    return alone, together
