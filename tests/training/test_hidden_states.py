"""Runs whose hidden states come from the disk: the same as without, and no pass of the target model in
later epochs.
"""

import errno
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa_train.data.dataset import BatchLoader
from medusa_train.data.hidden_state_store import StateFormat, StateStore
from medusa_train.errors import ConfigError
from medusa_train.models.loading import load_target_model
from medusa_train.models.precision import choose_precision
from medusa_train.models.target_states import HiddenStates
from medusa_train.training import hidden_states
from medusa_train.training.hidden_states import HiddenStateCache, target_model_fingerprint
from medusa_train.training.load_data import load_data
from medusa_train.training.target_model_recipe import TargetModelRecipe
from tests.training.conftest import figures, metrics, train
from tests.training.mishap import Mishap, command, forks, medusa_train

DRAFTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"bf16": True},
    "4 bits": {"load_in_4bit": True},
    "hydra": {
        "draft": "hydra",
        "hydra": {"num_heads": 2, "num_layers": 2, "dropout": 0.1, "soft_targets": 1.0},
    },
    "kangaroo": {"draft": "kangaroo", "kangaroo": {"num_heads": 2, "exit_layer": 1}},
}
#: Two epochs of 32 conversations. Batches of one row have the same shape in both.
TWO_EPOCHS = {
    "max_steps": None,
    "num_epochs": 2,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
}


@pytest.fixture
def make_runs(make_config, tmp_path):
    """Build the configurations of the same run without the cache and with it."""

    def make(**keys: Any):
        keys = {**TWO_EPOCHS, **keys}
        plain = make_config(output_dir=str(tmp_path / "plain"), **keys)
        cached = {
            "cache_hidden_states": True,
            "dataset_prepared_path": str(tmp_path / "prepared"),
            **keys,
        }
        return plain, make_config(output_dir=str(tmp_path / "cached"), **cached)

    return make


@pytest.fixture
def passes(monkeypatch) -> list[Any]:
    """A list that grows with every pass of a target model for hidden states of a batch."""
    seen: list[Any] = []
    real = TargetModelRecipe._run

    def run(self: TargetModelRecipe, batch: Any, aux_layers: tuple[int, ...]) -> Any:
        seen.append(batch)
        return real(self, batch, aux_layers)

    monkeypatch.setattr(TargetModelRecipe, "_run", run)
    return seen


def weights(run: Path) -> dict[str, torch.Tensor]:
    (path,) = (run / "heads").glob("*.safetensors")
    return load_file(path)


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def stored(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "prepared").glob("hidden-states-*/*.states"))


@pytest.mark.parametrize("kind", DRAFTS)
def test_the_same_to_the_bit_without_a_pass_in_the_second_epoch(
    kind, make_runs, console, tmp_path, passes
):
    plain, cached = make_runs(**DRAFTS[kind])
    assert train(plain, console) == 0
    assert len(passes) == 2 * 32 + 2 * 8
    passes.clear()
    assert train(cached, console) == 0
    assert len(passes) == 32 + 8
    assert figures(tmp_path / "cached") == figures(tmp_path / "plain")
    assert_same_weights(tmp_path / "cached", tmp_path / "plain")
    assert "states of 40 documents read, 40 computed (" in console.file.getvalue()
    states = 2 if kind == "kangaroo" else 1
    tokens = sum(len(example) for part in load_both(cached, console) for example in part)
    size = tokens * states * 32 * (2 if kind == "bfloat16" else 4)
    assert sum(path.stat().st_size - 4 for path in stored(tmp_path)) == size


def load_both(cfg, console):
    data = load_data(cfg, console)
    return data.train, data.validation


@pytest.mark.parametrize("packed", [False, True])
def test_batches_of_other_shapes_round_differently(make_runs, console, tmp_path, passes, packed):
    """To the bit in the first epoch; in the second one batches, and packed rows, are composed of
    other documents.
    """
    plain, cached = make_runs(
        micro_batch_size=4, gradient_accumulation_steps=1, sample_packing=packed, sequence_len=64
    )
    train(plain, console)
    before = len(passes)
    train(cached, console)
    assert len(passes) == before + before // 2
    ours, theirs = figures(tmp_path / "cached"), figures(tmp_path / "plain")
    first = [record["epoch"] <= 1 for record in theirs if record["kind"] == "train"].count(True)
    assert 1 < first < len(theirs)
    assert ours[:first] == theirs[:first]
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert mine["tokens" if mine["kind"] == "train" else "targets"] == wanted.get(
            "tokens", wanted.get("targets")
        )


