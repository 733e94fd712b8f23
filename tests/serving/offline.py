"""Decode prompts with vLLM in this process, engine after engine: run by vLLM's own interpreter, not
by pytest.

    VLLM_PYTHON tests/serving/offline.py JOBS.json RESULTS.json

JOBS.json: {"prompts": [[token id]], "max_tokens": n, "engines": {name: {"model": directory,
"heads": directory or null, "method": medusa, eagle3 or dflash, "k": number of draft tokens, "limit": number
of prompts, all without it}}}.
RESULTS.json: by name {"answers": [[token id]], "drafts": n, "accepted": [n per position]}, or
{"error": text} where the engine does not start.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for name, engine in jobs["engines"].items():
        print(f"== {name}", flush=True)
        try:
            results[name] = answer(
                engine, jobs["prompts"][: engine.get("limit")], jobs["max_tokens"]
            )
        except Exception as error:  # vLLM raises whatever its loader meets; the tests read the text
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        Path(sys.argv[2]).write_text(json.dumps(results))


def answer(engine: dict[str, Any], prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Answer all prompts greedily in float32, with the heads as a chain of k draft tokens where
    there are any.
    """
    speculative = None
    if engine["heads"] is not None:
        speculative = {
            "method": engine["method"],
            "model": engine["heads"],
            "num_speculative_tokens": engine["k"],
        }
    llm = LLM(
        model=engine["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        generation_config="vllm",
        disable_log_stats=False,  # the counters of drafts
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    before = counters(llm)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    after = counters(llm)
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": after["drafts"] - before["drafts"],
        "accepted": [
            now - then for now, then in zip(after["accepted"], before["accepted"], strict=True)
        ],
    }


def counters(llm: LLM) -> dict[str, Any]:
    """Steps that verified a draft, and accepted draft tokens by position, since the process
    started.
    """
    drafts, accepted = 0, []
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += int(metric.value)
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = [int(value) for value in metric.values]
    return {"drafts": drafts, "accepted": accepted}


if __name__ == "__main__":
    main()
