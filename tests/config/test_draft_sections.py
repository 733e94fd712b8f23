"""The sections of drafts: defaults, mistakes, and what the rest of the program reads of them."""

from pathlib import Path

import pytest

from medusa_train.config.draft_sections import SECTIONS, HeadsLoss
from medusa_train.config.load import dump_config, load_config
from medusa_train.config.schema import EvalConfig, TrainConfig
from medusa_train.errors import ConfigError

MINIMAL = ["base_model=m", "datasets=[{path: a}]"]


def train(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, None, [*MINIMAL, *overrides])


def test_medusas_flat_keys_are_its_section() -> None:
    section = train("medusa_num_heads=3", "medusa_soft_targets=0.5").draft_config
    settings = {
        "num_heads": 3,
        "num_layers": 1,
        "share_lm_head": False,
        "vocab_size": None,
        "markov_rank": 0,
    }
    assert section.settings == settings
    assert section.heads_loss == HeadsLoss(0.8, 0.5)
    section = train("medusa_vocab_size=1024", "medusa_markov_rank=8").draft_config
    assert (section.settings["vocab_size"], section.settings["markov_rank"]) == (1024, 8)
    assert (
        section.describe()
        == "5 Medusa heads x 1 layer over 1,024 tokens with a Markov bias of rank 8"
    )
    names = ("medusa_decay_coefficient", "medusa_markov_rank", "medusa_num_heads")
    assert train("draft=hydra", *(f"{name}=1" for name in names)).ignored == names


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_draft_without_a_section_has_its_defaults(kind: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    cfg = train(f"draft={kind}")
    assert cfg.draft_config == SECTIONS[kind]()
    assert cfg.recipe == "medusa1"
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(cfg))
    assert load_config(TrainConfig, path).draft_config == cfg.draft_config
    assert "medusa_num_heads" not in path.read_text()


def test_the_papers_settings() -> None:
    hydra = train("draft=hydra", "hydra.num_heads=3").draft_config
    layers = {"num_heads": 3, "num_layers": 4, "prefix_layer": True, "normalize_embeddings": True}
    assert hydra.settings == {**layers, "dropout": 0.2, "vocab_size": None}
    assert hydra.describe() == "3 Hydra++ heads x 4 layers"
    kangaroo = train("draft=kangaroo").draft_config
    settings = {"num_heads": 6, "exit_layer": 2, "threshold": 0.6, "mlp_size": 0}
    assert kangaroo.settings == {**settings, "attention": True, "share_lm_head": True}
    assert kangaroo.describe() == "Kangaroo, early exit after 2 layers, drafting up to 6 tokens"
    amphista = train("draft=amphista", "amphista.vocab_size=1024").draft_config
    assert (amphista.settings["vocab_size"], amphista.describe()) == (
        1024,
        "4 Amphista heads over 1,024 tokens",
    )


