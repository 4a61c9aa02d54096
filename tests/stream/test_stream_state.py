"""Rows and the statistics they feed, one by one; sharing, growth and precision."""

import itertools

import pytest
import torch
from stream.dense import ANALYZERS, Attention, assert_same, feed, functional, random_attention

import attnprobe as ap
from attnprobe.state import (
    Columns,
    Diagonal,
    Gram,
    OutputMoments,
    PrefixMass,
    Reciprocity,
    Statistic,
    StatisticPool,
    ValueNorms,
)

FIVE = (ap.IntrinsicTDO, ap.MeanRoutingSplit, ap.SpectralEntropyBound, ap.TransportCapacity, ap.Asymmetry)


# -- rows --------------------------------------------------------------------------------------------------


def test_rows_from_a_pattern_know_their_places():
    rows = random_attention(6).rows(2, 5)
    assert rows.first == 2
    assert rows.position.tolist() == [[2, 3, 4]] * 2
    assert rows.count.tolist() == [3, 3]
    assert rows.n_query == 3
    whole = ap.Rows.from_pattern(torch.eye(4)[None, None, 1:])
    assert whole.position.tolist() == [[1, 2, 3]]  # the last keys by default


def test_a_slice_of_rows_is_the_rows_of_the_slice():
    attention = random_attention(9)
    part, expected = attention.rows(2, 9)[1:4], attention.rows(3, 6)
    assert part.first == expected.first == 3
    for name in ("pattern", "position", "z", "v", "key_position", "tokens"):
        assert torch.equal(getattr(part, name), getattr(expected, name)), name
    with pytest.raises(ValueError, match="step of 1"):
        attention.rows(0, 9)[::2]


def test_attention_to_a_position_and_to_oneself():
    attention = random_attention(5, batch=1)
    rows = attention.rows(1, 5)
    torch.testing.assert_close(rows.diagonal(), attention.pattern.diagonal(dim1=-2, dim2=-1)[..., 1:])
    found = rows.attention_to(torch.tensor([[0, -1, 2, 1]]))
    a = attention.pattern[0]
    torch.testing.assert_close(found[0], torch.stack([a[:, 1, 0], 0 * a[:, 0, 0], a[:, 3, 2], a[:, 4, 1]], -1))


def test_the_sink_is_an_extra_first_key():
    attention = random_attention(3)
    sink = torch.full((2, 2, 3), 0.25, dtype=torch.float64)
    attention.fields = {"sink": sink}
    attention.pattern = attention.pattern * 0.75
    rows = attention.rows(0, 3)
    assert torch.equal(rows.keys[..., 0], sink)
    torch.testing.assert_close(rows.keys.sum(-1), torch.ones_like(sink))
    assert torch.equal(rows[1:2].sink, sink[..., 1:2])


# -- statistics --------------------------------------------------------------------------------------------


