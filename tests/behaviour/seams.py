"""What tests of behaviour reach only inside the package: the losses' gradients, decoding in float64,
steps of fixed shape as CUDA graphs replay them, and token ids of training rows; and what a page draws.

This is the one file of tests/behaviour that a rewrite of the package may edit. Its arguments and
results are plain: tensors, lists, models of transformers, directories. Its names are those of
`__all__`, at most 15.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_train.checkpoint.heads import load_draft
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.data.datastore import Datastore
from medusa_train.hub import hub_is_unreachable
from medusa_train.inference.accept import Greedy as GreedyRule
from medusa_train.inference.accept import Typical as TypicalRule
from medusa_train.inference.batch_decoder import BatchDecoder, PendingRequest
from medusa_train.inference.cuda_graphs import FixedShapeRunner, GraphRunner
from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling as SamplingRule
from medusa_train.losses import chunked_logits
from medusa_train.losses.linear_loss import Teacher
from medusa_train.losses.linear_loss import linear_loss as fused_loss
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.base import TreeSize
from medusa_train.models.drafts.combined import MergedDraft
from medusa_train.models.drafts.lookahead import LookaheadDraft
from medusa_train.models.drafts.lookup import PromptLookupDraft, RestDraft
from medusa_train.models.lm_head import LMHead, LowRank
from medusa_train.models.target_model import TargetModel
from medusa_train.training.load_data import load_data
from medusa_train.trees.tree import Tree

__all__ = [
    "Answer",
    "Greedy",
    "Loss",
    "Matrix",
    "Sampling",
    "Typical",
    "colored_answers",
    "decode",
    "drawn_bars",
    "drawn_curves",
    "encode",
    "loss_and_gradients",
    "new_draft",
]


# Decoding


class Answer(NamedTuple):
    """A decoded answer.

    Attributes:
        tokens: its ids, the token that ends it included.
        accepted: how many draft tokens each step kept.
        finish: "eos", "length" or "context".
    """

    tokens: list[int]
    accepted: list[int]
    finish: str


class Greedy(NamedTuple):
    """Accept what the model finds most probable."""


class Sampling(NamedTuple):
    """Draw from the model's distribution; each prompt has the generator of its number and `seed`.

    With `shared` all prompts of a call have one generator.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    shared: bool = False


class Typical(NamedTuple):
    """Accept draft tokens that the model finds plausible."""

    temperature: float = 0.7
    epsilon: float = 0.09
    delta: float = 0.3


class _NoTokenizer:
    eos_token_id = None


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    draft: Any = None,
    *,
    tree: Sequence[Sequence[int]] = (),
    lookup: tuple[str, Mapping[str, Any]] | None = None,
    dynamic: tuple[int, int] | None = None,
    rule: Greedy | Sampling | Typical = Greedy(),
    max_new_tokens: int = 24,
    ends: Sequence[int] = (),
    rows: int = 1,
    joins: int | None = None,
    steps: str = "exact",
    context: int | None = None,
    threshold: float | None = None,
) -> list[Answer]:
    """Answer prompts with a model of transformers, in its dtype.

    Args:
        draft: a directory of heads, or what `new_draft` returned; None: none.
        tree: paths of ranks, the draft tokens to verify.
        lookup: name and settings of a draft without training: alone, or beside `draft`. The
            datastore of "rest" is a list of documents of ids.
        dynamic: nodes and depth of trees that an EAGLE-3 draft chooses in every step.
        rows: how many are decoded together; 1: one after the other.
        joins: rows join as others end: as soon as so many are free. None: when all have ended.
        steps: "exact"; "fixed": of fixed shape, as CUDA graphs need; "replayed": recorded once and
            repeated, as a graph is.
        context: of the model, if not its own.
        threshold: Kangaroo's, if not the draft's own.
    """
    target_model = TargetModel(model, _NoTokenizer(), "model")
    if context is not None:
        target_model.max_context = context
    if steps != "exact":
        target_model.step_runner = {"fixed": FixedShapeRunner, "replayed": _TapeRunner}[steps]()
    proposer = draft
    if isinstance(draft, Path):
        proposer = load_draft(draft, target_model, target_model.dtype).eval()
    elif draft is not None:
        proposer = draft(target_model)
    if threshold is not None:
        proposer.threshold = threshold
    if dynamic is not None:
        proposer = proposer.with_dynamic_trees(TreeSize(*dynamic))
    if lookup is not None:
        copied = _lookup(*lookup)
        proposer = copied if proposer is None else MergedDraft(proposer, copied)
    shape = Tree.from_paths([tuple(path) for path in tree])
    numbers = range(len(prompts))
    generators = _generators(rule, len(prompts))
    if rows == 1:
        decoder = Decoder(target_model, proposer, shape)
        outs = [
            decoder.generate(list(prompts[n]), max_new_tokens, ends, _rule(rule), generators[n])
            for n in numbers
        ]
    else:
        batches = BatchDecoder(target_model, proposer, shape)
        outs = _in_batches(
            batches, prompts, generators, (max_new_tokens, ends, _rule(rule)), rows, joins
        )
    return [Answer(out.tokens, out.accepted, out.finish) for out in outs]


