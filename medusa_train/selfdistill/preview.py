"""What `--dry-run` shows: the first prompts as whoever answers would get them. Loads no weights, asks no server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from medusa_train.config.hub import hub_is_out_of_reach
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.selfdistill.engines import Request
from medusa_train.selfdistill.job import mode_of, model_name, paths_of
from medusa_train.selfdistill.seeds import Seed

SHOWN = 3


def preview(cfg: SelfDistillConfig, seeds: Sequence[Seed]) -> Iterator[tuple[str, str]]:
    """(title, text) of the first request of each of the first seeds.

    Raises:
        BackboneError, DataError, ConfigError: there is no such model, or no chat template that takes the chat.
    """
    requests = [(seed, next(mode_of(cfg)(seed))) for seed in seeds[:SHOWN]]
    if cfg.engine == "openai":
        yield from ((_title(seed), _body(cfg, request)) for seed, request in requests)
        return
    from transformers import AutoTokenizer

    from medusa_train.models.loading import resolve_backbone
    from medusa_train.selfdistill.speakers import Speakers

    paths = paths_of(cfg)
    where, _ = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(
        where, trust_remote_code=paths.trust_remote_code, local_files_only=hub_is_out_of_reach()
    )
    speakers = Speakers(tokenizer, paths.chat_template)
    for seed, request in requests:
        yield f"{_title(seed)}, {len(speakers.prompt(request))} tokens", speakers.text(request)


def _title(seed: Seed) -> str:
    turns = f"{len(seed.turns)} turns" if len(seed.turns) > 1 else "1 turn"
    return f"{seed.id} ({seed.source}), {turns}"


def _body(cfg: SelfDistillConfig, request: Request) -> str:
    from medusa_train.selfdistill.server import ServerSampling

    sampling = ServerSampling(cfg.temperature, cfg.max_new_tokens, cfg.top_p, cfg.top_k)
    return json.dumps(sampling.body(model_name(cfg), request), indent=2, ensure_ascii=False)