def statistics(attention):
    """Each statistic as a function of one instance, and its dense value."""
    a, v = attention.pattern, attention.v
    z = attention.z.transpose(1, 2)
    centered = z - z.mean(2, keepdim=True)
    return {
        Columns: (lambda s: (s.mass, s.energy, s.count), (a.sum(2), a.square().sum(2), torch.tensor([a.shape[2]] * 2))),
        Diagonal: (lambda s: (s.weights,), (a.diagonal(dim1=-2, dim2=-1),)),
        Gram: (lambda s: (s.matrix.dense(),), (a.mT @ a,)),
        OutputMoments: (
            lambda s: (s.count, s.mean, s.covariance),
            (torch.tensor([a.shape[2]] * 2), z.mean(2), centered.mT @ centered / a.shape[2]),
        ),
        Reciprocity: (lambda s: (s.total,), ((a * a.mT).sum((-2, -1)),)),
        ValueNorms: (
            lambda s: (s.by_head(a.shape[3]),),
            (v.square().sum(-1).transpose(1, 2).repeat_interleave(a.shape[1] // v.shape[2], 1),),
        ),
        PrefixMass: (
            lambda s: (s.inside,),
            (torch.stack([a[..., :t, :t].sum((-2, -1)) for t in range(1, a.shape[3] + 1)], -1),),
        ),
    }


KINDS = [Columns, Diagonal, Gram, OutputMoments, Reciprocity, ValueNorms, PrefixMass]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 5], list(range(12))])
def test_statistics_equal_their_definitions_however_rows_come(kind, cuts):
    attention = random_attention(12, 3, heads=4, kv_heads=2, causal=kind is not PrefixMass)
    read, expected = statistics(attention)[kind]
    statistic = kind()
    for rows in attention.chunks(cuts):
        statistic.update(rows)
    for found, wanted in zip(read(statistic), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swap", [False, True])
def test_statistics_merge(kind, swap):
    attention = random_attention(12, 3, heads=4, kv_heads=2, causal=kind is not PrefixMass)
    read, expected = statistics(attention)[kind]
    first, second = kind(), kind()
    first.update(attention.rows(0, 5))
    second.update(attention.rows(5, 12))
    if swap:
        first, second = second, first
    first.merge(second)
    for found, wanted in zip(read(first), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_count_once_and_a_merge_with_itself_not_at_all(kind):
    attention = random_attention(6, heads=4, kv_heads=2)
    read, expected = statistics(attention)[kind]
    statistic = kind()
    rows = attention.rows(0, 6)
    statistic.update(rows)
    statistic.update(rows)
    for found, wanted in zip(read(statistic), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    with pytest.raises(TypeError, match="cannot merge"):
        statistic.merge(Statistic())


def test_value_norms_map_query_heads_to_the_heads_they_read():
    attention = random_attention(7, heads=6, kv_heads=3)
    norms = attention.v.square().sum(-1).transpose(1, 2)
    statistic = ValueNorms()
    statistic.update(attention.rows(0, 7))
    torch.testing.assert_close(statistic.by_head(7), norms[:, [0, 0, 1, 1, 2, 2]])
    torch.testing.assert_close(statistic.by_head(4), norms[:, [0, 0, 1, 1, 2, 2], :4])
    # only heads 1, 2 and 5 are watched: the pattern has three heads, the values all of theirs
    part = Attention(attention.pattern[:, [1, 2, 5]], attention.v, attention.tokens)
    part.fields = {"kv_head": torch.tensor([0, 1, 2])}
    chosen = ValueNorms()
    for low, high in ((0, 3), (3, 7)):
        rows = ap.Rows.from_pattern(part.pattern[..., low:high, :high], start=low, v=part.v[:, low:high], **part.fields)
        chosen.update(rows)
    torch.testing.assert_close(chosen.by_head(7), norms[:, [0, 1, 2]])


def test_watched_heads_with_shared_values_have_the_right_split():
    attention = random_attention(9, 4, heads=6, kv_heads=2)
    whole = functional.routing_split(attention.pattern, attention.v_by_head)
    heads = [1, 3, 5]
    split = ap.MeanRoutingSplit()
    rows = attention.rows(0, 9)
    split.update(
        ap.Rows.from_pattern(rows.pattern[:, heads], z=rows.z[:, :, heads], v=rows.v, kv_head=torch.tensor([0, 1, 1]))
    )
    found = split.compute()
    torch.testing.assert_close(found["value_energy"], whole.value_energy[:, heads], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found["gain"], whole.gain[:, heads], rtol=1e-9, atol=1e-10)


def test_shared_statistics_are_updated_once_however_many_analyzers_need_them(monkeypatch):
    counts = {}

    def counting(kind, original):
        def update(self, rows):
            counts[kind.__name__] = counts.get(kind.__name__, 0) + 1
            original(self, rows)

        return update

    for kind in KINDS:
        monkeypatch.setattr(kind, "_update", counting(kind, kind._update))
    pool = StatisticPool()
    analyzers = [kind().start(pool) for kind in (*FIVE, *FIVE)]
    chunks = random_attention(10).chunks([2, 3, 7])
    for rows in chunks:
        for analyzer in analyzers:
            analyzer.update(rows)
    shared = {"Columns", "Gram", "OutputMoments", "Reciprocity", "ValueNorms"}
    assert counts == dict.fromkeys(shared, len(chunks))
    for kind, analyzer in zip((*FIVE, *FIVE), analyzers, strict=True):
        assert_same(analyzer.compute(), ANALYZERS[kind.__name__][1](random_attention(10)), 1e-9)


def test_the_generation_block_has_statistics_of_its_own():
    attention = random_attention(9)
    attention.fields = {"prompt_length": torch.tensor([4, 4]), "shortest_prompt": 4}
    pool = StatisticPool()
    whole, part = ap.IntrinsicTDO().start(pool), ap.IntrinsicTDO(scope="generation").start(pool)
    for rows in attention.chunks([4, 6]):
        whole.update(rows)
        part.update(rows)
    torch.testing.assert_close(
        whole.compute()["participation_ratio"], functional.participation_ratio(attention.pattern)
    )
    block = attention.pattern[..., 4:, 4:]
    torch.testing.assert_close(
        part.compute()["participation_ratio_generation"], functional.participation_ratio(block, rows="renormalize")
    )


# -- patterns that are not causal self-attention -----------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 33])
def test_bidirectional_capacity_and_direction(n):
    attention = random_attention(n, 7, causal=False)
    capacity = ap.TransportCapacity(landscape=True)
    capacity.update(attention.rows(0, n))
    found = capacity.compute()
    landscape = found.pop("landscape")
    assert_same(found, ANALYZERS["TransportCapacity"][1](attention), 1e-10)
    torch.testing.assert_close(landscape[..., : n - 1], functional.prefix_landscape(attention.pattern))
    direction = ap.Asymmetry()
    direction.update(attention.rows(0, n))
    assert_same(direction.compute(), ANALYZERS["Asymmetry"][1](attention), 1e-10)


def test_bidirectional_capacity_streams():
    attention = random_attention(20, 7, causal=False)
    found = feed(ap.TransportCapacity(), attention.chunks([1, 5, 13]))
    assert_same(found, ANALYZERS["TransportCapacity"][1](attention), 1e-10)


def test_bidirectional_direction_must_come_whole():
    attention = random_attention(20, 7, causal=False)
    with pytest.raises(ValueError, match="one piece"):
        ap.Asymmetry().update(attention.rows(0, 10))


def test_bidirectional_rows_in_any_order_are_put_in_theirs():
    attention = random_attention(8, 7, causal=False, batch=1)
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    rows = ap.Rows(pattern=attention.pattern[:, :, order], position=order[None], causal=False)
    direction = ap.Asymmetry()
    direction.update(rows)
    assert_same(direction.compute(), ANALYZERS["Asymmetry"][1](attention), 1e-10)


def cross_rows():
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(1, 2, 4, 6, generator=generator, dtype=torch.float64).softmax(-1)
    v = torch.randn(1, 6, 2, 3, generator=generator, dtype=torch.float64)
    return ap.Rows(
        pattern=pattern,
        position=torch.arange(4)[None],
        causal=False,
        self_attention=False,
        z=(pattern @ v.transpose(1, 2)).transpose(1, 2),
        v=v,
        key_position=torch.arange(6)[None],
    )


@pytest.mark.parametrize("kind", [ap.TransportCapacity, ap.Asymmetry, ap.SelfAttention, ap.PreviousTokenAttention])
def test_cross_attention_is_refused_where_queries_must_be_keys(kind):
    with pytest.raises(ValueError, match="cross-attention"):
        kind().update(cross_rows())


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 2, 4)])
def test_cross_attention_is_measured_where_it_can_be(cuts):
    rows = cross_rows()
    tdo, split, bound = ap.IntrinsicTDO(), ap.MeanRoutingSplit(), ap.SpectralEntropyBound()
    for low, high in itertools.pairwise(cuts):
        part = rows[low:high]
        for analyzer in (tdo, split, bound):
            analyzer.update(part)
    v = rows.v.transpose(1, 2)
    expected = functional.routing_split(rows.pattern, v)
    close = {"rtol": 1e-9, "atol": 1e-10}
    ratio = functional.participation_ratio(rows.pattern)
    torch.testing.assert_close(tdo.compute()["participation_ratio"], ratio, **close)
    torch.testing.assert_close(split.compute()["value_energy"], expected.value_energy, **close)
    torch.testing.assert_close(split.compute()["gain_bound"], expected.bound, **close)
    entropy = functional.entropy_bound(rows.pattern, v).entropy
    torch.testing.assert_close(bound.compute()["entropy"], entropy, **close)


