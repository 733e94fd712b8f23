"""vLLM as a decoder among others, for `peers.py`: plain, and with exported heads. Knows no bench and no table."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.load import LoadedModel
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.evaluation.records import TimedAnswer
from medusa_train.export.write import export_run

PLAIN, HEADS = "vLLM", "vLLM, medusa"


class VllmAnswerer:
    """vLLM's engine in this process, one question at a time, greedy.

    Args:
        model: a directory or hub name. dtype: as torch calls it. eos_ids: tokens that end an answer.
        max_context: positions. memory: share of the GPU's that the engine may take.
        heads: a directory in vLLM's layout, and how many of them; None for plain decoding.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        eos_ids: Collection[int],
        max_context: int,
        memory: float,
        heads: tuple[Path, int] | None = None,
    ) -> None:
        from vllm import LLM

        speculative = None
        if heads is not None:
            speculative = {"method": "medusa", "model": str(heads[0]), "num_speculative_tokens": heads[1]}
        self._stops = list(eos_ids)
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=max_context,
            gpu_memory_utilization=memory,
            generation_config="vllm",  # the checkpoint's may bring a temperature or a penalty
            disable_log_stats=False,  # or it would not count its drafts
            speculative_config=speculative,
        )

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Decode up to `max_new_tokens` tokens; steps are those that verified a draft, 0: it does not say."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=self._stops)
        before = self._drafts()
        started = time.perf_counter()
        (made,) = self._llm.generate([{"prompt_token_ids": list(prompt_ids)}], how, use_tqdm=False)
        seconds = time.perf_counter() - started
        return TimedAnswer(tuple(made.outputs[0].token_ids), seconds, steps=self._drafts() - before)

    def _drafts(self) -> int:
        """How many drafts it has verified so far."""
        metrics = self._llm.get_metrics() if hasattr(self._llm, "get_metrics") else []
        return sum(int(one.value) for one in metrics if one.name == "vllm:spec_decode_num_drafts")


def vllm_answerers(
    subject: LoadedModel, paths: ModelPaths, dtype: str, folder: Path, memory: float, note: Callable[[str], None]
) -> dict[str, Any]:
    """Both engines, with what they need exported into `folder`; none, and a line to `note`, where they can't be had."""
    if importlib.util.find_spec("vllm") is None:
        note("vLLM: not installed here, left out")
        return {}
    if paths.quantization is not None and paths.adapter is None:
        note(f"vLLM: left out; these heads read a backbone in {paths.quantization}, and vLLM would load the original")
        return {}
    backbone, model = subject.backbone, paths.base_model
    common = (dtype, backbone.eos_ids, backbone.max_context, memory)
    found: dict[str, Any] = {}
    try:
        if paths.adapter is not None:
            model = str(export_run(paths, "merged", folder / "merged").target)
        found[PLAIN] = VllmAnswerer(model, *common)
        if subject.draft is not None:
            heads = export_run(paths, "vllm", folder / "vllm").target
            found[HEADS] = VllmAnswerer(model, *common, heads=(heads, subject.draft.num_heads))
    except Exception as error:  # an engine of its own, in processes of its own: whatever stops it, the others go on
        note(f"vLLM: can't run this here, left out ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
    return found
