"""The last rounds of training: the model answers, and is taught not to repeat itself and to keep what went well.

A small model that only ever saw other people's text loops when it decodes greedily. Each round it answers some
requests greedily; tokens that go on a loop are made less likely (sequence-level unlikelihood, Welleck et al. 2020,
"Neural Text Generation with Unlikelihood Training", section 5.2), answers that ended without a loop (and parse, if
they are code) are learned from like any text, and a batch of the ordinary text keeps the rest in place.
Knows nothing of where requests come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from check import parses
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from training import Epoch, Run, held_out_losses, next_token_logits, stream, to_tensors
from transformers import LlamaForCausalLM
from vocabulary import EOS, PAD, SPECIAL, Encoded, encode_chats

LIMIT = 160  # tokens of an answer here; loops show by then
EOS_ID = SPECIAL.index(EOS)
SPANS = ((8, 1), (4, 3))  # (n, m): a token that ends a sequence of n which occurred m times before goes on a loop


@dataclass(frozen=True)
class Request:
    """What is asked, after which turns, and whether the answer has to be code."""

    history: tuple[tuple[str, str], ...]
    text: str
    is_code: bool


def repeated(tokens: Sequence[int]) -> list[bool]:
    """For each token whether it goes on a loop: see `SPANS`."""
    marks = [False] * len(tokens)
    for length, before in SPANS:
        seen: Counter[tuple[int, ...]] = Counter()
        for end in range(length, len(tokens) + 1):
            span = tuple(tokens[end - length : end])
            marks[end - 1] = marks[end - 1] or seen[span] >= before
            seen[span] += 1
    return marks


@torch.no_grad()
def greedy_answers(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The greedy answers to tokenised prompts, eos included where it came within `LIMIT` tokens."""
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), SPECIAL.index(PAD))
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: all answers start in the same column
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    output = model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=LIMIT, do_sample=False)
    return [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in output[:, width:].tolist()]


def polish(
    run: Run,
    tokenizer: Tokenizer,
    requests: Callable[[int], Sequence[Request]],
    epoch: Epoch,
    held_out: dict[str, Sequence[Encoded]],
    log: Callable[[dict[str, object]], None],
    every: int,
    on_checkpoint: Callable[[LlamaForCausalLM], None],
) -> None:
    """Do the rounds that are left; every `every` rounds evaluate, save, call `on_checkpoint`.

    `requests(n)` are those of round n; `epoch` gives the ordinary text, one micro-batch a round.
    """
    recipe = run.recipe
    speaker = LlamaForCausalLM(recipe.config()).to(run.device, torch.bfloat16).eval()
    batches = stream(epoch, recipe)
    for _ in range(run.step - recipe.steps):
        next(batches)
    while (number := run.step - recipe.steps) < recipe.polish_rounds:
        speaker.load_state_dict(run.model.state_dict())
        _, text = next(batches)
        shares = polish_round(run, speaker, tokenizer, requests(number), text)
        entry: dict[str, object] = {"step": run.step, **{k: round(v, 3) for k, v in shares.items()}}
        if (number + 1) % every == 0 or number + 1 == recipe.polish_rounds:
            entry["held_out"] = {
                kind: held_out_losses(run.model, chats, recipe.micro_batch) for kind, chats in held_out.items()
            }
            run.save()
            on_checkpoint(run.model)
        log(entry)


def polish_round(
    run: Run,
    speaker: LlamaForCausalLM,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    text: Sequence[Encoded],
) -> dict[str, float]:
    """One round: `speaker` (a bf16 copy of the model) answers, one optimizer step; the shares seen."""
    chats_before = encode_chats(tokenizer, [[*request.history, (request.text, "")] for request in requests])
    prompts = [chat.ids[:-1] for chat in chats_before]  # without the end of the empty answer
    answers = greedy_answers(speaker, prompts)
    looping, good, broken = 0, 0, 0
    chats: list[Encoded] = []
    signs: list[list[float]] = []
    for request, prompt, answer in zip(requests, prompts, answers, strict=True):
        marks = repeated(answer)
        ended = answer[-1] == EOS_ID
        valid = not request.is_code or (ended and parses(tokenizer.decode(answer)))
        is_good = ended and valid and not any(marks)
        looping += any(marks)
        broken += not valid
        good += is_good
        chats.append(Encoded([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
        signs.append([0.0] * len(prompt) + [1.0 if is_good else -1.0 if mark else 0.0 for mark in marks])
    _step(run, chats, signs, text)
    count = len(requests)
    return {"looping": looping / count, "good": good / count, "broken_code": broken / count}


def _step(run: Run, chats: Sequence[Encoded], signs: Sequence[Sequence[float]], text: Sequence[Encoded]) -> None:
    """One optimizer step: likelihood where the sign is 1 and on `text`'s answers, unlikelihood where it is -1."""
    device = run.device
    total = sum(len(chat.ids) for chat in chats)
    order = sorted(range(len(chats)), key=lambda index: len(chats[index].ids))
    for start in range(0, len(order), 16):
        rows = order[start : start + 16]
        ids, _ = to_tensors([chats[row] for row in rows], device)
        sign = torch.zeros(ids.shape, device=device)
        for place, row in enumerate(rows):
            sign[place, : len(signs[row])] = torch.tensor(signs[row], device=device)
        losses = signed_losses(_logits(run.model, ids), ids, sign)
        (losses.sum() / total).backward()
    ids, kinds = to_tensors(text, device)
    chosen = (kinds == 2).float()
    losses = signed_losses(_logits(run.model, ids), ids, chosen)
    (losses.sum() / chosen.sum()).backward()
    run.apply(run.recipe.rate(run.step))
    run.step += 1


def _logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):
        return next_token_logits(model, ids)


def signed_losses(logits: Tensor, ids: Tensor, sign: Tensor) -> Tensor:
    """Per next token [B, T-1]: -log p where the sign is 1, -log(1 - p) where it is -1, 0 elsewhere.

    `logits` is [B, T-1, V], `ids` and `sign` are [B, T]; the sign is that of the token predicted.
    """
    wanted = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    unwanted = -torch.log1p(-wanted.exp().clamp(max=1 - 1e-4))
    sign = sign[:, 1:]
    return torch.where(sign > 0, -wanted, torch.where(sign < 0, unwanted, torch.zeros_like(wanted)))
