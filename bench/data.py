"""How fast a data set opens and a micro-batch is made, beside what people write first.

`pip install -r bench/requirements.txt`, then `python -m bench.data`. Every way of making a
micro-batch gets the same rows and makes ids, mask and what tells the rows apart, in one thread of
one process; `assembled` is the trainer's whole step, which adds each slot's document and position.
Every opening is in a fresh process, as a run's is. The ways take turns, and of each the CPU time of
its best round counts, so that other work on the machine slows none alone.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trainer.data import arrow
from trainer.data.batching import PACKED, Plan, assemble

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.data.arrow import TokenStore

BUDGET, SHARDS, ROWS_A_BATCH = 8192, 8, 1000
ROOT = Path(__file__).resolve().parent.parent


def write(folder: Path, rows: int) -> int:
    """Write a data set as `datasets` saves one, and answer its bytes.

    Log-normal lengths, int32 ids and int8 masks, as `python -m trainer prepare` writes them.
    """
    random = np.random.Generator(np.random.Philox(key=1))
    lengths = np.clip(random.lognormal(np.log(899), 0.68, rows).astype(np.int64), 16, 4096)
    folder.mkdir()
    files = [f"data-{number:05}-of-{SHARDS:05}.arrow" for number in range(SHARDS)]
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])
    for name, shard in zip(files, np.array_split(lengths, SHARDS), strict=True):
        with (folder / name).open("wb") as file:
            with pa.ipc.new_stream(file, schema) as stream:
                for first in range(0, len(shard), ROWS_A_BATCH):
                    stream.write_batch(_batch(shard[first : first + ROWS_A_BATCH], random, schema))
            file.flush()
            os.fsync(file.fileno())  # what is not on disk yet cannot be dropped from the cache
    state = {
        "_data_files": [{"filename": name} for name in files], "_fingerprint": "bench",
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None,
        "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")
    return sum((folder / name).stat().st_size for name in files)


def _batch(lengths: Any, random: np.random.Generator, schema: pa.Schema) -> pa.RecordBatch:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    # Frequent ids are small, as a tokenizer's are.
    ids = (151_935 ** random.random(total)).astype(np.int32)
    place = np.arange(total) - np.repeat(offsets[:-1], lengths)
    mask = (place >= np.repeat(lengths // 4, lengths)).astype(np.int8)
    bounds = pa.array(offsets, pa.int32())
    return pa.record_batch(
        [pa.ListArray.from_arrays(bounds, pa.array(each)) for each in (ids, mask)], schema=schema
    )


def opened(folder: Path) -> TokenStore:
    """Ours."""
    return arrow.load(folder, budget=BUDGET, whole=False)


def best(ways: dict[str, tuple[int, Callable[[int], object]]], rounds: int) -> dict[str, float]:
    """Seconds of one call of each way: the best of its rounds, in turns.

    They are CPU seconds, of all threads and the kernel: those of the clock, on a machine with other
    work, tell how long a way was kept waiting, and lengthen with its length.

    Args:
        ways: calls a round, and what is called with how often it was called before.
        rounds: at least 7 tell something.
    """
    seconds = dict.fromkeys(ways, float("inf"))
    done = dict.fromkeys(ways, 0)
    for _ in range(rounds):
        for name, (calls, way) in ways.items():
            first = done[name]
            began = time.process_time()
            for number in range(first, first + calls):
                way(number)
            seconds[name] = min(seconds[name], (time.process_time() - began) / calls)
            done[name] += calls
    return seconds


def assembly(folder: Path, size: int, rounds: int) -> dict[str, float]:
    """Seconds of one micro-batch, by each way, over the same micro-batches."""
    import torch  # noqa: PLC0415 - the measures in fresh processes do without

    from bench import naive  # noqa: PLC0415

    torch.set_num_threads(1)
    # Read once: the steady state of a run, in which every page is there.
    store = arrow.load(folder, budget=BUDGET, vocab_size=151_936)
    # Of like length, so that padding costs the padded ways little.
    batches = Plan(store.lengths, BUDGET, 0).batches(0)
    rows = [each.tolist() for each in batches]
    held = naive.open_dataset(folder)
    tensors, tables = held.with_format("torch"), held.with_format("arrow")
    given = [_as_lists(store, each) for each in batches[:64]]
    large = np.random.Generator(np.random.Philox(key=2)).integers(0, 255, size, np.uint8)
    bytes_a_batch = int(np.mean([store.lengths[each].sum() for each in batches])) * 5
    copied = np.zeros(bytes_a_batch, np.uint8)
    places = np.random.Generator(np.random.Philox(key=3)).integers(0, size - bytes_a_batch, 4096)

    def ours(number: int) -> object:
        ids, trainable = np.empty(BUDGET, np.int64), np.empty(BUDGET, np.bool_)
        starts = store.fill(batches[number % len(batches)], ids, trainable)
        end = starts[-1]
        return torch.from_numpy(ids[:end]), torch.from_numpy(trainable[:end]), starts

    def assembled(number: int) -> object:
        batch = assemble(
            store, batches[number % len(batches)], budget=BUDGET, epoch=0, number=number
        )
        arrays = batch.ids_T, batch.trainable_T, batch.document_T, batch.position_T
        return [torch.from_numpy(each) for each in arrays]

    def copy(number: int) -> None:
        place = places[number % len(places)]
        np.copyto(copied, large[place : place + bytes_a_batch])

    ways: dict[str, tuple[int, Callable[[int], object]]] = {
        "ours": (500, ours),
        "assembled": (400, assembled),
        "memcpy": (4000, copy),
        "elementwise": (1, lambda number: naive.pad_by_element(given[number % len(given)])),
        "lists": (6, lambda number: naive.pad_lists(given[number % len(given)])),
        "hf torch": (48, lambda number: naive.fetch_tensors(tensors, rows[number % len(rows)])),
        "hf arrow": (200, lambda number: naive.fetch_arrow(tables, rows[number % len(rows)])),
    }
    for _, way in ways.values():
        way(0)
    # A turn is some 10 ms: short enough that now and then one is not disturbed.
    return best(ways, 4 * rounds)


def _as_lists(store: TokenStore, rows: Any) -> list[tuple[list[int], list[int]]]:
    taken = [store.row(row) for row in rows.tolist()]
    return [(ids.tolist(), trainable.astype(int).tolist()) for ids, trainable in taken]


def opening(folder: Path, rounds: int) -> dict[str, float]:
    """CPU seconds until the data can be drawn from: once in a process, as a run begins."""
    seconds = dict.fromkeys(("ours, offsets", "ours, every token", "hf preload"), float("inf"))
    for _ in range(rounds):
        for name in seconds:
            seconds[name] = min(seconds[name], alone(folder, name)["seconds"])
    return seconds


def begin(folder: Path, what: str) -> dict[str, float]:
    """One opening; what is imported is not counted."""
    if what == "hf preload":
        from bench import naive  # noqa: PLC0415

        naive.open_dataset(folder.parent / "small")
        way: Callable[[], object] = lambda: naive.preload(folder)  # noqa: E731
    else:
        opened(folder.parent / "small")
        way = lambda: arrow.load(folder, budget=BUDGET, whole=what.endswith("token"))  # noqa: E731
    began = time.process_time()
    held = way()
    seconds = time.process_time() - began
    del held
    return {"seconds": seconds}


def alone(folder: Path, what: str) -> dict[str, float]:
    """A measure in a process of its own."""
    words = [sys.executable, "-m", "bench.data", "--alone", what, "--folder", str(folder)]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def cold(folder: Path) -> dict[str, float]:
    """Bytes that opening reads from disk, and that reading everything does."""
    _forget(folder)
    before, began = _read_bytes(), time.perf_counter()
    store = opened(folder)
    seconds, opening_read = time.perf_counter() - began, _read_bytes() - before
    del store
    _forget(folder)
    before = _read_bytes()
    for path in folder.glob("*.arrow"):
        path.read_bytes()
    return {"seconds": seconds, "open": opening_read, "all": _read_bytes() - before}


def epoch(folder: Path) -> dict[str, float]:
    """Growth of this process's own memory over opening, planning and a whole epoch."""
    opened(folder.parent / "small")  # what code and libraries take is no matter of the data's size
    before = _own_memory()
    store = opened(folder)
    batches = Plan(store.lengths, BUDGET, 0, layout=PACKED).batches(0)
    for number, rows in enumerate(batches):
        assemble(store, rows, budget=BUDGET, epoch=0, number=number)
    return {
        "anon": _own_memory() - before,
        "fill": store.tokens / (len(batches) * BUDGET),
    }


