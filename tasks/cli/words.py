"""What a person typed, and what is meant by it; refused here before any host is asked."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import ConfigError, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.inventory import Host
    from tasks.operations import Operation, Run

# Not the working directory: `fab` works from every folder below the project.
PROJECT = Path(__file__).resolve().parents[2]

HOST = (
    "hosts, groups or globs of hosts.yaml, separated by commas, such as gpu1,gpu2 or 'gpu*'; "
    "without it the group `default`"
)
DRY_RUN = "ask the hosts and print what would change; change nothing (so does fab -R)"
JSON = "print one JSON object a line on stdout, and nothing else there"
WAIT_LEASE = "seconds to wait for our turn while somebody else holds a host's lease"
RUN_ID = (
    "id of the new run, such as 20261130-185839-ab12; repeated with the same one, this makes no "
    "second run"
)
TRAINER = "folder of the trainer to use instead of this checkout's trainer/"


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a person typed, unread."""

    task: str
    host: str | None = None
    run_id: str = ""
    trainer: str | None = None
    """Folder of the desk's trainer, "" for the checkout's own; None: not the desk's tree is meant,
    but what the hosts have."""
    fresh: bool = False
    back: bool = False
    to: str = ""
    wait_lease: str = "0"
    dry: bool = False
    json: bool = False


def hosts_of(words: Words) -> tuple[Host, ...]:
    """Find the hosts that are meant. Raises ConfigError."""
    from tasks import inventory  # noqa: PLC0415  # see tasks/cli

    return inventory.read(PROJECT / "hosts.yaml").select([] if words.host is None else [words.host])


def run_of(words: Words) -> Run:
    """Make what the operations are given. Raises ConfigError."""
    from tasks import operations, release  # noqa: PLC0415  # see tasks/cli

    if words.run_id and not re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", words.run_id):
        what, form = f"is {visible(words.run_id)}", "YYYYMMDD-HHMMSS-xxxx"
        raise ConfigError("a run's id", what, f"its form is {form}, such as 20261130-185839-ab12")
    folder = Path(words.trainer or PROJECT / "trainer")
    if folder.resolve().name != "trainer":
        raise ConfigError("--trainer", f"is {folder}", "name a folder called `trainer`")
    return operations.Run(
        id=words.run_id or operations.new_run_id(datetime.now(UTC)),
        # Where the tree at the desk is not meant, it need not even parse.
        release=None if words.trainer is None else release.read_tree(folder),
        by=operations.By(
            who=os.environ.get("GITHUB_ACTOR") or os.environ.get("USER") or str(os.getuid()),
            host=socket.gethostname(),
            why=f"fab {shlex.join(sys.argv[1:])}",
        ),
        fresh=words.fresh,
        back=operations.Back(to=words.to or None) if words.back else None,
        dry=words.dry,
        wait_lease=_seconds("--wait-lease", words.wait_lease),
    )


def with_secrets(
    run: Run, hosts: Sequence[Host], plan: Sequence[Operation], *, falls_back: bool
) -> Run:
    """Read what a plan that launches must tell its trainers. Raises ConfigError."""
    from tasks import inventory, operations  # noqa: PLC0415  # see tasks/cli

    if not {operations.launch, operations.put_back} & set(plan):
        return run
    secrets = inventory.resolve_secrets(hosts, os.environ)
    return replace(run, secrets=secrets, falls_back=falls_back)


def _seconds(flag: str, text: str) -> float:
    if not re.fullmatch(r"\d{1,5}", text):
        raise ConfigError(flag, f"is {visible(text)}", "give whole seconds, 0 to 99999")
    return float(text)
