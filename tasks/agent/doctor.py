"""What a host that misbehaves is asked, one question after the other, however many go wrong."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Dict, List, Optional

from . import children, current, gpus, lease, processes, releases, runs
from .checkup import Rows, clock, disk_rows, machine_rows, port_rows
from .desk import Desk, Refused, want
from .root import Root, expand, program

WELL = ("starting", "training", "finished", "absent")
ASK_TORCH = """
import json, platform, sys
found = {"version": platform.python_version(), "prefix": sys.prefix, "missing": []}
for name in ("torch", "pyarrow", "transformers", "numpy", "safetensors"):
    try: module = __import__(name)
    except Exception as error: found["missing"].append(f"{name} ({type(error).__name__}: {error})")
    else:
        if name == "torch":
            found["torch"], found["cuda"] = module.__version__, module.version.cuda
            found["available"] = module.cuda.is_available()
            found["devices"] = module.cuda.device_count()
print(json.dumps(found))
"""


def doctor(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Ask everything, and give rows {check, state: ok|warn|broken, detail, mend}; only looks."""
    rows = Rows()
    environment = dict(os.environ)
    machine_rows(rows, environment)
    smi = gpus.ask()
    root: Optional[Root] = None
    output: Optional[str] = None
    with rows.asking("root"):
        path = expand(want(arguments, "root", str), "root")
        root = Root(os.path.realpath(path))
        _root(rows, root)
    with rows.asking("output"):
        text = want(arguments, "output", str, default=None)
        output = None if text is None else expand(text, "output")
    stats = processes.everything()
    holders = _ours(root, stats)
    if root is not None:
        disk_rows(rows, root, output)
    for what in ("target", "data"):
        with rows.asking(what):
            _there(rows, what, want(arguments, what, str, default=None))
    port_rows(rows, want(arguments, "port", int, default=None), holders)
    asked = want(arguments, "devices", list, default=[])
    warnings: List[str] = []
    with rows.asking("GPU"):
        found = gpus.answer(smi, warnings)
        for warning in warnings:
            mend = "see `dmesg | grep -i nvrm`; reload the driver or reboot"
            rows.broken("GPU driver", warning, mend)
        if found or not warnings:
            _gpus(rows, found, asked, holders)
    with rows.asking("interpreter"):
        _interpreter(desk, rows, want(arguments, "python", str), asked)
    if root is not None:
        with rows.asking("lease"):
            _lease(rows, root)
        with rows.asking("release"):
            _release(desk, rows, root)
        with rows.asking("run"):
            _run(rows, root)
    return {"checks": rows.found, "clock": clock()}


def _ours(root: Optional[Root], stats: Dict[int, processes.Stat]) -> Callable[[int], bool]:
    path = None if root is None else os.fsencode(root.path)
    tags = processes.tagged(stats, b"TRAINER_ROOT")
    mine = {pid for pid, variables in tags.items() if variables[b"TRAINER_ROOT"] == path}
    return lambda pid: pid in mine


def _root(rows: Rows, root: Root) -> None:
    try:
        ours = root.check_owner()
    except Refused as refused:
        rows.broken("root", refused.text, "give this host a `root` of its own in hosts.yaml")
        return
    doubt = root.doubt()
    if doubt is not None:
        rows.warn("root", doubt, f"if it was renamed: rm {root.machine}; the next deploy makes it")
        return
    rows.ok("root", f"{root.path} is {'ours' if ours else 'not there yet; a deploy makes it'}")


def _there(rows: Rows, what: str, text: Optional[str]) -> None:
    if text is None:
        return
    path = expand(text, what)
    if not os.path.exists(path):
        mend = f"bring it there; is its disk mounted? `ls -l {os.path.dirname(path)}`"
        rows.broken(what, f"{path} is not there", mend)
    elif not os.access(path, os.R_OK):
        rows.broken(what, f"{path} is not readable for uid {os.getuid()}", f"chmod a+rX {path}")
    else:
        rows.ok(what, path)