def _forget(folder: Path) -> None:
    for path in folder.glob("*.arrow"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_bytes() -> int:
    return _number("/proc/self/io", "read_bytes:")


def _own_memory() -> int:
    return _number("/proc/self/status", "RssAnon:") * 1024


def _number(path: str, name: str) -> int:
    lines = Path(path).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    load = os.getloadavg()[0]
    return f"{name}, {os.cpu_count()} CPUs, load {load:.1f}, Python {platform.python_version()}"


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=100_000, help="Of the data set (100,000 are 0.56 GB)."
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="Fresh processes of each way to open; four times as many turns of each to batch.",
    )
    parser.add_argument("--folder", type=Path, help="Where the data set is made; not a tmpfs.")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        measure = {"cold": cold, "epoch": epoch}.get(chosen.alone)
        told = measure(chosen.folder) if measure else begin(chosen.folder, chosen.alone)
        print(json.dumps(told))
        return
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made:
        folder = Path(made) / "set"
        size = write(folder, chosen.rows)
        write(Path(made) / "small", 2000)
        read, grown = alone(folder, "cold"), alone(folder, "epoch")
        made_s, open_s = assembly(folder, size, chosen.rounds), opening(folder, chosen.rounds)
    ratios = {
        "elementwise_over_ours": made_s["elementwise"] / made_s["ours"],
        "lists_over_ours": made_s["lists"] / made_s["ours"],
        "hf_best_over_ours": made_s["hf torch"] / made_s["ours"],
        "hf_arrow_over_ours": made_s["hf arrow"] / made_s["ours"],
        "assembled_over_ours": made_s["assembled"] / made_s["ours"],
        "ours_over_memcpy": made_s["ours"] / made_s["memcpy"],
        "hf_preload_over_open": open_s["hf preload"] / open_s["ours, offsets"],
        "hf_preload_over_open_and_scan": open_s["hf preload"] / open_s["ours, every token"],
        "cold_bytes_over_file": read["open"] / size,
        "anon_over_file": grown["anon"] / size,
        "fill": grown["fill"],
    }
    now = dt.datetime.now(dt.UTC)
    print(f"{now:%Y-%m-%d %H:%M} UTC; {_machine()}")
    print(
        f"{chosen.rows:,} rows, {size / 1e6:,.0f} MB, budget {BUDGET:,}; CPU time, best of"
        f" {4 * chosen.rounds} turns (batches) and {chosen.rounds} fresh processes (opening)\n"
    )
    print("one micro-batch                    us     times ours")
    for name, seconds in made_s.items():
        print(f"  {name:26} {seconds * 1e6:11,.1f} {seconds / made_s['ours']:11,.1f}")
    print("opening                            ms     times ours")
    for name, seconds in open_s.items():
        ratio = seconds / open_s["ours, offsets"]
        print(f"  {name:26} {seconds * 1e3:11,.1f} {ratio:11,.1f}")
    print(
        f"cold: opening took {read['seconds'] * 1e3:,.0f} ms and read {read['open'] / 1e6:,.1f} MB;"
        f" reading the files reads {read['all'] / 1e6:,.0f} MB"
    )
    print(
        f"a whole packed epoch: {grown['anon'] / 1e6:,.1f} MB of memory of its own;"
        f" {grown['fill']:.2%} of the slots are tokens"
    )
    print(json.dumps({name: float(f"{value:.4g}") for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
