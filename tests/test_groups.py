"""Tests of one group run in one process, where they share what is set up for all of them."""

import pytest


@pytest.mark.xdist_group("grouped")
def test_a_group_is_kept_together(request: pytest.FixtureRequest) -> None:
    """In pytest 9.2 pytest-xdist 3.8 kept none, so two processes set up the same distributed runs."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("needs pytest -n with --dist loadgroup")
    assert request.node.nodeid.endswith("@grouped")
