"""However rows come in, the numbers are those of the whole pattern."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream.dense import ANALYZERS, assert_same, feed, random_attention, traced

import attnprobe as ap
from attnprobe.state import StatisticPool

NAMES = list(ANALYZERS)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
shapes = st.tuples(st.integers(1, 70), st.integers(0, 1000), st.lists(st.integers(0, 70), max_size=12))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(shape=shapes)
def test_any_chunking_equals_the_definition_on_the_whole(name, dtype, shape):
    n, seed, cuts = shape
    kind, definition = ANALYZERS[name]
    attention = random_attention(n, seed, dtype=dtype)
    found = feed(kind(), attention.chunks(cuts))
    assert all(value.dtype == (torch.float64 if name == "LogDeterminant" else dtype) for value in found.values())
    assert_same(found, feed(kind(), attention.chunks([])), TOLERANCE[dtype])
    exact = random_attention(n, seed)
    exact.pattern, exact.v = attention.pattern.double(), attention.v.double()
    exact.pattern = exact.pattern / exact.pattern.sum(-1, keepdim=True)
    assert_same(found, definition(exact), TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_one_row_at_a_time_equals_the_definition(name):
    kind, definition = ANALYZERS[name]
    attention = random_attention(67, 5)
    assert_same(feed(kind(), attention.chunks(list(range(67)))), definition(attention), 1e-10)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(shape=st.tuples(st.integers(2, 70), st.integers(0, 1000)), data=st.data())
def test_two_merged_halves_equal_one(name, shape, data):
    n, seed = shape
    split = data.draw(st.integers(1, n - 1))
    kind, definition = ANALYZERS[name]
    attention = random_attention(n, seed)
    first, second = kind(), kind()
    first.update(attention.rows(0, split))
    second.update(attention.rows(split, n))
    if data.draw(st.booleans()):
        first, second = second, first
    first.merge(second)
    assert_same(first.compute(), definition(attention), 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_merging_into_an_analyzer_that_has_seen_nothing(name):
    kind, definition = ANALYZERS[name]
    attention = random_attention(9, 1)
    full, empty = kind(), kind()
    full.update(attention.rows(0, 9))
    empty.merge(full)
    assert_same(empty.compute(), definition(attention), 1e-10)
    full.merge(kind())
    assert_same(full.compute(), definition(attention), 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_merged_analyzer_goes_on_and_leaves_the_other_alone(name):
    kind, definition = ANALYZERS[name]
    attention = random_attention(20, 2)
    a, b = kind(), kind()
    a.update(attention.rows(0, 6))
    b.update(attention.rows(6, 11))
    before = {key: value.clone() for key, value in b.compute().items()} if name != "TransportCapacity" else None
    a.merge(b)
    a.update(attention.rows(11, 20))
    assert_same(a.compute(), definition(attention), 1e-10)
    if before is not None:
        assert_same(b.compute(), before, 0.0)


@pytest.mark.parametrize("order", ["by part", "by analyzer"])
def test_merging_analyzers_that_share_statistics_counts_every_part_once(order):
    attention = random_attention(30, 3)
    kinds = (ap.IntrinsicTDO, ap.Asymmetry, ap.MeanRoutingSplit)
    parts = []
    for low, high in ((0, 10), (10, 17), (17, 30)):
        pool = StatisticPool()
        part = [kind().start(pool) for kind in kinds]
        rows = attention.rows(low, high)
        for analyzer in part:
            analyzer.update(rows)
        parts.append(part)
    whole = parts[0]
    if order == "by part":
        for part in parts[1:]:
            for analyzer, other in zip(whole, part, strict=True):
                analyzer.merge(other)
    else:
        for i, analyzer in enumerate(whole):
            for part in parts[1:]:
                analyzer.merge(part[i])
    for kind, analyzer in zip(kinds, whole, strict=True):
        assert_same(analyzer.compute(), ANALYZERS[kind.__name__][1](attention), 1e-10)


def test_merge_refuses_another_kind():
    with pytest.raises(TypeError, match="cannot merge Asymmetry into IntrinsicTDO"):
        ap.IntrinsicTDO().merge(ap.Asymmetry())


@pytest.mark.parametrize("name", NAMES)
def test_reset_forgets_everything_and_keeps_the_settings(name):
    kind, definition = ANALYZERS[name]
    analyzer = kind(trace=True) if name not in ("SelfAttention", "PreviousTokenAttention") else kind()
    feed(analyzer, random_attention(30, 1).chunks([7]))
    analyzer.reset()
    attention = random_attention(12, 2)
    assert_same(feed(analyzer, attention.chunks([3, 4])), definition(attention), 1e-10)
    assert analyzer.trace == (name not in ("SelfAttention", "PreviousTokenAttention"))


@pytest.mark.parametrize("name", NAMES)
def test_start_gives_a_fresh_analyzer_and_leaves_the_first_alone(name):
    kind, definition = ANALYZERS[name]
    attention, other = random_attention(11, 1), random_attention(15, 2)
    used = kind()
    used.update(attention.rows(0, 11))
    assert_same(feed(used.start(), other.chunks([4])), definition(other), 1e-10)
    assert_same(used.compute(), definition(attention), 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_seen_is_an_error_not_a_number(name):
    with pytest.raises((ValueError, KeyError)):
        ANALYZERS[name][0]().compute()


# -- traces ------------------------------------------------------------------------------------------------

TRACED = [
    *("IntrinsicTDO", "MeanRoutingSplit", "SpectralEntropyBound", "TransportCapacity", "Asymmetry"),
    *("LaplacianEigenvalues", "LogDeterminant"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", TRACED)
@settings(max_examples=6, deadline=None)
@given(shape=st.tuples(st.integers(1, 24), st.integers(0, 1000), st.lists(st.integers(0, 24), max_size=6)))
def test_the_trace_equals_the_definition_on_every_prefix(name, dtype, shape):
    n, seed, cuts = shape
    kind, definition = ANALYZERS[name]
    attention = random_attention(n, seed, batch=1, heads=2, dtype=dtype)
    found = traced(kind(trace=True), attention.chunks(cuts))
    exact = random_attention(n, seed, batch=1, heads=2)
    exact.pattern, exact.v = attention.pattern.double(), attention.v.double()
    exact.pattern = exact.pattern / exact.pattern.sum(-1, keepdim=True)
    for t in range(1, n + 1):
        expected = definition(exact.prefix(t))
        assert_same(
            {key: value[..., t - 1] for key, value in found.items()},
            {key: expected[key] for key in found},
            1e-10 if dtype == torch.float64 else 2e-5,
        )
    missing = {"IntrinsicTDO": {"lambda2"}, "MeanRoutingSplit": {"gain_bound"}}.get(name, set())
    assert set(definition(exact)) - set(found) == missing


@pytest.mark.parametrize("name", TRACED)
def test_the_trace_of_long_input_crosses_gram_blocks(name):
    kind, definition = ANALYZERS[name]
    attention = random_attention(140, 9, batch=1)
    found = traced(kind(trace=True), attention.chunks([50, 63, 64, 65, 66, 127, 128, 130]))
    for t in (1, 2, 50, 63, 64, 65, 66, 127, 128, 129, 130, 140):
        expected = definition(attention.prefix(t))
        assert_same(
            {key: value[..., t - 1] for key, value in found.items()}, {key: expected[key] for key in found}, 1e-10
        )


def test_looking_at_the_trace_does_not_count_the_rows():
    for name in TRACED:
        kind, definition = ANALYZERS[name]
        attention = random_attention(15, 4)
        analyzer = kind(trace=True)
        for rows in attention.chunks([5, 6]):
            analyzer.trace_rows(rows)
            analyzer.trace_rows(rows)
            analyzer.update(rows)
        assert_same(analyzer.compute(), definition(attention), 1e-10)


def test_lookback_traces_are_the_weights_of_the_rows():
    attention = random_attention(9, 4)
    found = traced(ap.SelfAttention(trace=True), attention.chunks([2, 3]))["self_attention"]
    torch.testing.assert_close(found, attention.pattern.diagonal(dim1=-2, dim2=-1))
    found = traced(ap.PreviousTokenAttention(trace=True), attention.chunks([2, 3]))["previous_token_attention"]
    torch.testing.assert_close(found[..., 1:], attention.pattern.diagonal(-1, dim1=-2, dim2=-1))
    assert (found[..., 0] == 0).all()


# -- batches -----------------------------------------------------------------------------------------------


def ragged_rows(attention, lengths, slots, low, high):
    """Rows low..high of slots; `slots` [batch, n_slots] is True where a real token stands. Padding holds NaN."""
    batch = len(lengths)
    position = torch.where(slots, slots.cumsum(1) - 1, -1)
    width = max(1, int(position[:, :high].max()) + 1)
    chosen = position[:, low:high]
    index = torch.arange(batch)[:, None]
    real = chosen >= 0
    pattern = attention.pattern[index, :, chosen.clamp_min(0), :width].permute(0, 2, 1, 3)
    pattern = torch.where(real[:, None, :, None], pattern, 0.0)
    z = torch.where(real[..., None, None], attention.z[index, chosen.clamp_min(0)], torch.nan)
    v = torch.where(real[..., None, None], attention.v[index, chosen.clamp_min(0)], torch.nan)
    there = torch.arange(width) <= position[:, :high].amax(1, keepdim=True)
    tokens = torch.where(there, attention.tokens[:, :width], -1)
    return ap.Rows(pattern=pattern, position=chosen, first=low, z=z, v=v, key_position=chosen, tokens=tokens)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_ragged_batch_equals_each_sequence_alone(name, data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    n_slots = max(lengths) + data.draw(st.integers(0, 3))
    slots = torch.zeros(len(lengths), n_slots, dtype=torch.bool)
    for row, length in zip(slots, lengths, strict=True):  # left, right or anywhere
        row[data.draw(st.lists(st.integers(0, n_slots - 1), min_size=length, max_size=length, unique=True))] = True
    attention = random_attention(max(lengths), data.draw(st.integers(0, 99)), batch=len(lengths))
    cuts = sorted({0, n_slots, *data.draw(st.lists(st.integers(0, n_slots), max_size=4))})
    kind, definition = ANALYZERS[name]
    edges = itertools.pairwise(cuts)
    found = feed(kind(), [ragged_rows(attention, lengths, slots, *edge) for edge in edges])
    for i, length in enumerate(lengths):
        one = {key: value[i : i + 1] for key, value in found.items()}
        assert_same(one, definition(attention.sequence(i, length)), 1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", TRACED)
def test_a_padded_batch_has_the_traces_of_its_sequences(name, side):
    lengths = [4, 9, 6]
    attention = random_attention(9, 8, batch=3)
    slots = torch.zeros(3, 9, dtype=torch.bool)
    for row, length in zip(slots, lengths, strict=True):
        row[slice(9 - length, None) if side == "left" else slice(length)] = True
    kind, definition = ANALYZERS[name]
    chunks = [ragged_rows(attention, lengths, slots, *edge) for edge in ((0, 4), (4, 5), (5, 9))]
    found = traced(kind(trace=True), chunks)
    for i, length in enumerate(lengths):
        offset = 9 - length if side == "left" else 0
        for t in range(1, length + 1):
            expected = definition(attention.sequence(i, t))
            at = offset + t - 1
            assert_same(
                {key: value[i : i + 1, :, at] for key, value in found.items()},
                {key: expected[key] for key in found},
                1e-10,
            )