def _in_batches(
    decoder: BatchDecoder,
    prompts: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator | None],
    options: tuple[Any, ...],
    rows: int,
    joins: int | None,
) -> list[Any]:
    if joins is None:
        outs = []
        for start in range(0, len(prompts), rows):
            part = [list(prompt) for prompt in prompts[start : start + rows]]
            given = generators[start : start + rows]
            outs += decoder.generate_batch(part, *options, None if given[0] is None else given)
        return outs
    batch = decoder.begin(*options)
    waiting = [PendingRequest(n, list(p), generators[n]) for n, p in enumerate(prompts)]
    answers: dict[int, Any] = {}
    while waiting or batch.active:
        free = rows - len(batch.active)
        if waiting and (free >= joins or not batch.active):
            batch.add_requests(waiting[:free])
            waiting = waiting[free:]
        answers.update(batch.step())
    answers.update(batch.step())
    return [answers[n] for n in range(len(prompts))]


def _rule(rule: Greedy | Sampling | Typical) -> Any:
    if isinstance(rule, Sampling):
        return SamplingRule(rule.temperature, rule.top_k, rule.top_p)
    if isinstance(rule, Typical):
        return TypicalRule(*rule)
    return GreedyRule()


def _generators(
    rule: Greedy | Sampling | Typical, count: int
) -> list[torch.Generator] | list[None]:
    if not isinstance(rule, Sampling):
        return [None] * count
    if rule.shared:
        return [torch.Generator().manual_seed(rule.seed)] * count
    return [torch.Generator().manual_seed(1000 * rule.seed + n) for n in range(count)]


def _lookup(name: str, settings: Mapping[str, Any]) -> Any:
    given = dict(settings)
    if name == "lookahead":
        return LookaheadDraft(**given)
    if name == "prompt_lookup":
        return PromptLookupDraft(**given)
    documents = given.pop("datastore")
    return RestDraft(Datastore(documents, given["max_ngram"] + given["max_tokens"]), **given)


def new_draft(name: str, settings: Mapping[str, Any], noise: float = 0.03, seed: int = 1) -> Any:
    """Return an untrained draft with noise in every weight, for `decode` on any model.

    Args:
        name: the value of the key `draft`. settings: as in the config.json of a run's heads.
    """

    def build(target_model: TargetModel) -> Any:
        draft = DRAFTS[name].from_target_model(target_model, **settings)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter += noise * torch.randn(
                    parameter.shape, generator=generator, dtype=parameter.dtype
                )
        return draft.eval()

    return build


#: Operations that wait for the device, or copy from the host: a capture fails there.
_UNCAPTURABLE = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
}


class _Tape(TorchDispatchMode):
    """Records operations and repeats them on the same tensors: nothing that the host computed is
    computed again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in _UNCAPTURABLE, f"{func} can't be captured"
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, first in self._calls:
            repeated = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(first), repeated, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _TapeRunner(GraphRunner):
    def _warm_up(self, step: Any) -> None:
        """The recording is the first run."""

    def _capture(self, step: Any) -> _Tape:
        with _Tape() as tape:
            step()
        return tape


# Losses


class Matrix(NamedTuple):
    """An output matrix with all that may belong to it: `cap(scale * (W h + b + ...))`.

    Attributes:
        weight: [V, d]. bias: [V]. softcap, scale: of the logits.
        lora: A [r, d], B [V, r] and the factor on B A h.
        markov: R [V, r]; the states then have r further numbers e, and R e is added.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    lora: tuple[Tensor, Tensor, float] | None = None
    markov: Tensor | None = None


class Loss(NamedTuple):
    """Sums over positions with a target: the loss, cross-entropy and divergence in nats, and hits."""

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    hits: int


