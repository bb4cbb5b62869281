from __future__ import annotations

import pytest

from tests.tasks.doors import Fleet


@pytest.fixture
def fleet():
    """`fleet(plan, ...)`: carry out, and keep the doors and what was told."""
    return Fleet()
