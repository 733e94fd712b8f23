"""How a decoding step runs: eagerly with exact sizes, in compiled passes, or as a CUDA graph.

A step over a few tokens launches hundreds of small kernels, which on a GPU takes longer than they
run. A CUDA graph replays them with one launch, with the shapes and addresses that they were
captured with. So its steps read their inputs from fixed buffers, leave their results in fixed
buffers, never wait for the device, and have few sizes: all padding of decoding is here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import round_up_to_block
from medusa_train.models.hf_config import has_experts, length_dependent_rope
from medusa_train.models.precision import is_out_of_memory

_log = logging.getLogger(__name__)

#: A step from fixed inputs to fixed outputs.
Step = Callable[[], None]


class Replayable(Protocol):
    """What was captured of a step, for example a CUDA graph."""

    def replay(self) -> None:
        """Repeat the step."""


class _AsItIs(NamedTuple):
    """A step that is run, not replayed."""

    replay: Step


class EagerRunner:
    """Runs steps with exact sizes; where passes are compiled, with the sizes of their programs.

    Attributes:
        is_fixed: whether shapes and addresses of a step may not depend on lengths and paths.
    """

    is_fixed = False

    def __init__(self, backbone: Backbone, *, fixed_shape: bool) -> None:
        self._backbone = backbone
        self._fixed_shape = fixed_shape

    def num_rows(self, active: int, allocated: int) -> int:
        """Return how many rows a pass over `active` of the allocated rows has.

        Compiled programs take a single row only in memory for one.
        """
        if self._backbone.compiled is None or not self._fixed_shape:
            return active
        return min(max(active, 2), allocated)

    def path_length(self, longest: int, deepest: int) -> int:
        """Return to how many nodes accepted paths are padded: the longest of them, of at most
        `deepest`.
        """
        return longest

    def key_length(self, positions: int, block: int) -> int:
        """Return how many columns attention reads where `positions` are needed; `block` is for
        steps of fixed shape.
        """
        return positions if self._backbone.compiled is None else round_up_to_block(positions)


class StepRunner:
    """Runs steps of fixed shape as they are, without capturing them.

    Steps run over 2, 4, 8, ... of the allocated rows and read whole blocks of columns, so that few
    graphs are captured. Rows that are not active read their first position, and what they write is
    ignored.
    """

    is_fixed = True

    def num_rows(self, active: int, allocated: int) -> int:
        """Return how many rows a pass over `active` of the allocated rows has: a power of two.

        A pass over a single row needs memory for a single row, which compiled programs expect.
        """
        return min(power_of_two(max(active, 2)), allocated)

    def path_length(self, longest: int, deepest: int) -> int:
        """Return to how many nodes accepted paths are padded: the deepest path of the tree."""
        return deepest

    def key_length(self, positions: int, block: int) -> int:
        """Return how many columns attention reads where `positions` are needed: whole blocks."""
        return -(-positions // block) * block

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        """Run `step`, whose shapes and addresses `key` stands for; `graphs` were captured so far
        for its buffers.
        """
        step()


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


class GraphRunner(StepRunner):
    """Captures each step when it is first run, and replays it from then on.

    All graphs share one memory pool. That is safe in any order of replays, since a step leaves
    nothing in it: results are copied to buffers outside. If capture fails, steps run as they are
    and a warning says so.

    Attributes:
        works: whether no capture failed so far.
    """

    def __init__(self) -> None:
        self.works = True

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        """Run `step`, or replay what was captured under `key`.

        The first run is the warm-up; capture runs nothing.
        """
        if key in graphs:
            graphs[key].replay()
            return
        if not self.works:
            step()
            return
        self._warm_up(step)
        try:
            graphs[key] = self._capture(step)
        except RuntimeError as error:
            if is_out_of_memory(error):  # this step alone goes on without a graph
                graphs[key] = _AsItIs(step)
                return
            self.works = False
            reason = str(error).strip().partition("\n")[0]
            _log.warning("CUDA graphs: capture failed, decoding goes on without graphs: %s", reason)

    def _warm_up(self, step: Step) -> None:
        raise NotImplementedError

    def _capture(self, step: Step) -> Replayable:
        raise NotImplementedError


class CudaGraphRunner(GraphRunner):
    """Captures steps as `torch.cuda.CUDAGraph`; see torch's notes on CUDA graphs, "Whole-network
    capture".
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._first: torch.cuda.CUDAGraph | None = None

    def _warm_up(self, step: Step) -> None:
        """Run the step on the stream of the captures, so that lazily created kernels and workspaces
        exist.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def _capture(self, step: Step) -> Replayable:
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the device during a capture, for example to write a checkpoint
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                step()
        except RuntimeError:
            # before torch 2.13 the allocator still counts a failed capture as underway, and
            # `empty_cache` then fails
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            raise
        finally:
            # a failed capture leaves its own stream as the current one
            torch.cuda.set_stream(current)
        # nothing can be captured to a pool all of whose graphs are gone
        self._first = self._first or graph
        return graph


def use_cuda_graphs(backbone: Backbone) -> None:
    """Decode in steps that are captured as CUDA graphs, on a GPU and where they can be captured."""
    backbone.step_runner = backbone.step_runner or graph_runner(backbone.device, backbone.model)


def graph_runner(device: torch.device, model: Any) -> CudaGraphRunner | None:
    """Return a runner that captures the steps of a transformers model on a GPU; None if they cannot
    be captured.
    """
    if device.type != "cuda":
        return None
    if (obstacle := graph_obstacle(model)) is not None:
        _log.info("no CUDA graphs, since the model %s", obstacle)
        return None
    return CudaGraphRunner(device)


def graph_obstacle(model: Any) -> str | None:
    """Return why a transformers model waits for the device in a pass, so that it can't be captured;
    None: it can.
    """
    config = model.config.get_text_config()
    if (rope_type := length_dependent_rope(config)) is not None:
        return f"changes its rotary angles with the length ({rope_type})"
    if has_experts(config):
        return "routes tokens to experts"
    # products in 8 bits look for outliers on the host, those in 4 bits wait for nothing
    four_bit = getattr(getattr(model.config, "quantization_config", None), "load_in_4bit", False)
    return (
        "is quantized in 8 bits" if getattr(model, "is_quantized", False) and not four_bit else None
    )
