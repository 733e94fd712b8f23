"""The decoding that the keys of an evaluation describe."""

import pytest

from medusa_train.config.schema import EvalConfig
from medusa_train.inference.accept import AcceptanceRule, Greedy, Typical
from medusa_train.inference.decoding_mode import DecodingMode, describe_mode, mode_of
from medusa_train.inference.sampling import Sampling


@pytest.mark.parametrize(
    ("keys", "rule", "baseline", "description", "directory"),
    [
        ({}, Greedy(), Greedy(), "greedy decoding", "b"),
        ({"batch_size": 4}, Greedy(), Greedy(), "greedy decoding, in batches of 4", "b-batch4"),
        (
            {"acceptance": "sampling", "top_p": 0.9, "top_k": 50},
            Sampling(0.7, 50, 0.9),
            Sampling(0.7, 50, 0.9),
            "sampling at temperature 0.7, top-p 0.9, top-k 50",
            "b-sampling-t0.7-top_p0.9-top_k50",
        ),
        (
            {
                "acceptance": "typical",
                "temperature": 1,
                "delta": 0.2,
                "top_p": 0.9,
                "batch_size": 2,
            },
            Typical(1.0, 0.09, 0.2),
            Sampling(1.0),
            "typical acceptance at temperature 1 (epsilon 0.09, delta 0.2), in batches of 2",
            "b-typical-t1-delta0.2-batch2",
        ),
    ],
)
def test_what_the_keys_mean(
    keys: dict[str, object],
    rule: AcceptanceRule,
    baseline: AcceptanceRule,
    description: str,
    directory: str,
) -> None:
    mode = DecodingMode.from_config(EvalConfig(**keys))
    assert mode.rule == rule
    assert mode.baseline_rule == baseline
    assert describe_mode(mode.as_json) == description
    assert mode.directory_name("b") == directory
    assert mode.generate_options["do_sample"] is (baseline != Greedy())


def test_reports_in_different_modes_never_share_a_directory() -> None:
    modes = [
        {"acceptance": rule, "temperature": t}
        for rule in ("sampling", "typical")
        for t in (0.7, 1.0)
    ]
    modes += [{"acceptance": "typical", name: 0.05} for name in ("epsilon", "delta")]
    modes += [{}, {"acceptance": "sampling", "seed": 7}, {"acceptance": "sampling", "top_k": 5}]
    names = [DecodingMode.from_config(EvalConfig(**keys)).directory_name("b") for keys in modes]
    assert len(set(names)) == len(names)
    assert (
        DecodingMode().directory_name("b", "prompt_lookup", "dynamic") == "b-prompt_lookup-dynamic"
    )


def test_older_reports_are_of_greedy_decoding() -> None:
    assert mode_of({}) == {"acceptance": "greedy", "batch_size": 1} == mode_of({"decoding": None})


def test_random_numbers_depend_on_seed_and_prompt_alone() -> None:
    mode = DecodingMode("sampling", 0.7)
    prompts = [[1, 2], [3]]
    first, second = (one.initial_seed() for one in mode.generators(prompts, mode.rule) or ())
    assert first != second
    assert mode.seed_of([3]) == second
    assert DecodingMode("sampling", 0.7, seed=1).seed_of([3]) != second
    assert mode.generators(prompts, Typical()) is None
