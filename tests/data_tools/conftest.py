"""Where the input files of tests are."""

from pathlib import Path

import pytest


@pytest.fixture
def troubles() -> Path:
    """Logs with the troubles that real ones have."""
    return Path(__file__).parent.parent / "cases" / "troubles"