def _gpus(
    rows: Rows, found: List[Dict[str, Any]], asked: List[int], ours: Callable[[int], bool]
) -> None:
    absent = sorted(set(asked) - {gpu["index"] for gpu in found})
    if absent:
        mend = "mend `devices` in hosts.yaml, or start the container with its GPUs"
        rows.broken("GPU", f"devices {absent} are not there", mend)
    elif not found:
        rows.ok("GPU", "no NVIDIA GPU here, and hosts.yaml names none")
    else:
        free = ", ".join(f"{gpu['index']}: {gpu['free_mib']} MiB free" for gpu in found)
        rows.ok("GPU", f"{len(found)} by nvidia-smi; {free}")
    for gpu in found:
        if asked and gpu["index"] not in asked:
            continue
        strangers = [holder for holder in gpu["holders"] if not ours(holder["pid"])]
        if strangers:
            who = ", ".join(f"pid {each['pid']} of uid {each['uid']}" for each in strangers)
            mend = f"ask them, or use other `devices`: `ps -fp {strangers[0]['pid']}`"
            rows.warn(f"GPU {gpu['index']}", f"is also held by {who}", mend)


def _interpreter(desk: Desk, rows: Rows, text: str, asked: List[int]) -> None:
    python = program(text, "python")
    environment = {
        "HOME": os.path.expanduser("~"),
        "PATH": os.environ.get("PATH", ""),
        "LANG": "C.UTF-8",
        # Asked this way torch makes no context, which would take memory from the run.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    mend = "set `python` in hosts.yaml to the whole path of the trainer's interpreter"
    try:
        said = children.run(
            desk, [python, "-B", "-c", ASK_TORCH], directory="/", environment=environment
        )
        found = json.loads(said.out.strip().splitlines()[-1])
    except Refused as refused:
        if refused.code != "failed":
            raise
        rows.broken("interpreter", refused.text, mend)
        return
    except (ValueError, IndexError):
        rows.broken("interpreter", f"{python}: exit {said.status}: {said.last_words}", mend)
        return
    version = tuple(int(part) for part in found["version"].split(".")[:2])
    if version < (3, 10):
        rows.broken("interpreter", f"{python} is {found['version']}; 3.10 is the least", mend)
    else:
        rows.ok("interpreter", f"{python} is {found['version']}, of {found['prefix']}")
    packages = f"{python} -m pip install -r {{root}}/current/trainer/requirements.txt"
    if found["missing"]:
        rows.broken("packages", f"missing: {', '.join(found['missing'])}", packages)
    _torch(rows, found, asked)


def _torch(rows: Rows, found: Dict[str, Any], asked: List[int]) -> None:
    if "torch" not in found:
        return
    words = f"torch {found['torch']} sees {found['devices']} GPUs"
    if found["cuda"] is None and (asked or gpus.present()):
        mend = "install a build of torch with CUDA; see https://pytorch.org/get-started/locally"
        rows.broken("torch", f"{words}: it was built without CUDA", mend)
    elif not found["available"] and (asked or gpus.present()):
        mend = "the driver is older than this torch, or hung: `nvidia-smi`, then update either"
        rows.broken("torch", f"{words}, although nvidia devices are here", mend)
    elif asked and found["devices"] <= max(asked):
        rows.broken("torch", f"{words}; hosts.yaml names {asked}", "mend `devices` in hosts.yaml")
    else:
        rows.ok("torch", words)


def _lease(rows: Rows, root: Root) -> None:
    held = lease.present(root)
    if held is None:
        rows.ok("lease", "nobody holds it")
    else:
        words = f"{held.get('who')} on {held.get('host')}: {held.get('why')}"
        rows.warn(
            "lease",
            f"held by {words}, for {held['left_s']:.0f} s more",
            "wait, or `fab lease --release`",
        )


def _release(desk: Desk, rows: Rows, root: Root) -> None:
    digest, count = current.on_host(root)
    if digest is None:
        rows.ok("release", "nothing was deployed yet")
        return
    desk.check()
    release = root.release(digest)
    files = releases.stored(release)
    if files is None or releases.digest_of(files) != digest:
        wrong = ["its manifest is not its own"]
    else:
        wrong = releases.differences(release, files)
    if wrong:
        rows.broken("release", f"{digest[:12]}: {wrong[0]}", "`fab deploy` makes it whole")
    else:
        rows.ok("release", f"{digest[:12]} is whole; {count} kept")


def _run(rows: Rows, root: Root) -> None:
    known = runs.describe(runs.latest(root))
    state = known["state"]
    words = f"{known['run_id']} is {state}" if known["run_id"] else "none was ever launched here"
    if known["run_id"] and known.get("detail"):
        words += f", {known['detail']}"
    if state in WELL:
        rows.ok("run", words)
    elif state == "training, unsupervised":
        rows.warn("run", words, "`fab restart` gives it a keeper again")
    else:
        rows.broken("run", words, "`fab logs` shows why; `fab restart` starts it again")
