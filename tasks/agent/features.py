"""What the trainer promises, tried on this machine while the old run still trains."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Optional

from . import children, gpus
from .current import deployed
from .desk import Desk, Refused, want
from .lease import watching
from .root import program, root_of
from .spec import Spec, texts

LEAST_FREE_MIB = 2048
"""A GPU with less free memory is left alone: our context could end the run that trains there."""


def features(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Run the release's own checks; every required feature must be there and pass.

    Raises:
        Refused: verify, naming what is missing or fails; failed when there was no answer.
    """
    root = root_of(arguments)
    digest = deployed(root, want(arguments, "digest", str, default=None))
    release = root.release(digest)
    python = program(want(arguments, "python", str), "python")
    required = texts(want(arguments, "required", list, default=[]), "required")
    warnings: List[str] = []
    if not os.path.isdir(release):
        raise Refused("verify", f"{digest[:12]}: not deployed; run `fab sync`", differences=[])
    spec = Spec(
        {
            "argv": [python, "-B", "-m", "trainer", "features", "--json"],
            "env": want(arguments, "env", dict, default={}),
            "output_dir": "/",
            "devices": want(arguments, "devices", list, default=[]),
        }
    )
    limits = {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": _device(spec.devices, warnings)}
    environment = spec.environment(limits)
    with watching(desk, root):
        said = children.run(
            desk,
            spec.argv,
            directory=release,
            environment=environment,
            scratch=root.path,
        )
    answer = _answer(said.out)
    if answer is None:
        raise Refused(
            "verify",
            f"features: exit {said.status} without an answer: {said.last_words}",
            exit=said.status,
            last_lines=(said.err or said.out).splitlines()[-20:],
        )
    return _judge(answer, digest, required, warnings)


def _device(wanted: List[int], warnings: List[str]) -> str:
    """The one GPU that the checks may touch, or none."""
    found = [
        gpu for gpu in gpus.answer(gpus.ask(), warnings) if not wanted or gpu["index"] in wanted
    ]
    if not found:
        return ""
    best = max(found, key=lambda gpu: gpu["free_mib"] or 0)
    if (best["free_mib"] or 0) < LEAST_FREE_MIB:
        warnings.append("not checked: GPU full")
        return ""
    return str(best["index"])


def _answer(out: str) -> Optional[Dict[str, Any]]:
    """The last line that is a JSON object with features; libraries may print around it."""
    for line in reversed(out.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("features"), list):
            return value
    return None


def _judge(
    answer: Dict[str, Any], digest: str, required: List[str], warnings: List[str]
) -> Dict[str, Any]:
    found = [each for each in answer["features"] if isinstance(each, dict)]
    found = [each for each in found if isinstance(each.get("name"), str)]
    passed = {each["name"]: each.get("ok") is True for each in found}
    missing = [name for name in required if name not in passed]
    failing = [name for name in required if passed.get(name) is False]
    others = [name for name, ok in passed.items() if not ok and name not in required]
    warnings += [f"feature {name}: fails, and is not required" for name in others]
    details = {each["name"]: each.get("detail") for each in found}
    problems = [f"{name}: missing" for name in missing]
    problems += [f"{name}: fails: {details[name]}" for name in failing]
    if answer.get("release") != digest:
        problems.insert(0, f"the trainer says it is {answer.get('release')}, not {digest[:12]}")
    if problems:
        raise Refused(
            "verify",
            f"features: {'; '.join(problems)}",
            features=found,
            missing=missing,
            failing=failing,
        )
    return {"features": found, "missing": [], "warnings": warnings}
