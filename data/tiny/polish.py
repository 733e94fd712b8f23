"""The last rounds of training: the model answers, and is taught not to repeat itself and to keep what went well.

A small model that only ever saw other people's text loops when it decodes greedily. Each round it answers some
requests greedily; tokens that go on a loop are made less likely (sequence-level unlikelihood, Welleck et al. 2020,
"Neural Text Generation with Unlikelihood Training", section 5.2), and so are a little the ends of answers that are much
shorter than people's, and what does not parse; good answers are learned from like any text, and a batch of the
ordinary text keeps the rest in place.
Knows nothing of where requests come from.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from training import Epoch, Run, held_out_losses, next_token_logits, stream, to_tensors
from transformers import LlamaForCausalLM
from vocabulary import EOS, PAD, SPECIAL, Encoded, encode_chats

LIMIT = 160  # tokens of an answer here; loops show by then
SHORT = 52  # tokens: shorter answers are no models, and their end is made less likely
LOOP_WEIGHT, SHORT_WEIGHT, SYNTAX_WEIGHT, GOOD_WEIGHT = 1.0, 1.0, 8.0, 0.5
UNLIKELIHOOD = 0.5  # of a step's loss on text, however few tokens are to be made less likely
EOS_ID = SPECIAL.index(EOS)
SPANS = ((18, 1), (7, 2), (4, 4))  # (n, m): a sequence of n tokens that occurred m times before is a loop ...
INSIDE = 6  # ... and in an answer with a loop every token goes on it that ends a sequence of 6 seen before


@dataclass(frozen=True)
class Request:
    """What is asked, after which turns, whether the answer has to be code, and what is asked afterwards."""

    history: tuple[tuple[str, str], ...]
    text: str
    is_code: bool
    then: str | None = None  # asked next, once the model has answered


def repeated(tokens: Sequence[int]) -> list[bool]:
    """For each token whether it goes on a loop: see `SPANS` and `INSIDE`."""
    marks = [any(places) for places in zip(*(_seen(tokens, *span) for span in SPANS), strict=True)]
    if any(marks):
        marks = [a or b for a, b in zip(marks, _seen(tokens, INSIDE, 1), strict=True)]
    return marks


def _seen(tokens: Sequence[int], length: int, before: int) -> list[bool]:
    """For each token whether the `length` tokens ending there occurred `before` times before."""
    marks = [False] * len(tokens)
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(length, len(tokens) + 1):
        span = tuple(tokens[end - length : end])
        marks[end - 1] = seen[span] >= before
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
    prompts, answers = _ask(speaker, tokenizer, requests)
    later = [
        Request((*request.history, (request.text, tokenizer.decode(answer))), request.then, request.is_code)
        for request, answer in zip(requests, answers, strict=True)
        if request.then and answer[-1] == EOS_ID
    ]
    if later:
        more_prompts, more_answers = _ask(speaker, tokenizer, later)
        requests, prompts, answers = [*requests, *later], prompts + more_prompts, answers + more_answers
    chats: list[Encoded] = []
    signs: list[list[float]] = []
    counts: Counter[str] = Counter()
    for request, prompt, answer in zip(requests, prompts, answers, strict=True):
        weights, kinds = judge_answer(tokenizer, answer, request.is_code)
        counts.update(kinds)
        chats.append(Encoded([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
        signs.append([0.0] * len(prompt) + weights)
    _step(run, chats, signs, text)
    shares = {kind: counts[kind] / len(requests) for kind in ("looping", "cut", "short", "broken_code", "good")}
    return {**shares, "median": float(statistics.median(map(len, answers)))}


def _ask(
    speaker: LlamaForCausalLM, tokenizer: Tokenizer, requests: Sequence[Request]
) -> tuple[list[list[int]], list[list[int]]]:
    """(the tokenised prompts, the greedy answers to them)."""
    chats = encode_chats(tokenizer, [[*request.history, (request.text, "")] for request in requests])
    prompts = [chat.ids[:-1] for chat in chats]  # without the end of the empty answer
    return prompts, greedy_answers(speaker, prompts)


def judge_answer(tokenizer: Tokenizer, answer: Sequence[int], is_code: bool) -> tuple[list[float], set[str]]:
    """(a weight per token, above zero = likelier, below = less likely; what was found about the answer)."""
    marks = repeated(answer)
    weights = [-LOOP_WEIGHT if mark else 0.0 for mark in marks]
    kinds: set[str] = set()
    if any(marks):
        kinds.add("looping")
    if answer[-1] != EOS_ID:
        return weights, kinds | {"cut"}
    if is_code and (wrong := first_wrong_token(tokenizer, answer[:-1])) is not None:
        kinds.add("broken_code")
        weights[wrong] = -SYNTAX_WEIGHT
    if len(answer) < SHORT:
        kinds.add("short")
        weights[len(answer) - 1 if is_code else last_line(tokenizer, answer)] -= SHORT_WEIGHT
    if not kinds:
        return [GOOD_WEIGHT] * len(answer), {"good"}
    return weights, kinds


def last_line(tokenizer: Tokenizer, answer: Sequence[int]) -> int:
    """The index of the token that starts an answer's last line."""
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    return max((index + 1 for index, token in enumerate(answer[:-1]) if token == newline), default=0)


def first_wrong_token(tokenizer: Tokenizer, answer: Sequence[int]) -> int | None:
    """The index of the token at which Python's parser gives up (the last one, where it asks for more); or None.

    A bracket that is never closed should have been by the end of its line: our code has no line breaks in brackets.
    """
    text = tokenizer.decode(list(answer), skip_special_tokens=False)
    try:
        ast.parse(text)
    except SyntaxError as error:
        if error.lineno is None or error.offset is None:
            return len(answer)
        lines = text.split("\n")[: error.lineno]
        if "never closed" in error.msg:
            place = len("\n".join(lines)) + 1
        else:
            place = len("\n".join([*lines[:-1], ""])) + error.offset
        size = 0
        for index, token in enumerate(answer):
            size += len(tokenizer.decode([token], skip_special_tokens=False))
            if size >= place:
                return index
        return len(answer)
    except ValueError:
        return len(answer)
    return None


def _step(run: Run, chats: Sequence[Encoded], signs: Sequence[Sequence[float]], text: Sequence[Encoded]) -> None:
    """One optimizer step: on the weighted tokens of `chats` and on the answers of `text`."""
    device = run.device
    total = sum(sum(chat.assistant) for chat in chats)
    unlikely = max(32.0, -sum(weight for row in signs for weight in row if weight < 0)) / UNLIKELIHOOD
    order = sorted(range(len(chats)), key=lambda index: len(chats[index].ids))
    for start in range(0, len(order), 16):
        rows = order[start : start + 16]
        ids, _ = to_tensors([chats[row] for row in rows], device)
        sign = torch.zeros(ids.shape, device=device)
        for place, row in enumerate(rows):
            sign[place, : len(signs[row])] = torch.tensor(signs[row], device=device)
        losses = signed_losses(_logits(run.model, ids), ids, sign)
        (losses[sign[:, 1:] > 0].sum() / total + losses[sign[:, 1:] < 0].sum() / unlikely).backward()
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
    """Per next token [B, T-1]: -w log p where its weight w is positive, -|w| log(1 - p) where it is negative.

    `logits` is [B, T-1, V]; `ids` and `sign`, the weights, are [B, T], aligned with each other.
    """
    log_p = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    log_rest = torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
    weights = sign[:, 1:]
    return -torch.where(weights > 0, log_p, log_rest) * weights.abs()
