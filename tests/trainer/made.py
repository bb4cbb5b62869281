"""Data sets and command lines for tests, small enough to run in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa

ROOT = Path(__file__).parents[2]


def rows(count=24, *, seed=0, vocabulary=60, longest=24):
    """Rows of ids and a mask whose first tokens, the prompt, are not trained on."""
    random = np.random.default_rng(seed)
    made = []
    for length in random.integers(8, longest + 1, count):
        ids = random.integers(1, vocabulary, length)
        mask = (np.arange(length) >= 3).astype(np.int64)
        made.append((ids.tolist(), mask.tolist()))
    return made


def table(made, *, ids=None, mask=None):
    ids = ids or pa.list_(pa.int32())
    mask = mask or pa.list_(pa.int64())
    return pa.table(
        {
            "input_ids": pa.array([row[0] for row in made], ids),
            "loss_mask": pa.array([row[1] for row in made], pa.list_(pa.int64())).cast(mask),
        }
    )


def write_stream(path, made_table, *, rows_a_batch=1000):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, made_table.schema) as writer:
        writer.write_table(made_table, max_chunksize=rows_a_batch)


def save_to_disk(folder, tables):
    """The layout of HuggingFace `datasets.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for name, each in zip(names, tables, strict=True):
        write_stream(folder / name, each, rows_a_batch=7)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def flags(target, data, out, **more):
    """A command line of `train` for a tiny run on the CPU."""
    chosen = {
        "target_model": target, "data_dir": data, "output_dir": out, "device": "cpu", "epochs": 2,
        "token_budget": 64, "max_anchors": 6, "block_size": 4, "draft_layers": 2, "tap_count": 2,
        "mask_token_id": 63, "lr": 1e-2, "threads": 1, "log_interval": 1, "save_interval": 0,
    } | more  # fmt: skip
    words = []
    for name, value in chosen.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    return words


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRAINER_")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


@contextmanager
def started(words, **more):
    """`python -m trainer WORDS` as a process; killed with all its ranks if the test fails."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words], cwd=ROOT, env=environment(**more),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for each in [process, *psutil.Process(process.pid).children(recursive=True)]:
                    each.kill()


def finish(process, *, within=120):
    """Wait for the end; exit code, stdout, stderr."""
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


def run(words, *, within=120, **more):
    with started(words, **more) as process:
        return finish(process, within=within)


def until(true, *, within=60.0, what="it"):
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen within {within} s"
        time.sleep(0.01)
