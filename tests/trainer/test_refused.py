"""What is wrong with data is one line: the file, the row, what is there, what to do next."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer import made
from trainer.data import arrow
from trainer.data.arrow import containers
from trainer.data.batching import assemble
from trainer.errors import InputError

ROWS = made.rows(6)
IDS, MASKS = [row[0] for row in ROWS], [row[1] for row in ROWS]


def told(path, **more):
    with pytest.raises(InputError) as caught:
        arrow.load(path, **{"budget": 64, "vocab_size": 60} | more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def columns(**named):
    return pa.table(named)


TABLES = {
    "no ids": (
        columns(words=IDS, loss_mask=MASKS),
        (
            "{file}: has no column input_ids; it has words, loss_mask;"
            " name it input_ids, tokens or token_ids"
        ),
    ),
    "no mask": (
        columns(input_ids=IDS, text=["a"] * 6),
        (
            "{file}: has no column loss_mask; it has input_ids, text; add one, or completion_mask,"
            " assistant_masks, labels or prompt_length"
        ),
    ),
    "floats": (
        columns(input_ids=pa.array(IDS, pa.list_(pa.float32())), loss_mask=MASKS),
        (
            "{file}: column input_ids is list<item: float>; lists of integers are needed;"
            " write it again, as lists of whole numbers"
        ),
    ),
    "strings": (
        columns(tokens=["a b"] * 6, loss_mask=MASKS),
        (
            "{file}: column tokens is string; lists of integers are needed;"
            " write it again, as lists of whole numbers"
        ),
    ),
    "ids that are bools": (
        columns(input_ids=pa.array(MASKS).cast(pa.list_(pa.bool_())), loss_mask=MASKS),
        (
            "{file}: column input_ids is list<item: bool>; lists of integers are needed;"
            " write it again, as lists of whole numbers"
        ),
    ),
    "a null id": (
        columns(input_ids=[*IDS[:5], [1, None]], loss_mask=[*MASKS[:5], [1, 1]]),
        "{file}: row 5: column input_ids holds a null; write it again, as lists of whole numbers",
    ),
    "a null in the mask": (
        columns(input_ids=[*IDS[:5], [1, 2]], loss_mask=[*MASKS[:5], [None, 1]]),
        "{file}: row 5: column loss_mask holds a null; write it again, as lists of whole numbers",
    ),
    "unequal lengths": (
        columns(input_ids=[*IDS[:5], [1, 2, 3]], loss_mask=[*MASKS[:5], [1, 1]]),
        "{file}: row 5: 3 input_ids but 2 loss_mask; make them as long",
    ),
    "a prompt longer than its row": (
        columns(input_ids=IDS, prompt_length=[3, 3, 99, 3, 3, 3]),
        (
            f"{{file}}: row 2: prompt_length is 99, but the row has {len(IDS[2])} tokens;"
            " give the number of the prompt's tokens"
        ),
    ),
    "a prompt of unknown length": (
        columns(input_ids=IDS, prompt_length=[3, None, 3, 3, 3, 3]),
        "{file}: row 1: column prompt_length is null; write it again, as lists of whole numbers",
    ),
    "an id behind the vocabulary": (
        columns(input_ids=[*IDS[:5], [1, 2, 60]], loss_mask=[*MASKS[:5], [1, 1, 1]]),
        (
            "{file}: row 5: id 60 at position 2; the target has ids 0 to 59;"
            " tokenize with the target's own tokenizer"
        ),
    ),
    "a negative id": (
        columns(input_ids=[*IDS[:5], [1, -100, 6]], loss_mask=[*MASKS[:5], [1, 1, 1]]),
        (
            "{file}: row 5: id -100 at position 1; the target has ids 0 to 59;"
            " tokenize with the target's own tokenizer"
        ),
    ),
    "a row over the budget": (
        columns(input_ids=[*IDS[:5], [1] * 65], loss_mask=[*MASKS[:5], [1] * 65]),
        (
            "{file}: row 5: 65 tokens; raise --token-budget above 64,"
            " or give --overlong truncate (or drop)"
        ),
    ),
    "nothing to train on": (
        columns(input_ids=[[1, 2, 3], [], [4]], loss_mask=[[1, 0, 1], [], [1]]),
        (
            "{folder}: has no row to train on (1 empty, 2 without two trained tokens in a row);"
            " look at what wrote it"
        ),
    ),
}


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("case", TABLES)
def test_wrong_rows(tmp_path, case, kind):
    table, line = TABLES[case]
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, file)
        # Parquet names the values of a list in its own way.
        line = line.replace("<item:", "<element:")
    else:
        made.write_stream(file, table, rows_a_batch=2)
    assert told(tmp_path) == line.format(file=file, folder=tmp_path)


FILES = {
    "rows.arrow": {
        b"": "is empty; copy it again",
        b"PAR1....": "is a Parquet file, not Arrow data; name it .parquet",
        b"\x1f\x8b\x08...": "is gzip data, not Arrow data; unpack it",
        b"\x28\xb5\x2f\xfd...": "is zstd data, not Arrow data; unpack it",
        b"PK\x03\x04....": "is a zip archive, not Arrow data; unpack it",
        b"version https://git-lfs.github.com/spec/v1\n": (
            "is a Git LFS pointer, not Arrow data; run `git lfs pull`"
        ),
        b"<!DOCTYPE html>": "is a web page, not Arrow data; download the file itself",
        b'{"input_ids": [1]}': "is JSON, not Arrow data; write it as Arrow or Parquet",
        b"FEA1....": "is Feather version 1, not Arrow data; write it again as version 2",
    },
    "rows.parquet": {
        b"ARROW1\0\0": "is Arrow data, not a Parquet file; name it .arrow",
        b"version https://git-lfs.github.com/spec/v1\n": (
            "is a Git LFS pointer, not Parquet data; run `git lfs pull`"
        ),
    },
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, held in FILES.items() for content in held]
)
def test_files_of_another_kind(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert told(tmp_path) == f"{tmp_path / name}: {FILES[name][content]}"


def test_files_that_are_not_whole(tmp_path):
    stream, file, parquet = (tmp_path / name for name in ("s.arrow", "f.arrow", "p.parquet"))
    made.write_stream(stream, made.table(ROWS), rows_a_batch=2)
    table = made.table(ROWS)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    pq.write_table(made.table(ROWS), parquet)
    whole = stream.read_bytes()
    for cut in (8, len(whole) // 2):
        stream.write_bytes(whole[:-cut])
        line = told(stream)
        assert line.startswith(f"{stream}: ")
        assert line.endswith("; copy it again")
        assert f"{len(whole) - cut:,} bytes" in line
    assert "is not whole Arrow data" in line
    for path in (file, parquet):
        path.write_bytes(path.read_bytes()[:-20])
        line = told(path)
        kind = "Parquet" if path == parquet else "Arrow"
        assert line.startswith(f"{path}: is not whole {kind} data ({path.stat().st_size:,} bytes)")
        assert line.endswith("; copy it again")


def test_every_cut_of_a_stream_is_noticed(tmp_path):
    path = tmp_path / "rows.arrow"
    made.write_stream(path, made.table(ROWS), rows_a_batch=3)
    whole = path.read_bytes()
    for size in range(0, len(whole), 4):
        path.write_bytes(whole[:size])
        assert told(tmp_path).endswith("copy it again"), size


def test_damaged_offsets(tmp_path):
    path = tmp_path / "rows.arrow"
    made.write_stream(path, made.table([([1] * 5, [1] * 5)] * 4, mask=pa.list_(pa.int8())))
    held = path.read_bytes()
    offsets = np.array([0, 5, 10, 15, 20], np.int32).tobytes()
    for broken, row, said in (
        ([0, 5, 99, 15, 20], 1, "5 to 99 of 20"),
        ([0, 5, 3, 15, 20], 1, "5 to 3 of 20"),
        ([-7, 5, 10, 15, 20], 0, "-7 to 5 of 20"),
    ):
        path.write_bytes(held.replace(offsets, np.array(broken, np.int32).tobytes(), 1))
        assert told(tmp_path) == (
            f"{path}: row {row}: column input_ids is damaged: its offsets say values {said};"
            " copy it again"
        )


def test_a_file_that_changes_while_it_is_in_use(tmp_path):
    path = tmp_path / "rows.arrow"
    made.write_stream(path, made.table(ROWS))
    store = arrow.load(tmp_path, budget=64)
    store.unchanged()
    before = path.stat().st_size
    beside = tmp_path / "new"
    made.write_stream(beside, made.table(ROWS * 2))
    beside.replace(path)
    with pytest.raises(InputError) as caught:
        store.unchanged()
    assert str(caught.value) == (
        f"{path}: was changed while it was in use ({before:,} bytes then,"
        f" {path.stat().st_size:,} now); start again, and write new data to a new folder"
    )
    path.unlink()
    with pytest.raises(InputError, match="cannot be looked at any more: No such file"):
        store.unchanged()


def test_what_was_not_read_at_the_start_is_looked_at_in_each_batch(tmp_path):
    made.write_stream(tmp_path / "rows.arrow", made.table([*ROWS, ([1, 60, 2], [1, 1, 1])]))
    store = arrow.load(tmp_path, budget=64, vocab_size=60, whole=False)
    assemble(store, np.arange(6), budget=256, epoch=0, number=0)
    with pytest.raises(InputError, match="row 6: id 60 at position 1; the target has ids 0 to 59"):
        assemble(store, np.array([2, 6]), budget=256, epoch=0, number=0)


def test_the_mask_token_in_a_batch_is_refused(tmp_path):
    import dataclasses

    made.write_stream(tmp_path / "rows.arrow", made.table(ROWS))
    store = arrow.load(tmp_path, budget=64, whole=False)
    store = dataclasses.replace(store, mask_token_id=int(store.row(3)[0][1]))
    with pytest.raises(InputError, match=r"row \d: holds token .* give another --mask-token-id"):
        assemble(store, np.arange(6), budget=256, epoch=0, number=0)


def test_parquet_that_does_not_fit_into_memory(tmp_path, monkeypatch):
    pq.write_table(made.table(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    tokens = sum(map(len, IDS))
    memory = tmp_path / "meminfo"
    monkeypatch.setattr(containers, "_MEMORY", memory)
    arrow.load(tmp_path, budget=64)
    memory.write_text("MemFree: 9 kB\nMemAvailable:    1 kB\n")
    arrow.load(tmp_path, budget=64)
    assert tokens * 5 < 1024
    memory.write_text("MemAvailable: 0 kB\n")
    assert told(tmp_path) == (
        f"{tmp_path / 'rows.parquet'}: takes 0.0 GiB of memory decoded, and 0.0 are free;"
        " write it as Arrow without compression, which stays on disk"
    )
