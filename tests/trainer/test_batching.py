"""Plans are pure, complete and within the budget; assembly equals the slow way."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from trainer.data.arrow import TokenStore
from trainer.data.batching import PACKED, PADDED, Plan, Position, Schedule, assemble

LENGTHS = np.random.default_rng(5).integers(2, 65, 300)


def made_store(lengths=LENGTHS):
    random = np.random.default_rng(1)
    total = int(lengths.sum())
    return TokenStore.in_memory(
        random.integers(0, 99, total, dtype=np.int32),
        random.integers(0, 2, total).astype(bool),
        np.concatenate([[0], np.cumsum(lengths)]),
    )


LAYOUTS = pytest.mark.parametrize("layout", [PADDED, PACKED])


def plan(seed=0, budget=64, window=4096, layout=PADDED):
    return Plan(LENGTHS, budget, seed, window=window, layout=layout)


def slots(rows, layout):
    lengths = LENGTHS[rows]
    return len(rows) * lengths.max() if layout == PADDED else lengths.sum()


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def slow_assemble(store, rows, budget):
    """Token by token, as a first version would."""
    ids, trainable, document, position, starts = [], [], [], [], [0]
    for d, row in enumerate(rows):
        for p, (token, trained) in enumerate(zip(*store.row(row), strict=True)):
            ids.append(int(token))
            trainable.append(bool(trained))
            document.append(d)
            position.append(p)
        starts.append(len(ids))
    rest = budget - len(ids)
    return (
        ids + [0] * rest, trainable + [False] * rest, document + [-1] * rest, position + [0] * rest,
        starts,
    )  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize("window", [4096, 50])
def test_every_row_stands_in_one_batch_within_the_budget(window, layout):
    made = plan(window=window, layout=layout)
    batches = made.batches(3)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(LENGTHS)))
    assert all(slots(rows, layout) <= 64 for rows in batches)
    assert made.count(3) == plan(window=window, layout=layout).count(3) == len(batches)


@pytest.mark.parametrize(("layout", "least"), [(PADDED, 0.95), (PACKED, 1.0)])
def test_rows_of_a_padded_batch_are_of_like_length(layout, least):
    used = sum(LENGTHS[rows].sum() for rows in plan(layout=layout).batches(0))
    paid = sum(slots(rows, layout) for rows in plan(layout=layout).batches(0))
    assert used / paid >= least


def slow_best_fit(lengths, budget):
    """Longest first, each where least room is left; by looking at every bin."""
    bins = []
    for place in np.argsort(-lengths, kind="stable").tolist():
        rest = [budget - sum(lengths[each] for each in held) for held in bins]
        fits = [(room, number) for number, room in enumerate(rest) if room >= lengths[place]]
        if fits:
            bins[min(fits)[1]].append(place)
        else:
            bins.append([place])
    return bins


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_packing_is_best_fit(lengths):
    lengths = np.array(lengths)
    batches = Plan(lengths, 40, 0, layout=PACKED).batches(0)
    # Bins with the same room left are alike; so are the lengths in them.
    found = sorted(sorted(lengths[rows].tolist()) for rows in batches)
    wanted = [sorted(lengths[held].tolist()) for held in slow_best_fit(lengths, 40)]
    assert len(found) == len(wanted)
    assert sum(map(sum, found)) == lengths.sum()
    assert sorted(map(sum, found)) == sorted(map(sum, wanted))


def test_packed_batches_are_full_on_lengths_as_they_come():
    random = np.random.default_rng(2)
    lengths = np.clip(random.lognormal(np.log(899), 0.68, 20_000).astype(int), 16, 4096)
    packed = Plan(lengths, 8192, 0, layout=PACKED).batches(0)
    assert lengths.sum() / (len(packed) * 8192) >= 0.995
    assert len(packed) < 0.95 * len(Plan(lengths, 8192, 0).batches(0))


@LAYOUTS
def test_a_plan_depends_on_seed_and_epoch_alone(layout):
    np.random.seed(1)  # noqa: NPY002 - to show that this does not matter
    first = plan(layout=layout).batches(2)
    plan(layout=layout).batches(0)
    np.random.seed(2)  # noqa: NPY002
    assert same(first, plan(layout=layout).batches(2))
    assert not same(first, plan(layout=layout).batches(1))
    assert not same(first, plan(seed=1, layout=layout).batches(2))


def test_batches_are_not_in_the_order_of_lengths():
    longest = [int(LENGTHS[rows].max()) for rows in plan().batches(0)]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)


@LAYOUTS
@pytest.mark.parametrize("number", range(5))
def test_assembly_equals_the_slow_way(number, layout):
    store = made_store()
    rows = plan(layout=layout).batches(0)[number]
    batch = assemble(store, rows, budget=64, epoch=0, number=number)
    ids, trainable, document, position, starts = slow_assemble(store, rows, 64)
    assert batch.ids_T.tolist() == ids
    assert batch.trainable_T.tolist() == trainable
    assert batch.document_T.tolist() == document
    assert batch.position_T.tolist() == position
    assert batch.starts_D1.tolist() == starts
    assert (batch.tokens, batch.number) == (starts[-1], number)
    dtypes = [
        batch.ids_T.dtype,
        batch.document_T.dtype,
        batch.position_T.dtype,
        batch.starts_D1.dtype,
    ]
    assert dtypes == [np.int64, np.int32, np.int64, np.int32]


def schedule(layout=PADDED, **more):
    return Schedule(plan(layout=layout), **{"epochs": 3, "pairs": 1, "accumulation": 1} | more)


def flat(steps):
    return [(at, tuple(map(tuple, batches))) for at, batches in steps]


@LAYOUTS
def test_two_pairs_take_what_one_pair_accumulates(layout):
    two, one = schedule(layout, pairs=2), schedule(layout, accumulation=2)
    assert flat(two.steps(Position())) == flat(one.steps(Position()))


@LAYOUTS
def test_a_schedule_goes_on_from_any_step(layout):
    steps = schedule(layout, accumulation=7)
    whole = flat(steps.steps(Position()))
    assert len(whole) == steps.total(Position())
    for done in range(len(whole)):
        start = whole[done][0]
        assert flat(steps.steps(start)) == whole[done:]
        assert steps.total(start) == len(whole)


def test_the_position_after_a_step_starts_the_next_one():
    steps = schedule(accumulation=7)
    whole = list(steps.steps(Position()))
    for (at, _), (following, _) in itertools.pairwise(whole):
        resumed = next(steps.steps(steps.after(at)))
        assert resumed[0] == following


def test_an_incomplete_step_is_dropped():
    batches = len(plan().batches(0))
    width = batches // 2 + 1
    steps = list(schedule(epochs=1, accumulation=width).steps(Position()))
    assert len(steps) == 1
    assert schedule(epochs=1, pairs=batches + 1).total(Position()) == 0


def test_numbers_count_every_batch_that_is_used_once():
    numbers = [at.number for at, _ in schedule(pairs=2, accumulation=2).steps(Position())]
    assert numbers == list(range(0, 4 * len(numbers), 4))


def test_steps_end_the_run():
    assert schedule(steps=5).total(Position()) == 5
    assert len(list(schedule(steps=5).steps(Position()))) == 5
    assert schedule(steps=10**6).total(Position()) == schedule().total(Position())


@LAYOUTS
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 3, 1), (4, 2, 8)])
def test_other_pairs_go_on_with_the_very_next_batch(layout, worlds):
    position, used = Position(), []
    for number, pairs in enumerate(worlds):
        steps = schedule(layout, epochs=1, pairs=pairs)
        last = number == len(worlds) - 1
        for at, batches in itertools.islice(steps.steps(position), None if last else 5):
            used += [tuple(rows) for rows in batches]
            position = steps.after(at)
    planned = [tuple(rows) for rows in plan(layout=layout).batches(0)]
    assert used == planned[: len(used)]
    assert len(planned) - len(used) < worlds[-1]
