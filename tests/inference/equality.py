"""What holds for every draft: greedy text is plain decoding's, alone and in batches, and rows are
independent.
"""

from collections.abc import Sequence

from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Proposer
from medusa_train.trees.tree import Tree


def check_equals_plain(
    backbone: Backbone,
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
    plain = [Decoder(backbone).generate(prompt, tokens).tokens for prompt in prompts]
    alone = [Decoder(backbone, draft, tree).generate(prompt, tokens) for prompt in prompts]
    assert [out.tokens for out in alone] == plain
    together = BatchDecoder(backbone, draft, tree).generate_batch(prompts, tokens)
    assert [out.tokens for out in together] == plain
    eos = [plain[1][4], plain[2][9]]
    short = [Decoder(backbone).generate(prompt, 24, eos).tokens for prompt in prompts]
    assert [
        out.tokens for out in BatchDecoder(backbone, draft, tree).generate_batch(prompts, 24, eos)
    ] == short
    return alone, together
