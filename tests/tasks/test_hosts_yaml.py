"""The hosts.yaml of this repository: it serves the demo as it is, and its example is true."""

from __future__ import annotations

import re
from pathlib import Path

from tasks import inventory

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL = (
    "--target-model /dev/shm/Qwen3.6-27B --data-dir /workspace/tokenized_completions"
    " --output-dir /workspace/checkpoints --epochs 6 --lr 6e-4 --max-anchors 512"
    " --token-budget 8192 --block-size 16 --dp-pairs 2 --log-interval 10 --save-interval 5000"
)
"""The flags that the trainer was started with by hand."""


def test_the_demo_is_the_default_and_has_paths_of_its_own():
    (demo,) = inventory.read(ROOT / "hosts.yaml").select()
    assert demo.name == "demo"
    assert demo.ssh_config == str(ROOT / ".demo/ssh_config")
    assert demo.if_down == "`./scripts/demo --keep` starts it"
    paths = [word for word in inventory.launch_spec(demo)["argv"] if "/" in word]
    assert all(path.startswith("~/") for path in paths)


def test_what_else_a_host_may_say_is_true_too():
    text = (ROOT / "hosts.yaml").read_text(encoding="utf-8")
    said = re.findall(r"(?m)^  #   ((?:host_keys|secrets|  [A-Z_]+): ?.*)$", text)
    lines = "\n".join(f"    {line}" for line in said if "expandable" not in line)
    whole = f"{text}\n  more:\n{lines}\n    run: {{trainer: {{output-dir: ~/out}}}}\n"
    (more,) = inventory.parse(whole, source="hosts.yaml", folder=ROOT).select(["more"])
    assert more.accept_new
    assert list(more.run.secrets) == ["HF_TOKEN", "WANDB_API_KEY"]


def test_the_example_without_its_comment_signs_is_the_original_command_line():
    text = (ROOT / "hosts.yaml").read_text(encoding="utf-8")
    example = text[text.index("  # gpu1:") : text.index("  #\n  # Its host key")]
    whole = text + re.sub(r"(?m)^  # ", "  ", example)
    (gpu1,) = inventory.parse(whole, source="hosts.yaml", folder=ROOT).select(["gpu1"])
    spec = inventory.launch_spec(gpu1)
    words = ["/venv/main/bin/python", "-m", "trainer", "train", *ORIGINAL.split()]
    assert spec["argv"] == words
    assert spec["env"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert (spec["devices"], gpu1.run.grace_seconds) == ([0, 1, 2, 3], 120)
    assert "exact-resume" in gpu1.run.features