@pytest.mark.parametrize(
    ("overrides", "loss", "described"),
    [
        (
            [],
            HeadsLoss(0.8, 0.0),
            "cross-entropy against the tokens of the data; head k weighted by 0.8^k",
        ),
        (
            ["draft=hydra"],
            HeadsLoss(1.0, 1.0),
            "cross-entropy against the distribution of the target model",
        ),
        (
            ["draft=kangaroo"],
            HeadsLoss(1.0, 1.0),
            "cross-entropy against the distribution of the target model",
        ),
        (
            [
                "draft=amphista",
                "amphista.alignment_weight=0.75",
                "amphista.label_weight=0.25",
                "amphista.decay_coefficient=0.5",
            ],
            HeadsLoss(0.5, 0.75, 1.0),
            (
                "75% cross-entropy against the distribution of the target model, rest cross-entropy"
                " against the data; head k weighted by 0.5^k"
            ),
        ),
        (
            ["draft=eagle3"],
            HeadsLoss(0.8, 1.0),
            "cross-entropy against the distribution of the target model; head k weighted by 0.8^k",
        ),
        (
            ["draft=hydra", "hydra.decay_coefficient=0.5", "hydra.soft_targets=0"],
            HeadsLoss(0.5, 0.0),
            "cross-entropy against the tokens of the data; head k weighted by 0.5^k",
        ),
    ],
)
def test_the_loss_of_the_heads(
    overrides: list[str], loss: HeadsLoss, described: str, tmp_path: Path
) -> None:
    cfg = train(*overrides)
    assert cfg.draft_config.heads_loss == loss
    assert cfg.draft_config.heads_loss.describe() == described
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(cfg))
    assert load_config(TrainConfig, path).draft_config.heads_loss == loss


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hydra.num_heads=2"], r"belongs to another draft; set draft: hydra"),
        (["draft=amphista", "hydra.num_heads=2"], r"belongs to another draft; set draft: hydra"),
        (
            ["draft=hydra", "hydra.num_head=2"],
            r"hydra.num_head: unknown key; did you mean num_heads",
        ),
        (["draft=hydra", "hydra.dropout=1"], r"hydra.dropout: must be less than 1"),
        (["draft=hydra", "hydra.vocab_size=8"], r"hydra.vocab_size: must be 16 or more"),
        (["draft=kangaroo", "kangaroo.vocab_size=1024"], r"kangaroo.vocab_size: unknown key"),
        (
            ["draft=kangaroo", "kangaroo.attention=false"],
            r"kangaroo: .*without attention needs an MLP; set mlp_size",
        ),
        (
            ["draft=amphista", "amphista.alignment_weight=0", "amphista.label_weight=0"],
            r"amphista: .*both 0, so there is no loss",
        ),
        (
            ["draft=amphista", "amphista.auto_blocks=0", "amphista.position_encoding=false"],
            r"auto_blocks: 0 also omits the positions",
        ),
        (["draft=hydra", "recipe=medusa2"], r"can be trained on a frozen target model only"),
        (["draft=hydra", "export=[vllm]"], r"export: .*no program reads hydra"),
        (
            ["draft=eagle3", "export=[tgi]"],
            r"draft: eagle3 is exported to vllm, sglang, speculators",
        ),
        (["draft=eagle3", "eagle3.layers=[1, 2]"], r"eagle3.layers"),
        (["draft=eagle3", "eagle3.layers=[3, 3, 1]"], "must be in ascending order"),
        (["draft=eagle"], r"medusa.*hydra.*amphista.*kangaroo"),
    ],
)
def test_mistakes(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(*overrides)


@pytest.mark.parametrize("draft", ["prompt_lookup", "medusa+prompt_lookup", "lookahead", "rest"])
def test_drafts_without_training_are_not_trained(draft: str) -> None:
    with pytest.raises(
        ConfigError, match="has no weights to train; use it for decoding: medusa-eval --draft"
    ):
        train(f"draft={draft}")


def test_eagle3_reads_the_layers_that_vllm_reads_by_default() -> None:
    section = train("draft=eagle3").draft_config
    assert section.aux_layers(32) == (2, 16, 29)
    assert section.aux_layers(6) == (1, 3, 5)
    assert section.aux_layers(1) == (1, 1, 1)
    assert train("draft=eagle3", "eagle3.layers=[1, 4, 9]").draft_config.aux_layers(32) == (
        1,
        4,
        9,
    )


def test_drafts_without_training_get_their_section() -> None:
    choice = load_config(
        EvalConfig, None, ["draft=medusa+prompt_lookup", "lookup.nodes=16"]
    ).lookup_choice
    assert choice is not None
    assert (choice.heads, choice.kind, choice.name) == (
        "medusa",
        "prompt_lookup",
        "medusa+prompt_lookup",
    )
    assert choice.settings == {
        "max_ngram": 3,
        "max_tokens": 10,
        "nodes": 16,
        "min_probability": 0.05,
    }
    choice = load_config(
        EvalConfig, None, ["draft=hydra+lookahead", "lookahead.window=7"]
    ).lookup_choice
    assert choice is not None
    assert (choice.heads, choice.kind) == ("hydra", "lookahead")
    assert choice.settings == {"window": 7, "ngram": 4, "guesses": 5, "pool_from_prompt": True}
    assert EvalConfig().lookup_choice is None


def test_sections_without_their_draft_and_unused_trees_are_named() -> None:
    with pytest.raises(ConfigError, match="belongs to another draft; set draft: prompt_lookup"):
        load_config(EvalConfig, None, ["lookup.nodes=16"])
    with pytest.raises(ConfigError, match="belongs to another draft; set draft: lookahead"):
        load_config(EvalConfig, None, ["draft=prompt_lookup", "lookahead.window=3"])
    with pytest.raises(ConfigError, match=r"copies from a datastore; set rest\.datastore"):
        load_config(EvalConfig, None, ["draft=medusa+rest"])
    with pytest.raises(
        ConfigError, match=r"must be .*prompt_lookup.*got 'kangaroo\+prompt_lookup'"
    ):
        load_config(EvalConfig, None, ["draft=kangaroo+prompt_lookup"])
    assert load_config(EvalConfig, None, ["draft=prompt_lookup", "tree=a.json"]).ignored == (
        "tree",
    )