# -- growth and precision ----------------------------------------------------------------------------------


def storages(thing, seen=None):
    """Every tensor storage reachable from an object."""
    seen = {} if seen is None else seen
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes() // thing.element_size()
    elif isinstance(thing, dict):
        for value in thing.values():
            storages(value, seen)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for value in thing:
            storages(value, seen)
    elif hasattr(thing, "__dict__") and not isinstance(thing, type):
        storages(vars(thing), seen)
    return seen


@pytest.mark.parametrize("name", list(ANALYZERS))
@pytest.mark.parametrize("trace", [False, True])
def test_only_the_gram_matrix_grows_with_the_square(name, trace):
    n, heads, d = 256, 2, 3
    attention = random_attention(n, batch=1, heads=heads, d=d)
    kind = ANALYZERS[name][0]
    analyzer = kind(trace=trace) if name != "MeanRoutingSplit" else kind(trace=trace, bound=False)
    for rows in attention.chunks(list(range(0, n, 32))):
        if trace:
            analyzer.trace_rows(rows)
        analyzer.update(rows)
        del rows
    kept = sum(storages(analyzer).values())
    if name == "IntrinsicTDO":
        assert kept <= heads * (0.75 * n * n + 8 * n)
    else:
        assert kept <= heads * (4 * n + 4 * d * d + 8)


