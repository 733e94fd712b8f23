"""Test that sampled text follows the target model's distribution: Pearson's chi-square test on a model
of five tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.sampling import Sampling
from medusa_train.models.target_model import TargetModel
from tests.families import random_target_model


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Return the probability of counts at least this far from `probabilities`; 0 if an impossible
    event was counted.

    Cells with fewer than five expected counts are pooled, as the approximation requires.
    """
    counts, expected = counts.double().flatten(), probabilities.double().flatten() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return 0.0
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = torch.tensor(float(possible.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def five_token_target_model() -> TargetModel:
    """A real model with a vocabulary of five tokens, so that all texts of three tokens can be
    counted.
    """
    shape = {
        "vocab_size": 5,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "eos_token_id": 2,
    }
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    return random_target_model(
        "llama", dtype=torch.float32, std=0.6, max_position_embeddings=16, **shape, **heads
    )


def check_lossless(
    decoder: BatchDecoder,
    rows: int,
    batches: int,
    *,
    other_below: float,
    prompt: Sequence[int] = (1, 2),
) -> int:
    """Sample three tokens after `prompt` in each row and compare their counts with the target model's
    joint distribution.

    Args:
        other_below: largest p-value that another distribution may have, so that the test can fail.

    Returns:
        The number of accepted guesses.
    """
    rule, generator = Sampling(0.8), torch.Generator().manual_seed(7)
    counts, accepted = torch.zeros(125, dtype=torch.long), 0
    for _ in range(batches):
        out = decoder.generate_batch([list(prompt)] * rows, 3, (), rule, [generator] * rows)
        accepted += sum(sum(row.accepted) for row in out)
        texts = [a * 25 + b * 5 + c for a, b, c in (row.tokens for row in out)]
        counts += torch.bincount(torch.tensor(texts), minlength=125)
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    whole = torch.cat([torch.tensor([list(prompt)]).expand(125, -1), every], dim=1)
    with torch.no_grad():
        log_p = rule.warp(decoder.target_model.model(whole).logits.double()).log_softmax(-1)
    joint = log_p[:, len(prompt) - 1 : -1].gather(-1, every[..., None]).sum((1, 2)).exp()
    assert torch.allclose(joint.sum(), torch.ones((), dtype=torch.float64))
    assert p_value(counts, joint) > 1e-4
    assert p_value(counts, rule.warp(joint.log()).softmax(-1)) < other_below
    return accepted
