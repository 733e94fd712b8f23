"""What `decode.py` times: passes over trees, heads, steps of the whole loop, and taking turns. Knows no table.

A pass is what `Decoder` does between two proposals: `Backbone.run` with cache and tree mask, and logits, or both as
the backbone's compiled pass; acceptance with its one transfer to the host, and the cache's compaction. Behind a context
that stays as long as it is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from clock import Clock
from torch import Tensor

from medusa_train.evaluation.choose_dtype import is_out_of_memory
from medusa_train.inference.accept import accept
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import block_end
from medusa_train.models.drafts.medusa import MedusaDraft, MedusaState
from medusa_train.trees.kv_cache import BatchCache, TreeCache
from medusa_train.trees.masks import TreeMask
from medusa_train.trees.tree import Ranks, Tree

LOOP_TOKENS = 96  # that an answer grows by before the loop begins it anew, so that the context stays about the same
_BURST = 3  # calls in a row that are timed, behind one that is not: a step finds in the caches what the last one left
_PATIENCE = 3  # times the seconds that were asked for, after which few calls have to do
_SLOW = 0.1  # seconds from which a call leaves nothing in any cache that it would find again


@dataclass(frozen=True)
class Point:
    """What is measured.

    Attributes:
        shape, dtype, threads: of the model, and of torch (0 on a GPU). context: cached positions. batch: rows.
        what: `step` (a pass over `nodes` nodes and the root; 0: plain decoding), `loop` (the same as a step of
            `Decoder.stream`, with heads), `heads` or `shared heads` (a proposal).
        heads: how many of them a proposal asks. setting: what was done to the weights, see `decode_model.SETTINGS`.
    """

    shape: str
    dtype: str
    threads: int
    context: int
    batch: int
    what: str
    nodes: int = 0
    heads: int = 0
    setting: str = "stock"


@dataclass
class Timed:
    """A point, how to measure it, and what was found.

    Attributes:
        call: one step. ready: what has to be done before, untimed. seconds: of each call.
        obstacle: why there are no more of them, or none.
    """

    point: Point
    call: Callable[[], object] | None = None
    ready: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    obstacle: str = ""

    @property
    def median(self) -> float | None:
        """Seconds of the middle call; None where there was none."""
        return median(self.seconds) if self.seconds else None


def tree_of(nodes: int, depth: int, width: int = 10) -> Tree:
    """A sparse tree of exactly so many nodes, as deep as that where it can be: those most likely to be accepted.

    Head k's guess of rank r is taken to be right with probability 0.6 x 0.4^r; what a step costs hardly depends on it.
    """
    waiting: list[tuple[float, Ranks]] = [(-(0.6 * 0.4**rank), (rank,)) for rank in range(width)]
    heapq.heapify(waiting)
    paths: list[Ranks] = []
    while len(paths) < nodes:
        if not waiting:
            raise ValueError(f"no tree of {nodes} nodes is {depth} deep and {width} wide")
        likely, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < depth:
            for rank in range(width):
                heapq.heappush(waiting, (likely * 0.6 * 0.4**rank, (*path, rank)))
    return Tree.from_paths(paths)


class Context:
    """A cache that holds `length` positions in `batch` rows, and passes behind them.

    All tensors are made in inference mode, as the loop's are: compiled passes tell them from others.
    """

    @torch.inference_mode()
    def __init__(self, backbone: Backbone, length: int, batch: int, largest: int) -> None:
        self.backbone = backbone
        self.length = length
        self.batch = batch
        capacity = length + largest + 1
        self.cache: TreeCache = (
            backbone.new_cache(capacity) if batch == 1 else BatchCache(backbone.num_layers, capacity)
        )
        self._fill()

    def _fill(self) -> None:
        """Random keys and values; what they are makes no difference, and a prefill of 4,096 tokens takes its time."""
        config = self.backbone.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (self.batch, config.num_key_value_heads, self.length, size)
        states = torch.randn(shape, device=self.backbone.device, dtype=self.backbone.dtype)
        for layer in range(self.backbone.num_layers):
            self.cache.write(layer, states, states)
        if isinstance(self.cache, BatchCache):
            self.cache.commit_rows([self.length] * self.batch)
        else:
            self.cache.commit(self.length)

    @torch.inference_mode()
    def step(self, tree: Tree) -> Callable[[], None]:
        """A pass over the nodes of `tree`, as the decoding loop makes it; nothing of it stays."""
        backbone, cache = self.backbone, self.cache
        tree = tree.to(backbone.device)
        tokens = _tokens(backbone, self.batch, tree.size + 1)
        if isinstance(cache, BatchCache):
            return self._rows_step(tree, tokens, cache)
        depths = tree.depths[None]
        masks = TreeMask(tree, cache.capacity, backbone.dtype, backbone.device)
        compiled = backbone.compiled

        @torch.inference_mode()
        def run() -> None:
            positions = depths + cache.length
            if compiled is None:
                mask = masks.at(cache.length) if tree.size else None
                hidden = backbone.run(tokens, positions=positions, mask=mask, cache=cache).hidden
                logits = backbone.logits(hidden)
            else:
                mask = masks.at(cache.length, block_end(cache.length + tree.size + 1))
                stored = cache.expect(tree.size + 1)
                _, logits = compiled(tokens, positions, mask, stored, cache.length)
            (accepted,) = accept(None, tokens, logits, tree)
            cache.keep(accepted.path)
            cache.length = self.length

        return run

    def _rows_step(self, tree: Tree, tokens: Tensor, cache: BatchCache) -> Callable[[], None]:
        backbone = self.backbone
        block = _block(tree, backbone)

        @torch.inference_mode()
        def run() -> None:
            lengths = torch.tensor(cache.lengths, device=backbone.device)
            positions = tree.depths + lengths[:, None]
            # as in the loop, where rows are of unlike lengths and the mask is another one at every step
            prefix = torch.zeros(self.batch, cache.length, dtype=backbone.dtype, device=backbone.device)
            prefix.masked_fill_(cache.gaps(backbone.device), float("-inf"))
            rows = (prefix[:, None, None].expand(-1, -1, len(block), -1), block.expand(self.batch, 1, -1, -1))
            feats = backbone.run(tokens, positions=positions, mask=torch.cat(rows, dim=-1), cache=cache)
            accepted = accept(None, tokens, backbone.logits(feats.hidden), tree)
            cache.keep_rows([path for path, _ in accepted])
            cache.lengths, cache.length = [self.length] * self.batch, self.length

        return run


def _block(tree: Tree, backbone: Backbone) -> Tensor:
    """[n + 1, n + 1], additive: which nodes each node sees."""
    block = torch.zeros(tree.ancestors.shape, dtype=backbone.dtype, device=backbone.device)
    return block.masked_fill_(~tree.ancestors, float("-inf"))


def proposal(backbone: Backbone, draft: MedusaDraft, tree: Tree, batch: int) -> Callable[[], object]:
    """What the heads do between two passes: `draft.propose` at one state for each row."""
    tree = tree.to(backbone.device)
    hidden = torch.randn(batch, backbone.hidden_size, device=backbone.device, dtype=backbone.dtype)
    state = MedusaState(hidden, draft.stacked())
    roots = _tokens(backbone, batch, 1)[:, 0]
    return torch.inference_mode()(lambda: draft.propose(state, roots, tree))


def _tokens(backbone: Backbone, rows: int, count: int) -> Tensor:
    """Unlike each other within a row, as siblings are."""
    return torch.arange(rows * count, device=backbone.device).view(rows, count) % backbone.vocab_size


class Loop:
    """Steps of the whole decoding loop of one answer, begun anew whenever it has grown by `LOOP_TOKENS`."""

    def __init__(self, backbone: Backbone, draft: MedusaDraft, tree: Tree, context: int) -> None:
        self._decoder = Decoder(backbone, draft, tree)
        self._prompt = [(7 * i) % backbone.vocab_size for i in range(context)]
        self._deepest = tree.max_depth + 1
        self._left = 0
        self._steps: Iterator[object] = iter(())

    def ready(self) -> None:
        """Prefill where no further step fits."""
        if self._left < self._deepest:
            self._steps = self._decoder.stream(self._prompt, LOOP_TOKENS, eos_ids=())
            next(self._steps)  # the prefill's token
            self._left = LOOP_TOKENS - 1

    def __call__(self) -> None:
        """One step."""
        made = next(self._steps)
        self._left -= len(made.tokens)  # type: ignore[attr-defined]


def take_turns(
    cases: Sequence[Timed], device: torch.device, seconds: float, *, least: int = 5, most: int = 200
) -> None:
    """Time all cases again and again, a few calls of each at a time, so that drift hits all alike.

    Ends when so many seconds were measured and every case has `least` calls; with fewer, but one each, where slow
    cases would take several times as long. What runs out of memory gets an obstacle and no further turn.
    """
    clock, spent, found = Clock(device), 0.0, 0
    threads = torch.get_num_threads()
    while not found or (found < least and spent < _PATIENCE * seconds) or (found < most and spent < seconds):
        going = [case for case in cases if not case.obstacle]
        if not going:
            break
        for count, some in itertools.groupby(sorted(going, key=lambda one: one.point.threads), _threads):
            if count:
                torch.set_num_threads(count)
            for case in some:
                spent += _burst(case, clock)
        found = min((len(case.seconds) for case in cases if not case.obstacle), default=0)
    torch.set_num_threads(threads)


def _threads(case: Timed) -> int:
    return case.point.threads


def _burst(case: Timed, clock: Clock) -> float:
    """A few calls in a row; returns the seconds that they took, the untimed ones included."""
    assert case.call is not None
    spent = 0.0
    try:
        case.ready()
        if not case.seconds or case.seconds[-1] < _SLOW:
            spent += clock.seconds(case.call)
        for _ in range(_BURST):
            case.ready()
            case.seconds.append(clock.seconds(case.call))
            spent += case.seconds[-1]
            if case.seconds[-1] >= _SLOW:
                break
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        case.obstacle = "does not fit"
        case.seconds.clear()
    return spent


def free(cases: Iterable[Timed]) -> None:
    """Let go of the models and caches that the cases hold; what was found stays."""
    for case in cases:
        case.call, case.ready = None, lambda: None