def loss_and_gradients(
    states: Tensor,
    matrix: Matrix,
    targets: Sequence[int | None],
    teacher: tuple[Tensor, Matrix] | None = None,
    *,
    part: float = 1.0,
    ahead: int = 0,
    divergence: bool = False,
    factor: float = 1.0,
    at_once: bool = False,
    chunk: int | None = None,
) -> Loss:
    """Compute a loss over positions, and add `factor` times its gradients to `.grad` of all leaves.

    Args:
        states: [N, d]. targets: an index of a logit for each, or None for none.
        teacher: its states [N, d'] and matrix; `part` of the target at t is its distribution at t +
            `ahead`. With `divergence` the loss is the divergence from it.
        at_once: gradients are computed together with the loss, as in one process; else by a
            backward pass, as with DeepSpeed.
        chunk: positions whose logits are in memory at once; None: the package's own number. Either
            way the softmax is computed over a few positions at a time.
    """
    labels = torch.tensor([IGNORE_INDEX if target is None else target for target in targets])
    theirs = None
    if teacher is not None:
        theirs = Teacher(teacher[0], _lm_head(teacher[1]), ahead, part, divergence=divergence)
    before = chunked_logits._BLOCK_BYTES["cpu"]
    chunked_logits._BLOCK_BYTES["cpu"] = 4 * 3 * len(matrix.weight)
    try:
        sums = fused_loss(
            states,
            _lm_head(matrix),
            labels,
            theirs,
            chunk=chunk,
            grad_scale=factor if at_once else None,
        )
        if not at_once and sums.loss_sum.requires_grad:
            (factor * sums.loss_sum).backward()
    finally:
        chunked_logits._BLOCK_BYTES["cpu"] = before
    return Loss(sums.loss_sum.detach(), sums.ce_sum, sums.kl_sum, int(sums.correct))


def _lm_head(matrix: Matrix) -> LMHead:
    low_rank = None
    if matrix.lora is not None:
        low_rank = LowRank(*matrix.lora, dropout=lambda h: h)
    return LMHead(
        matrix.weight,
        matrix.bias,
        matrix.softcap,
        matrix.scale,
        low_rank,
        token_bias=matrix.markov,
    )


# Data


def encode(**keys: Any) -> list[tuple[list[int], list[bool]]]:
    """Return ids and loss mask of each row that `medusa-train` with these keys trains on, in the
    order of the data.
    """
    cfg = load_config(TrainConfig, None, flags={"val_set_size": 0, "output_dir": "runs/x", **keys})
    data = load_data(cfg, Console(file=io.StringIO()))
    return [(row.tokens.tolist(), row.supervised.tolist()) for row in data.train]


# The hub


def forget_network() -> None:
    """Let the next command find out again whether the hub can be reached."""
    hub_is_unreachable.cache_clear()


# Pages


def drawn_bars(page: str, title: str) -> list[float]:
    """Return the lengths of the bars of a figure of a page, from the first to the last."""
    shape = r"<g><title>[^<]*</title>\s*<path d=\"M ([\d.]+) [\d.]+\s+L ([\d.]+) [\d.]+\s+L"
    drawn = re.findall(shape, _drawing(page, title))
    return [float(end) - float(start) for start, end in drawn]


def drawn_curves(page: str, title: str) -> list[list[tuple[float, float]]]:
    """Return the points of each curve of a figure of a page, to the right and upwards."""
    curves = []
    shape = r'<g><title>[^<]*</title>\s*<path d="([^"]*)" style="fill: none'
    for points in re.findall(shape, _drawing(page, title)):
        pairs = re.findall(r"([\d.]+) ([\d.]+)", points)
        curves.append([(float(x), -float(y)) for x, y in pairs])
    return curves


def _drawing(page: str, title: str) -> str:
    return page.partition(f"<h3>{title}</h3>")[2].partition("</figure>")[0]


def colored_answers(page: str) -> list[list[tuple[int, str]]]:
    """Return the answers of a page in runs of tokens by one head, each after the head's number (0:
    the target model).
    """
    answers = []
    for shown in re.findall(r"<div class=answer>(.*?)</div>", page, flags=re.DOTALL):
        parts = re.split(r"<i class=h(\d)>(.*?)</i>", shown, flags=re.DOTALL)
        runs = [(0, parts[0])]
        for head, drafted, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            runs += [(int(head), drafted), (0, text)]
        answers.append([(head, html.unescape(text)) for head, text in runs if text])
    return answers
