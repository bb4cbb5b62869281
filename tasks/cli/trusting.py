"""`fab trust`: a person compares what a host shows, and then it is written down."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tasks import report
from tasks.errors import ConfigError, DeployError, HostKeyWrong, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.cli.face import Face
    from tasks.inventory import Host
    from tasks.link import Introduction


def trust(hosts: Sequence[Host], face: Face, fingerprint: str, *, yes: bool) -> int:
    """Meet one host after the other, in this thread: a question to a person needs Ctrl-C.

    Args:
        hosts: whom to meet.
        face: where words go.
        fingerprint: what the one host must show, as `SHA256:...`, or "".
        yes: take what is shown, unseen.

    Returns:
        The exit code.

    Raises:
        ConfigError: a fingerprint for several hosts.
    """
    from tasks.outcome import Outcome  # noqa: PLC0415  # see tasks/cli

    if fingerprint and len(hosts) > 1:
        raise ConfigError("--fingerprint", f"is given for {len(hosts)} hosts", "name one --host")
    if fingerprint and not fingerprint.startswith("SHA256:"):
        raise ConfigError("--fingerprint", f"is {visible(fingerprint)}", "it begins with SHA256:")
    columns = {"hosts": max(len(host.name) for host in hosts), "operations": len("trust")}
    outcomes = []
    for host in hosts:
        error = None
        try:
            state, detail, facts = _meet(host, face, fingerprint, yes=yes)
        except DeployError as wrong:
            error, state, detail, facts = wrong, "FAILED", str(wrong), dict(wrong.facts)
        outcome = Outcome(
            host=host.name, operation="trust", state=state, detail=detail, error=error, facts=facts
        )
        outcomes.append(outcome)
        face.say(report.outcome_line(outcome, face.paper, **columns))
        face.tell("outcome", report.outcome_object(outcome))
    return report.exit_code(outcomes)


def _meet(
    host: Host, face: Face, expected: str, *, yes: bool
) -> tuple[Any, str, dict[str, object]]:
    from tasks.link import introduce  # noqa: PLC0415  # see tasks/cli

    state, told = "unchanged", []
    facts: dict[str, object] = {}
    for met in introduce(host):
        facts = {"fingerprint": met.fingerprint, "name": met.looked_up}
        if met.last and expected not in {"", met.fingerprint.split()[1]}:
            raise HostKeyWrong(
                host.name,
                f"{met.looked_up} shows {met.fingerprint}, and {visible(expected)} was expected",
                "somebody may be in between; nothing was stored",
                facts=facts,
            )
        name = "" if met.last else f"jump host {met.looked_up}: "
        if met.known:
            told.append(f"{name}{met.fingerprint} is known from {met.known}")
            continue
        if not yes and not (met.last and expected):
            _ask(host, met, face)
        file = met.remember()
        state = "changed"
        told.append(f"{name}{met.fingerprint} is now in {file}")
        facts = {**facts, "file": file}
    return state, "; ".join(told), facts


def _ask(host: Host, met: Introduction, face: Face) -> None:
    """Let a person compare. Raises HostKeyWrong for no, ConfigError where nobody can be asked."""
    said = f"{'' if met.last else 'jump host '}{met.looked_up} shows {met.fingerprint}"
    where = "compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there"
    if face.as_json or not sys.stdin.isatty():
        ways = "--fingerprint SHA256:..., or --yes unseen" if met.last else "--yes unseen"
        raise ConfigError(host.name, said, f"{where}, then give {ways}")
    face.note(f"{host.name}: {said}\n{where}")
    face.note("the same? yes or no:")
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise HostKeyWrong(host.name, f"{said}; not trusted", "nothing was stored")
