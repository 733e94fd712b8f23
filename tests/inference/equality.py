"""What holds for every draft: greedy text is plain decoding's, alone and in batches, and rows are
independent.
"""

from collections.abc import Sequence

from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree


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
    plain = [Decoder(target_model).generate(prompt, tokens).tokens for prompt in prompts]
    alone = [Decoder(target_model, draft, tree).generate(prompt, tokens) for prompt in prompts]
    assert [out.tokens for out in alone] == plain
    together = BatchDecoder(target_model, draft, tree).generate_batch(prompts, tokens)
    assert [out.tokens for out in together] == plain
    eos = [plain[1][4], plain[2][9]]
    short = [Decoder(target_model).generate(prompt, 24, eos).tokens for prompt in prompts]
    assert [
        out.tokens
        for out in BatchDecoder(target_model, draft, tree).generate_batch(prompts, 24, eos)
    ] == short
    return alone, together
