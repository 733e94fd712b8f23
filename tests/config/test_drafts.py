"""The sections of drafts: defaults, mistakes, and what the rest of the program reads of them."""

from __future__ import annotations

import pytest

from medusa_train.config.drafts import SECTIONS, HeadsLoss
from medusa_train.config.load import dump_config, load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError

MINIMAL = ["base_model=m", "datasets=[{path: a}]"]


def train(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, None, [*MINIMAL, *overrides])


def test_medusas_flat_keys_are_its_section() -> None:
    section = train("medusa_num_heads=3", "medusa_soft_targets=0.5").draft_config
    assert section.settings == {"num_heads": 3, "num_layers": 1, "share_lm_head": False, "vocab_size": None}
    assert section.heads_loss == HeadsLoss(0.8, 0.5)
    section = train("medusa_vocab_size=1024").draft_config
    assert section.settings["vocab_size"] == 1024
    assert section.describe() == "5 Medusa heads x 1 layer over 1,024 tokens"


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_draft_without_a_section_has_its_defaults(kind: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    cfg = train(f"draft={kind}")
    assert cfg.draft_config == SECTIONS[kind]()
    assert cfg.recipe == "medusa1"
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(cfg))
    assert load_config(TrainConfig, path).draft_config == cfg.draft_config
    assert "medusa_num_heads" not in path.read_text()


def test_the_papers_settings_of_hydra() -> None:
    section = train("draft=hydra", "hydra.num_heads=3").draft_config
    assert section.settings == {"num_heads": 3, "num_layers": 4, "prefix_layer": True, "dropout": 0.2}
    assert section.heads_loss == HeadsLoss(1.0, 1.0)  # the teacher alone, unweighted
    assert section.describe() == "3 Hydra++ heads x 4 layers"


def test_the_papers_settings_of_kangaroo() -> None:
    section = train("draft=kangaroo").draft_config
    assert section.settings == {"num_heads": 6, "exit_layer": 2, "threshold": 0.6, "mlp_size": 0}
    assert section.heads_loss == HeadsLoss(1.0, 1.0)
    assert section.describe() == "Kangaroo, early exit after 2 layers, drafting up to 6 tokens"


def test_amphistas_two_terms_are_one_soft_target_and_a_weight() -> None:
    loss = train("draft=amphista", "amphista.alignment_weight=0.6", "amphista.label_weight=0.2").draft_config.heads_loss
    assert loss.soft_targets == pytest.approx(0.75)
    assert loss.weight == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hydra.num_heads=2"], r"belongs to another draft; set draft: hydra"),
        (["draft=amphista", "hydra.num_heads=2"], r"belongs to another draft; set draft: hydra"),
        (["draft=hydra", "hydra.num_head=2"], r"hydra.num_head: unknown key; did you mean num_heads"),
        (["draft=hydra", "hydra.dropout=1"], r"hydra.dropout: must be less than 1"),
        (
            ["draft=amphista", "amphista.alignment_weight=0", "amphista.label_weight=0"],
            r"amphista: .*both 0, so there is no loss",
        ),
        (["draft=hydra", "adapter=lora"], r"can be trained on a frozen backbone only"),
        (["draft=hydra", "recipe=medusa2"], r"can be trained on a frozen backbone only"),
        (["draft=hydra", "export=[vllm]"], r"only Medusa heads can be exported"),
        (["draft=eagle"], r"medusa.*hydra.*amphista.*kangaroo"),
    ],
)
def test_mistakes(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(*overrides)


def test_medusas_keys_are_listed_as_idle_beside_another_draft() -> None:
    assert train("draft=hydra", "medusa_num_heads=3").ignored == ("medusa_num_heads",)
