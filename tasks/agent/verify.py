"""Whether a release is whole, importable, and has what its run needs; the old run still trains."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Optional

from . import children, gpus, outputs, previous, probe, processes, releases, runs
from .current import deployed
from .desk import Desk, Refused, want
from .lease import watching
from .root import Root, program, root_of
from .spec import Spec

LOW_BYTES = 2 << 30
"""Less free space than this is told even where no checkpoint shows how much one takes."""
ASK_IMPORT = """
import json, platform
import trainer
print(json.dumps({"python": platform.python_version(), "file": trainer.__file__}))
"""
BAD_INPUT = 2
"""The trainer's exit code for what a person got wrong; any other is the release's own fault."""
TRAIN, CHECK = ["-m", "trainer", "train"], ["-m", "trainer", "check"]
"""What a spec starts, and what only reads its flags: exits 0, or says in a line what is wrong."""


def verify(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Compare everything with what was meant; changes nothing but a file written on trial.

    Raises:
        Refused: verify, naming every difference.
    """
    root = root_of(arguments)
    digest, plain = _meant(root, arguments)
    release = root.release(digest)
    spec = None if plain is None else Spec(plain)
    python = want(arguments, "python", str, default=None)
    warnings: List[str] = []
    if not os.path.isdir(release):
        # Said before anything travels: a dry run to a new host finds a mistyped path.
        _refuse(
            digest, [] if spec is None else _interpreter(spec) + _surroundings(root, spec, warnings)
        )
        return {
            "state": "not deployed",
            "digest": digest,
            "run_id": None,
            "files": 0,
            "warnings": warnings,
        }
    files = releases.stored(release)
    if files is None or releases.digest_of(files) != digest:
        wrong = [f"{releases.MANIFEST}: is not that of this release"]
    else:
        wrong = releases.differences(release, files)
    imported: Dict[str, Any] = {}
    if not wrong and python:
        with watching(desk, root):
            imported = _import(desk, release, program(python, "python"), spec, wrong)
            if spec is not None and not wrong:
                wrong += _flags(desk, release, spec)
    if spec is not None:
        wrong += _surroundings(root, spec, warnings)
    _refuse(digest, wrong)
    state, run_id = _running(root, digest)
    failed = previous.failures(root, digest) if state != "running this" else []
    warnings += [f"run {run.run_id} of this release never made a step" for run in failed[:1]]
    return {
        "state": state,
        "digest": digest,
        "run_id": run_id,
        "files": len(files or []),
        "python_version": imported.get("python"),
        "imported_from": imported.get("file"),
        "secret_names": [] if spec is None else spec.secret_names,
        "warnings": warnings,
    }