@pytest.mark.parametrize("cuts", [[], list(range(100, 1200, 100)), list(range(1100, 1200, 7))])
def test_long_input_in_float32_against_float64(cuts):
    n = 1200
    attention = random_attention(n, 5, batch=1, heads=2, dtype=torch.float32, scale=3.0)
    exact = random_attention(n, 5, batch=1, heads=2, scale=3.0)
    exact.pattern, exact.v = attention.pattern.double(), attention.v.double()
    exact.pattern = exact.pattern / exact.pattern.sum(-1, keepdim=True)
    pool = StatisticPool()
    analyzers = [kind().start(pool) for kind in FIVE]
    for rows in attention.chunks(cuts):
        for analyzer in analyzers:
            analyzer.update(rows)
    for kind, analyzer in zip(FIVE, analyzers, strict=True):
        assert_same(analyzer.compute(), ANALYZERS[kind.__name__][1](exact), 1e-5)


def test_half_as_many_digits_do_not_drown_a_large_mean():
    """Outputs with a mean a thousand times their spread: the moments are merged, not differenced."""
    attention = random_attention(300, 5, batch=1, dtype=torch.float32)
    attention.v = attention.v + 1000
    exact = Attention(attention.pattern.double(), attention.v.double(), attention.tokens)
    found = feed(ap.MeanRoutingSplit(bound=False), attention.chunks(list(range(0, 300, 8))))
    z = exact.z.transpose(1, 2)
    routed = (z - z.mean(2, keepdim=True)).square().sum(-1).mean(-1)
    torch.testing.assert_close(found["routed_energy"].double(), routed, rtol=1e-3, atol=0)


# -- analyzers of one's own --------------------------------------------------------------------------------


class RowEntropy(ap.Analyzer):
    """Mean entropy of the rows, in a dozen lines."""

    def update(self, rows):
        entropy = -torch.xlogy(rows.pattern, rows.pattern).sum(-1)
        self.accumulate(entropy=entropy.sum(-1), rows=rows.count[:, None])

    def compute(self):
        return {"row_entropy": self.total["entropy"] / self.total["rows"]}


class Received(ap.Analyzer):
    """What every key received, as a vector over positions, and the largest of it."""

    def update(self, rows):
        self.accumulate(received=rows.pattern.sum(-2))

    def compute(self):
        received = self.total["received"]
        return {"received": received, "most_received": received.amax(-1)}


def row_entropy(a):
    return {"row_entropy": -torch.xlogy(a.pattern, a.pattern).sum(-1).mean(-1)}


def received(a):
    return {"received": a.pattern.sum(-2), "most_received": a.pattern.sum(-2).amax(-1)}


@pytest.mark.parametrize(("kind", "definition"), [(RowEntropy, row_entropy), (Received, received)])
@pytest.mark.parametrize("cuts", [[], [1, 2], list(range(14))])
def test_a_custom_analyzer_streams_merges_resets_and_traces(kind, definition, cuts):
    attention = random_attention(14, 3)
    analyzer = kind(trace=True)
    chunks = attention.chunks(cuts)
    pieces = []
    for rows in chunks:
        pieces.append(analyzer.trace_rows(rows))
        analyzer.update(rows)
    assert_same(analyzer.compute(), definition(attention), 1e-12)
    trace = {name: torch.cat([piece[name] for piece in pieces], -1) for name in pieces[0]}
    assert "received" not in trace  # a vector a step is not a trace
    for t in range(1, 15):
        expected = definition(attention.prefix(t))
        assert_same({name: value[..., t - 1] for name, value in trace.items()}, {n: expected[n] for n in trace}, 1e-12)
    first, second = kind(), kind()
    first.update(attention.rows(0, 6))
    second.update(attention.rows(6, 14))
    first.merge(second)
    assert_same(first.compute(), definition(attention), 1e-12)
    first.reset()
    assert_same(feed(first, attention.prefix(4).chunks([2])), definition(attention.prefix(4)), 1e-12)


def test_an_analyzer_without_its_methods_says_which():
    with pytest.raises(NotImplementedError, match="Analyzer must define update"):
        ap.Analyzer().update(random_attention(2).rows(0, 2))
    with pytest.raises(NotImplementedError, match="Analyzer must define compute"):
        ap.Analyzer().compute()


@pytest.mark.parametrize(
    ("kind", "missing"),
    [(ap.MeanRoutingSplit, "hook_z"), (ap.SpectralEntropyBound, "hook_z")],
)
def test_rows_without_what_an_analyzer_needs(kind, missing):
    with pytest.raises(ValueError, match=missing):
        kind().update(ap.Rows.from_pattern(torch.eye(3)[None, None]))
    rows = random_attention(3).rows(0, 3)
    with pytest.raises(ValueError, match="hook_v"):
        ap.MeanRoutingSplit().update(ap.Rows.from_pattern(rows.pattern, z=rows.z))


def test_the_landscape_is_that_of_the_whole():
    attention = random_attention(21, 4)
    found = feed(ap.TransportCapacity(landscape=True), attention.chunks([4, 9]))["landscape"]
    torch.testing.assert_close(found[..., :20], functional.prefix_landscape(attention.pattern), rtol=1e-10, atol=1e-10)
