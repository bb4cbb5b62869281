"""Which release is deployed: what `current` points to."""

from __future__ import annotations

import os
from typing import Optional, Tuple

from .desk import Refused
from .root import DIGEST, Root


def on_host(root: Root) -> Tuple[Optional[str], int]:
    """The digest that `current` points to, and how many releases there are."""
    try:
        target = os.path.basename(os.readlink(root.current))
    except OSError:
        target = ""
    try:
        count = sum(1 for name in os.listdir(root.releases) if DIGEST.match(name))
    except FileNotFoundError:
        count = 0
    return (target if DIGEST.match(target) else None), count


def deployed(root: Root, digest: Optional[str]) -> str:
    """The digest that was named, or without one that of the release that ran last.

    Raises:
        Refused: verify, when nothing was named and nothing is deployed.
    """
    found = digest or on_host(root)[0]
    if found is None:
        raise Refused("verify", "nothing is deployed; run `fab deploy`", differences=[])
    return found
