"""Operations on a run: end it, start it, wait for its first step, say how it is."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tasks.errors import Unhealthy
from tasks.inventory import launch_spec, spec_digest
from tasks.operations.words import changes, listed
from tasks.outcome import Effect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations.words import Run

FAILED_GRACE_S = 10
HEALTHY = ("starting", "training", "training, unsupervised", "finished")
"""States of a run that `health` passes."""
LIVING = ("starting", "training", "training, unsupervised", "stalled")


def _pair(host: Host, run: Run) -> list[str | None] | None:
    """Give what should run, or None when any healthy run must make way for a new one."""
    return None if run.fresh or run.back else [run.digest, spec_digest(launch_spec(host))]


@changes
def kill(host: Host, run: Run, link: Link) -> Effect:
    """End the run, and wait until none of its processes is left.

    A healthy run that is already what should run is kept, and so is the run of this very
    invocation; with `run.fresh`, that one alone. A run that failed gets little time: it has made
    no step, so it has nothing to save.

    Idempotent: where nothing runs, this changes nothing and succeeds.

    Raises:
        RemoteFailure: a process outlived SIGKILL, or is not ours; it is named with its state.
    """
    keep: dict[str, object] = {"run_id": run.id, "pair": _pair(host, run), "back": None}
    grace = host.run.grace_seconds
    if keep["pair"]:
        keep["secrets"] = run.secrets.of(host.name)
    if run.back and run.back.instead_of:
        grace = min(grace, FAILED_GRACE_S)
    elif run.back:
        keep["back"] = run.back.words()
    reply = link.ask(
        "kill",
        {"root": host.root, "grace_s": grace, "keep": keep, "dry": run.dry},
        deadline=grace + 60,
        lease=run.lease,
        by=run.by.words(),
    )
    if reply.get("kept"):
        return Effect(
            changed=False, detail=f"kept run {reply['kept']}" + listed(reply), facts=reply
        )
    if not reply.get("changed"):
        return Effect(changed=False, detail="nothing ran" + listed(reply), facts=reply)
    done = f"{'would end' if run.dry else 'ended'} pid {reply.get('pid')}"
    if reply.get("step") is not None:
        done += f" at step {reply['step']:,}"
    return Effect(changed=True, detail=done + listed(reply), facts=reply)


@changes
def launch(host: Host, run: Run, link: Link) -> Effect:
    """Switch `current` to the release and start the run under its keeper.

    Idempotent: a run of this id is found and left alone; so is, unless a fresh run was asked
    for, a live one of the same release and settings.

    Raises:
        RemoteRefusal: another run lives in this root, or holds the devices.
        RemoteFailure: the interpreter cannot be started; the message holds the reason.
    """
    spec, pair = launch_spec(host), _pair(host, run)
    arguments = {
        "root": host.root,
        "run_id": run.id,
        "digest": run.digest,
        "spec_digest": spec_digest(spec),
        "spec": spec,
        "secrets": run.secrets.of(host.name),
        "accept_pair": pair is not None,
        "dry": run.dry,
    }
    reply = link.ask("launch", arguments, deadline=60, lease=run.lease, by=run.by.words())
    name = f"run {reply.get('run_id')}"
    if not reply.get("changed"):
        there = f"{name} is there, {reply.get('state')}"
        return Effect(changed=False, detail=there + listed(reply), facts=reply)
    done = f"would start {name}" if run.dry else f"{name}, pid {reply.get('pid')}"
    return Effect(changed=True, detail=done + listed(reply), facts=reply)


@changes
def put_back(host: Host, run: Run, link: Link) -> Effect:
    """Start what trained before, with its own settings, on the checkpoint pinned for it.

    Idempotent: where it is back already, and well, this changes nothing.

    Raises:
        RemoteRefusal: nothing made a step here before, or a run is alive.
        RemoteFailure: its interpreter cannot be started.
    """
    assert run.back is not None, "a plan with this operation needs Run(back=...)"
    arguments = {
        "root": host.root,
        "run_id": run.id,
        "back": run.back.words(),
        "secrets": run.secrets.of(host.name),
        "dry": run.dry,
    }
    reply = link.ask("put_back", arguments, deadline=60, lease=run.lease, by=run.by.words())
    name = f"release {str(reply.get('release'))[:12]}"
    if not reply.get("changed"):
        return Effect(changed=False, detail=f"{name} is back, run {reply['run_id']}", facts=reply)
    saved = PurePosixPath(reply["checkpoint"]).name if reply.get("checkpoint") else "the beginning"
    run_words = f"run {reply.get('run_id')} from {saved}"
    aside = [PurePosixPath(path) for path in reply.get("aside") or []]
    if run.dry:
        moved = f"; would set aside {', '.join(path.name for path in aside)}" if aside else ""
        return Effect(changed=True, detail=f"would start {name} as {run_words}{moved}", facts=reply)
    moved = f"; set aside: {', '.join(map(str, aside))}" if aside else ""
    return Effect(changed=True, detail=f"{name} is back as {run_words}{moved}", facts=reply)


def await_progress(host: Host, run: Run, link: Link) -> Effect:
    """Wait for the run's first step with a finite loss, telling its phases on the way.

    Idempotent: it only looks; a run that is past its first step answers at once.

    Raises:
        NoFirstStep: it crashed, ended, stalled, or the deadline passed; with its last lines.
    """
    limit = host.run.first_step_seconds
    if run.dry:
        return Effect(changed=False, detail=f"would wait up to {limit} s for the first step")
    told = ""

    def on_progress(frame: Mapping[str, Any]) -> None:
        nonlocal told
        phase = str(frame.get("phase") or "")
        if phase and phase != told:
            told = phase
            link.progress(f"{host.name}: {phase}")

    reply = link.ask(
        "await_progress",
        {
            "root": host.root,
            "run_id": run.id,
            "pair": _pair(host, run),
            "back": run.back and run.back.words(),
        },
        # The host gives up a second before its own deadline, which is 2 s before ours.
        deadline=limit + 3,
        lease=run.lease,
        by=run.by.words(),
        on_progress=on_progress,
    )
    if reply.get("state") == "finished":
        said = f"finished at step {reply.get('step'):,}; nothing is left to train"
        return Effect(changed=False, detail=said, facts=reply)
    loss = reply.get("loss")
    shown = f", loss {loss:.3f}" if isinstance(loss, float) else ""
    took = f" after {reply['seconds']:.1f} s" if isinstance(reply.get("seconds"), float) else ""
    return Effect(changed=False, detail=f"step {reply.get('step')}{shown}{took}", facts=reply)


def health(host: Host, run: Run, link: Link) -> Effect:
    """Say how the newest run is, from its processes, its records and the age of its last step.

    Idempotent: it only looks.

    Raises:
        Unhealthy: no run, or one that is stalled, crashed, killed or lost.
    """
    reply = _ask_health(host, run, link)
    if reply.get("state") not in HEALTHY:
        raise Unhealthy(host.name, _said(reply), f"see `fab logs --host {host.name}`", facts=reply)
    return Effect(changed=False, detail=_said(reply), facts=reply)


def describe(host: Host, run: Run, link: Link) -> str:
    """Say in a few words how the newest run is, whatever its state: read after a lost result."""
    return _said(_ask_health(host, run, link))


def _ask_health(host: Host, run: Run, link: Link) -> Mapping[str, Any]:
    return link.ask("health", {"root": host.root, "run_id": None}, deadline=30, by=run.by.words())


def _said(reply: Mapping[str, Any]) -> str:
    state = str(reply.get("state"))
    if state == "absent":
        return "no run was ever started here"
    parts = [f"run {reply.get('run_id')} is {state}"]
    # Of a run that is over, the number may be anybody's by now.
    if reply.get("pid") and state in LIVING:
        parts.append(f"pid {reply['pid']}")
    if reply.get("step") is not None:
        total = f" of {reply['steps']:,}" if reply.get("steps") else ""
        parts.append(f"step {reply['step']:,}{total}")
    if reply.get("detail") not in {None, "", f"step {reply.get('step')}"}:
        parts.append(str(reply["detail"]))
    return ", ".join(parts)