@forks
@pytest.mark.parametrize("packed", [False, True])
def test_killed_in_either_epoch_it_resumes_to_the_bit(make_runs, tmp_path, packed):
    """Also where shapes differ: replayed batches read the values that they computed before."""
    keys = {
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "sample_packing": packed,
        "sequence_len": 64,
    }
    _, cached = make_runs(
        **keys, save_steps=2, dataset_prepared_path=str(tmp_path / "whole-prepared")
    )
    code, text = medusa_train(
        command(cached.model_copy(update={"output_dir": str(tmp_path / "whole")}))
    )
    assert code == 0, text
    per_epoch = sum(
        record["epoch"] <= 1 for record in metrics(tmp_path / "whole") if record["kind"] == "train"
    )
    cached = cached.model_copy(update={"dataset_prepared_path": str(tmp_path / "prepared")})
    resume = command(cached, "resume_from_checkpoint=auto")
    kills = [
        Mishap(
            "medusa_train.data.hidden_state_store:_checksum", 14
        ),  # in the first epoch: values without their checksum
        Mishap("medusa_train.training.optimizer:LocalStrategy.forward_backward", per_epoch + 1),
    ]
    for mishap in kills:
        code, text = medusa_train(resume, mishap)
        assert code == -signal.SIGKILL, text
    code, text = medusa_train(resume)
    assert code == 0, text
    assert figures(tmp_path / "cached") == figures(tmp_path / "whole")
    assert_same_weights(tmp_path / "cached", tmp_path / "whole")


def test_other_heads_on_the_same_target_model_read_what_an_earlier_run_computed(
    make_runs, console, tmp_path, passes
):
    _, cached = make_runs()
    train(cached, console)
    passes.clear()
    assert ", 0 bytes of them still to be computed" not in console.file.getvalue()
    keys = {
        "output_dir": str(tmp_path / "other"),
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "seed": 43,
    }
    assert (
        train(
            cached.model_copy(update={**keys, "sample_packing": True, "sequence_len": 64}), console
        )
        == 0
    )
    assert not passes
    assert ", 0 bytes of them still to be computed" in console.file.getvalue()
    _, kangaroo = make_runs(**DRAFTS["kangaroo"])
    assert train(kangaroo.model_copy(update={"output_dir": str(tmp_path / "third")}), console) == 0
    assert len(passes) == 40  # it needs other states
    assert len({path.parent for path in stored(tmp_path)}) == 2


def test_damaged_values_are_computed_again(make_runs, console, tmp_path, passes):
    plain, cached = make_runs()
    train(plain, console)
    train(cached, console)
    path = stored(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    passes.clear()
    assert train(cached.model_copy(update={"output_dir": str(tmp_path / "again")}), console) == 0
    assert len(passes) == 1
    text = " ".join(console.file.getvalue().split())
    assert text.count("cache_hidden_states: damaged files in ") == 1
    assert "documents read, 1 computed; 1 files were damaged (" in text
    assert_same_weights(tmp_path / "again", tmp_path / "plain")
    passes.clear()
    assert train(cached.model_copy(update={"output_dir": str(tmp_path / "third")}), console) == 0
    assert not passes


def test_a_disk_that_is_too_small_is_refused_before_training(
    make_runs, console, tmp_path, monkeypatch
):
    _, cached = make_runs(**DRAFTS["kangaroo"])
    tokens = sum(len(example) for part in load_both(cached, console) for example in part)
    free = [tokens * 2 * 32 * 4 - 1]
    monkeypatch.setattr(
        hidden_states.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0])
    )
    with pytest.raises(ConfigError) as caught:
        train(cached, console)
    message = str(caught.value)
    assert message.startswith(f"cache_hidden_states: {tmp_path / 'prepared'}")
    assert f"({tokens:,} tokens x 32 values x 2 states x 4 bytes)" in message
    assert (
        "KiB are free. Set dataset_prepared_path to a directory on a larger disk, or cache_hidden"
        in message
    )
    assert not (tmp_path / "cached").exists()
    free[0] += 1
    assert train(cached, console) == 0
    free[0] = 0  # enough where all states are stored
    assert train(cached.model_copy(update={"output_dir": str(tmp_path / "again")}), console) == 0