def _refuse(digest: str, wrong: List[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise Refused("verify", f"{digest[:12]}: {wrong[0]}{more}", differences=wrong)


def _interpreter(spec: Spec) -> List[str]:
    python = spec.argv[0]
    if not os.path.isabs(python) or os.access(python, os.X_OK):
        return []
    return [f"python {python}: is not there, or may not be started"]


def _surroundings(root: Root, spec: Spec, warnings: List[str]) -> List[str]:
    """What a run needs of the host beside its release, and does not find."""
    return _paths(root, spec, warnings) + _ports(root, spec, warnings) + _devices(spec, warnings)


def _meant(root: Root, arguments: Dict[str, Any]) -> Any:
    """(digest, spec or None) of what is to be verified."""
    back = want(arguments, "back", dict, default=None)
    if back is not None:
        record = previous.choose(root, back).spec
        return record["release"], record["spec"]
    digest = deployed(root, want(arguments, "digest", str, default=None))
    return digest, want(arguments, "spec", dict, default=None)


def _running(root: Root, digest: str) -> Any:
    living = runs.living(root)
    if not living:
        return "deployed, not running", None
    run = living[-1]
    # What it imported is the truth; before it has said that, what was launched has to do.
    running = run.status.get("release") if run.status else run.spec.get("release")
    return ("running this" if running == digest else "running other code"), run.run_id


def _import(
    desk: Desk, release: str, python: str, spec: Optional[Spec], wrong: List[str]
) -> Dict[str, Any]:
    environment = (spec or Spec({"argv": [python], "output_dir": "/"})).environment({})
    try:
        said = children.run(
            desk,
            [python, "-B", "-c", ASK_IMPORT],
            directory=release,
            environment=environment,
            scratch=os.path.dirname(os.path.dirname(release)),
        )
    except Refused as refused:
        if refused.code != "failed":
            raise
        wrong.append(refused.text)
        return {}
    try:
        found: Dict[str, Any] = json.loads(said.out.strip().splitlines()[-1])
        inside = os.path.realpath(found["file"]).startswith(os.path.realpath(release) + "/")
    except (ValueError, IndexError, KeyError, TypeError):
        wrong.append(f"{python}: cannot import the trainer: {said.last_words}")
        return {}
    if not inside:
        wrong.append(f"{python}: imports the trainer from {found['file']}, not from the release")
    return found


def _flags(desk: Desk, release: str, spec: Spec) -> List[str]:
    """What the release says to the flags it would be launched with."""
    python, *words = spec.argv
    if words[:3] != TRAIN:
        return []
    said = children.run(
        desk,
        [python, "-B", *CHECK, *words[3:]],
        directory=release,
        environment=spec.environment({}),
        scratch=os.path.dirname(os.path.dirname(release)),
    )
    if said.status == 0:
        return []
    where = "run.trainer" if said.status == BAD_INPUT else f"{' '.join(CHECK[1:])}"
    return [f"{where}: {said.last_words}"]


def _flag(spec: Spec, name: str) -> Optional[str]:
    """The value of a flag of the trainer; the last one counts, as it does for argparse."""
    found = None
    for index, word in enumerate(spec.argv):
        if word == name and index + 1 < len(spec.argv):
            found = spec.argv[index + 1]
        elif word.startswith(name + "="):
            found = word[len(name) + 1 :]
    return found


def _paths(root: Root, spec: Spec, warnings: List[str]) -> List[str]:
    wrong = []
    for flag in ("--target-model", "--data-dir"):
        path = _flag(spec, flag)
        if path is not None and not os.path.exists(path):
            wrong.append(f"{flag[2:]} {path}: is not there")
        elif path is not None and not os.access(path, os.R_OK):
            wrong.append(f"{flag[2:]} {path}: is not readable for uid {os.getuid()}")
    try:
        outputs.check_owner(root, spec.output_dir)
    except Refused as refused:
        wrong.append(refused.text)
    inner, outer = sorted((os.path.realpath(spec.output_dir), os.path.realpath(root.path)), key=len)
    if os.path.commonpath((inner, outer)) == inner:
        wrong.append(
            f"output-dir {spec.output_dir}: and root {root.path} lie in each other; give it a"
            " folder of its own"
        )
        return wrong
    there = spec.output_dir
    while not os.path.exists(there) and there != "/":
        there = os.path.dirname(there)
    problem = probe.trial_write(there)
    if problem is not None:
        wrong.append(f"output-dir {spec.output_dir}: cannot be written: {problem}")
        return wrong
    newest = outputs.newest(spec.output_dir)
    size = outputs.size(newest) if newest else None
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    if size is not None and free < 2 * size:
        wrong.append(
            f"output-dir {spec.output_dir}: {free >> 20:,} MiB free, and two checkpoints of"
            f" {size >> 20:,} MiB must fit"
        )
    elif size is None and free < LOW_BYTES:
        # Nothing was saved there yet, so what one takes is not known.
        warnings.append(f"output-dir {spec.output_dir}: only {free >> 20:,} MiB free")
    return wrong


def _ports(root: Root, spec: Spec, warnings: List[str]) -> List[str]:
    text = spec.env.get("MASTER_PORT", "")
    if not text.isdigit() or not 0 < int(text) < 65536:
        return []
    found = probe.port(int(text))
    if found["free"]:
        return []
    stats = processes.everything()
    ours = {pid for run in runs.living(root) for pid in run.tagged(stats)}
    if found.get("pid") in ours:
        return []  # the run that this one will replace
    warnings.append(f"port {text}: taken")
    return [f"port {text}: is taken by pid {found.get('pid') or 'unknown'}"]


def _devices(spec: Spec, warnings: List[str]) -> List[str]:
    if not spec.devices:
        return []
    found = {gpu["index"] for gpu in gpus.answer(gpus.ask(), warnings)}
    absent = [device for device in spec.devices if device not in found]
    return [f"devices {absent}: this host has {sorted(found)}"] if absent else []
