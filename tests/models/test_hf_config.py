"""Properties of models that are read from their configs."""

import copy

from medusa_train.models.hf_config import length_dependent_rope
from tests.families import random_target_model


def test_angles_of_one_layer_type_may_change_with_the_length() -> None:
    config = copy.deepcopy(random_target_model("gemma3").config)
    assert length_dependent_rope(config) is None
    config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    assert length_dependent_rope(config) == "dynamic"