def test_a_disk_that_becomes_full_ends_storing_and_not_the_run(
    make_runs, console, tmp_path, monkeypatch, passes
):
    real = StateStore.write

    def full(self: StateStore, key: str, values: torch.Tensor) -> None:
        if len(stored(tmp_path)) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, key, values)

    plain, cached = make_runs()
    train(plain, console)
    passes.clear()
    monkeypatch.setattr(StateStore, "write", full)
    assert train(cached, console) == 0
    assert len(passes) == 2 * 40 - 5
    assert console.file.getvalue().count("could not write hidden states to ") == 1
    assert_same_weights(tmp_path / "cached", tmp_path / "plain")


def test_the_fingerprint_changes_with_weights_config_needs_and_dtype(target_model_dir):
    target_model = load_target_model(str(target_model_dir))
    first = target_model_fingerprint(target_model, ())
    assert target_model_fingerprint(load_target_model(str(target_model_dir)), ()) == first
    assert target_model_fingerprint(target_model, (1,)) != first
    assert target_model_fingerprint(target_model, (), tf32=True) != first
    assert (
        target_model_fingerprint(load_target_model(str(target_model_dir), dtype="bfloat16"), ())
        != first
    )
    target_model.model.config.rms_norm_eps *= 2
    changed = target_model_fingerprint(target_model, ())
    assert changed != first
    with torch.no_grad():
        target_model.layer(1).mlp.up_proj.weight[0, 0] += 1e-3
    assert target_model_fingerprint(target_model, ()) not in (first, changed)


@pytest.fixture
def cache_and_batch(make_config, console, tmp_path, target_model_dir):
    """An empty cache, a padded batch, and the target model."""
    cfg = make_config()
    recipe = TargetModelRecipe(
        load_target_model(str(target_model_dir)), choose_precision(False, torch.device("cpu"))
    )
    store = StateStore(tmp_path / "states", StateFormat(1, 32, torch.float32))
    batch = next(BatchLoader(load_data(cfg, console).train, 4, seed=0))
    return HiddenStateCache(store, torch.device("cpu")), batch, recipe


def test_values_of_the_first_batch_stay_and_padding_is_zero(cache_and_batch):
    cache, batch, recipe = cache_and_batch
    first = cache.hidden_states(batch, lambda: recipe._run(batch, ())).final.clone()
    for document in list(cache._documents(batch))[1:]:
        cache.store.path(document.key).unlink(missing_ok=True)
    again = cache.hidden_states(batch, lambda: HiddenStates(first + 1)).final
    longest = batch.documents[0][0]
    assert torch.equal(again[0, : len(longest)], first[0, : len(longest)])  # stored
    assert torch.equal(again[1:], first[1:] + 1)  # computed, and stored now
    read = cache.hidden_states(batch, lambda: pytest.fail("all of it is stored")).final
    valid = batch.segments >= 0
    assert torch.equal(read[valid], again[valid])
    assert not read[~valid].any()
    assert (~valid).any()


def test_all_processes_run_the_target_model_if_one_lacks_a_document(cache_and_batch, passes):
    """ZeRO-3 gathers its weights from all of them."""
    cache, batch, recipe = cache_and_batch
    cache.hidden_states(batch, lambda: recipe._run(batch, ()))
    asked = []
    cache.distributed = SimpleNamespace(size=2, any=lambda flag: asked.append(flag) or True)
    cache.hidden_states(batch, lambda: recipe._run(batch, ()))
    assert asked == [False]
    assert len(passes) == 2


def test_long_contexts_of_longrope_models_are_other_states(cache_and_batch):
    cache, batch, _ = cache_and_batch
    width = batch.tokens.shape[1]
    keys = {}
    for switch in (None, width, width - 1):
        cache.rope_switch = switch
        keys[switch] = [document.key for document in cache._documents(batch)]
    assert keys[None] == keys[width]
    assert not set(keys[None]) & set(keys[width - 1])
