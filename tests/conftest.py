"""What holds for every test: how hypothesis draws. No fixtures: those live in shared/testing and beside their tests."""

import os
from pathlib import Path

from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(Path(__file__).parents[1] / "build" / "hypothesis")

# The same draws in every run: a failure in CI is a failure here. No limit per example, since two busy
# cores make one of a few milliseconds take a hundred; the limit per test stands in pyproject.toml.
settings.register_profile("steady", derandomize=True, deadline=None, print_blob=True)
# HYPOTHESIS_PROFILE=explore looks for what the steady draws have not met.
settings.register_profile("explore", deadline=None, max_examples=1_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
