"""Reads conversations that the target is to answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainer.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """The conversations of a file, each a list of messages with `role` and `content`.

    Raises:
        InputError: the file is not there, is empty, or a line is no prompt; it is named.
    """
    try:
        # Not splitlines(): JSON leaves U+2028 and its like unescaped inside a text.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {path}: {error}; give a file of JSON lines") from error
    found = [
        _conversation(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise InputError(f"--prompts {path}: holds no prompt; give one JSON object a line")
    return found


def _conversation(line: str, where: str) -> list[dict[str, str]]:
    wish = 'give {"prompt": text} or {"messages": [{"role": ..., "content": ...}]}'
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: is no JSON ({error}); {wish}") from error
    messages: object = None
    if isinstance(value, dict):
        prompt = value.get("prompt")
        messages = (
            value.get("messages") if prompt is None else [{"role": "user", "content": prompt}]
        )
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: holds neither prompt nor messages; {wish}")
    for each in messages:
        if not isinstance(each, dict) or not all(
            isinstance(each.get(key), str) and each[key] for key in ("role", "content")
        ):
            raise InputError(f"{where}: a message is {each!r}; {wish}")
    return messages
