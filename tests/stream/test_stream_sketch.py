"""The sketched Token Difference Operator, streamed: however rows come, the numbers are those of the whole pattern."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stream.dense import assert_same, dense_measure, feed, functional, random_attention, traced

import attnprobe as ap
from attnprobe.functional.sketch import sign_block
from attnprobe.state import Columns, Gram, Sketch, StatisticPool

RANK = 24
MEASURES = ["intrinsic", "counting", "positional", "zipf", "unembedding"]
LEVERAGE = functional.leverage_scores(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).double())
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}


def tdo(measure="intrinsic", rank=RANK, **options):
    return ap.TDO(measure, method="sketch", rank=rank, **options).start(None, LEVERAGE)


def names(measure="intrinsic", scope=""):
    suffix = "" if measure == "intrinsic" else f"_{measure}"
    return f"participation_ratio{suffix}{scope}", f"participation_ratio{suffix}{scope}_standard_error"


def dense(attention, measure="intrinsic", rank=RANK, seed=0, **how):
    """The functional form on whole patterns, sequence by sequence."""
    found = []
    for i in range(len(attention.pattern)):
        a = attention.pattern[i]
        mu = measure
        if measure in ("zipf", "unembedding"):
            mu, _ = dense_measure(measure, a[0], attention.tokens[i], LEVERAGE)
        found.append(functional.sketched_participation_ratio(a, rank, seed, mu, **how))
    return dict(zip(names(measure), map(torch.stack, zip(*found, strict=True)), strict=True))


# -- rows in any order of chunks ---------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
@settings(max_examples=10, deadline=None)
@example(shape=(2, 481, []))  # nothing but rounding is left of Z
@given(shape=st.tuples(st.integers(1, 70), st.integers(0, 1000), st.lists(st.integers(0, 70), max_size=6)))
def test_any_chunking_equals_the_functional_form(measure, shape):
    n, seed, cuts = shape
    attention = random_attention(n, seed)
    assert_same(feed(tdo(measure), attention.chunks(cuts)), dense(attention, measure), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_one_row_at_a_time_in_the_precision_of_the_rows(dtype):
    attention = random_attention(150, 3, dtype=dtype)
    found = feed(tdo(), attention.chunks(list(range(150))))
    assert all(value.dtype == dtype for value in found.values())
    exact = random_attention(150, 3)
    exact.pattern = attention.pattern.double() / attention.pattern.double().sum(-1, keepdim=True)
    assert_same(found, dense(exact), TOLERANCE[dtype])


def test_long_prompts_are_cut_to_what_rows_can_reach():
    """More rows than have their signs made at once, then a few more."""
    attention = random_attention(600, 3, batch=1)
    found = feed(tdo(), attention.chunks([555]))
    assert_same(found, dense(attention), 1e-9)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("measure", MEASURES)
def test_halves_merge(measure, swap):
    attention = random_attention(30, 6)
    first, second = tdo(measure), tdo(measure)
    first.update(attention.rows(0, 11))
    second.update(attention.rows(11, 30))
    if swap:
        first, second = second, first
    before = second.use(Sketch, rank=RANK, seed=0).value.sums.clone()
    first.merge(second)
    assert_same(first.compute(), dense(attention, measure), 1e-9)
    assert torch.equal(second.use(Sketch, rank=RANK, seed=0).value.sums, before)


def test_a_merged_analyzer_goes_on():
    attention = random_attention(200, 2)
    parts = [tdo() for _ in range(3)]
    for part, (low, high) in zip(parts, ((0, 50), (50, 60), (60, 130)), strict=True):
        part.update(attention.rows(low, high))
    for other in parts[1:]:
        parts[0].merge(other)
        parts[0].merge(other)  # counts once
    parts[0].merge(tdo())
    parts[0].update(attention.rows(130, 200))
    assert_same(parts[0].compute(), dense(attention), 1e-9)
    empty = tdo()
    empty.merge(parts[0])
    assert_same(empty.compute(), dense(attention), 1e-9)


@pytest.mark.parametrize(
    "other",
    [
        ap.IntrinsicTDO(),
        ap.IntrinsicTDO(method="sketch", rank=RANK, seed=1),
        ap.IntrinsicTDO(method="sketch", rank=RANK + 1),
        ap.IntrinsicTDO(method="sketch", rank=RANK, scope="generation"),
    ],
    ids=["exact", "seed", "rank", "scope"],
)
def test_what_kept_other_sums_is_not_merged(other):
    mine = ap.IntrinsicTDO(method="sketch", rank=RANK)
    for one, another in ((mine, other), (other, mine)):
        with pytest.raises(ValueError, match="settings differ"):
            one.merge(another)
    with pytest.raises(TypeError, match="cannot merge Asymmetry"):
        mine.merge(ap.Asymmetry())


def test_sketches_of_other_signs_are_not_merged():
    with pytest.raises(ValueError, match="rank 16 and seed 3 into one of rank 16 and seed 0"):
        Sketch(16).merge(Sketch(16, 3))
    with pytest.raises(TypeError, match="cannot merge Columns"):
        Sketch(16).merge(Columns())


def test_reset_and_start():
    used = tdo(seed=4)
    feed(used, random_attention(20, 6).chunks([4]))
    attention = random_attention(7, 7)
    fresh = used.start()
    used.reset()
    for analyzer in (used, fresh):
        assert_same(feed(analyzer, attention.chunks([2])), dense(attention, seed=4), 1e-9)


def test_the_sketch_is_what_it_says():
    attention = random_attention(30, 1)
    sketch = Sketch(RANK, seed=2)
    with pytest.raises(ValueError, match="no rows have been seen"):
        _ = sketch.value
    rows = attention.rows(0, 20)
    for part in (rows, rows, attention.rows(20, 30)):  # the same rows count once
        sketch.update(part)
    signs = sign_block(torch.arange(30), RANK, 2, dtype=torch.float64)
    torch.testing.assert_close(sketch.value.sums, signs @ attention.pattern)
    assert torch.equal(sketch.value.sign_sum, signs.sum(-1).expand(2, 1, -1))
    assert torch.equal(sketch.value.sign_gram, (signs @ signs.T).expand(2, 1, -1, -1))


# -- batches -----------------------------------------------------------------------------------------------


def padded_rows(attention, lengths, side, low, high):
    """Slots low..high of a batch whose sequences are padded on one side."""
    width = max(lengths)
    slot = torch.arange(width)
    length = torch.tensor(lengths)[:, None]
    position = slot - (width - length) if side == "left" else torch.where(slot < length, slot, -1)
    chosen = position.clamp_min(-1)[:, low:high]
    n_key = max(1, int(position[:, :high].max()) + 1)
    index = torch.arange(len(lengths))[:, None]
    pattern = attention.pattern[index, :, chosen.clamp_min(0), :n_key].permute(0, 2, 1, 3)
    pattern = torch.where((chosen >= 0)[:, None, :, None], pattern, 0.0)
    return ap.Rows(pattern=pattern, position=chosen, first=low)


@pytest.mark.parametrize("side", ["left", "right"])
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(1, 19), max_size=4),
)
def test_a_padded_batch_equals_each_sequence_alone(side, lengths, seed, cuts):
    width = max(lengths)
    attention = random_attention(width, seed, batch=len(lengths))
    edges = sorted({0, width, *(cut for cut in cuts if cut < width)})
    chunks = [padded_rows(attention, lengths, side, *edge) for edge in itertools.pairwise(edges)]
    analyzer = tdo(trace=True)
    trace = traced(analyzer, chunks)
    found = analyzer.compute()
    for i, length in enumerate(lengths):
        alone = attention.sequence(i, length)
        assert_same({name: value[i : i + 1] for name, value in found.items()}, dense(alone), 1e-9)
        last = width - 1 if side == "left" else length - 1
        assert_same({name: value[i : i + 1, :, last] for name, value in trace.items()}, dense(alone), 1e-9)
        padding = slice(0, width - length) if side == "left" else slice(length, width)
        assert all(value[i, :, padding].isnan().all() for value in trace.values())


# -- traces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
def test_the_trace_equals_every_prefix_alone(measure):
    attention = random_attention(40, 4)
    analyzer = tdo(measure, trace=True)
    found = traced(analyzer, attention.chunks([1, 2, 9, 10, 26]))
    assert set(found) == set(names(measure))
    for n in (1, 2, 3, 9, 10, 11, 25, 26, 39, 40):
        expected = dense(attention.prefix(n), measure)
        assert_same({name: value[..., n - 1] for name, value in found.items()}, expected, 1e-9)
    assert_same(analyzer.compute(), dense(attention, measure), 1e-9)


def test_looking_at_the_trace_does_not_count_the_rows():
    attention = random_attention(15, 4)
    analyzer = tdo(trace=True)
    for rows in attention.chunks([5, 6]):
        first, second = analyzer.trace_rows(rows), analyzer.trace_rows(rows)
        assert_same(first, second, 0.0)
        analyzer.update(rows)
    assert_same(analyzer.compute(), dense(attention), 1e-9)


# -- scopes, sinks, and patterns that are not causal self-attention ----------------------------------------


@pytest.mark.parametrize("scope", ["generation", "generation-raw"])
def test_the_generation_block(scope):
    attention = random_attention(40, 3)
    attention.fields = {"prompt_length": torch.tensor([9, 9]), "shortest_prompt": 9}
    analyzer = tdo(scope=scope, trace=True)
    trace = traced(analyzer, attention.chunks([5, 9, 10, 25]))
    found = analyzer.compute()
    assert set(found) == set(names(scope=f"_{scope.replace('-', '_')}"))
    assert all(value[..., :9].isnan().all() for value in trace.values())
    block = random_attention(31)
    block.pattern = attention.pattern[..., 9:, 9:]
    if scope == "generation":
        block.pattern = block.pattern / block.pattern.sum(-1, keepdim=True)
        for n in (1, 2, 31):
            expected = dense(block.prefix(n))
            for value, wanted in zip(trace.values(), expected.values(), strict=True):
                torch.testing.assert_close(value[..., 8 + n], wanted, rtol=1e-9, atol=1e-9)
        for value, wanted in zip(found.values(), dense(block).values(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)
    half = block.pattern / block.pattern.sum(-2, keepdim=True).sqrt()
    s = half.mT @ half
    exact = s.diagonal(dim1=-2, dim2=-1).sum(-1).square() / (31 * s.square().sum((-2, -1)))
    ratio, error = found.values()
    assert ((ratio - exact).abs() < 4 * error).all()
    assert (error < 0.2 * ratio).all()


def test_a_generation_block_without_rows_has_no_number():
    attention = random_attention(8, 1)
    attention.fields = {"prompt_length": torch.tensor([5, 8]), "shortest_prompt": 5}
    found = feed(tdo(scope="generation"), attention.chunks([5, 6]))
    attention.fields = {"prompt_length": torch.tensor([8, 8]), "shortest_prompt": 8}
    empty = tdo(scope="generation", trace=True)
    for value in (*traced(empty, attention.chunks([4])).values(), *empty.compute().values()):
        assert value.isnan().all()
    for value in found.values():
        assert not value[0].isnan().any()
        assert value[1].isnan().all()


@pytest.mark.parametrize("cuts", [[], [3, 4, 20]])
def test_the_sink_is_a_key(cuts):
    n = 40
    attention = random_attention(n, 3)
    kept = torch.rand(2, 2, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.8 + 0.1
    attention.pattern = attention.pattern * kept.unsqueeze(-1)
    expected = dense(attention, rows="sink")
    analyzer = tdo(trace=True)
    trace = []
    for low, high in itertools.pairwise(sorted({0, n, *cuts})):
        attention.fields = {"sink": 1 - kept[..., low:high]}
        rows = attention.rows(low, high)
        trace.append(analyzer.trace_rows(rows))
        analyzer.update(rows)
    assert_same(analyzer.compute(), expected, 1e-9)
    assert_same({name: value[..., -1] for name, value in trace[-1].items()}, expected, 1e-9)


def test_rows_that_are_not_causal_and_come_in_any_order():
    attention = random_attention(30, 5, causal=False, batch=1)
    expected = dense(attention)
    assert_same(feed(tdo(), attention.chunks([7, 20])), expected, 1e-9)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    rows = ap.Rows(pattern=attention.pattern[:, :, order], position=order[None], causal=False)
    assert_same(feed(tdo(), [rows[:11], rows[11:]]), expected, 1e-9)


def test_cross_attention():
    pattern = random_attention(9, 2, causal=False).pattern[..., :4, :]
    rows = ap.Rows(pattern=pattern, position=torch.arange(4).expand(2, -1), causal=False, self_attention=False)
    found = feed(tdo(), [rows[:1], rows[1:4]])
    expected = functional.sketched_participation_ratio(pattern, RANK)
    assert_same(found, dict(zip(names(), expected, strict=True)), 1e-9)


# -- what is kept ------------------------------------------------------------------------------------------


def test_memory_grows_by_blocks_that_are_never_copied():
    n, rank = 700, 16
    attention = random_attention(n, batch=1, heads=1, dtype=torch.float32)
    sketch = Sketch(rank)
    addresses: list[int] = []
    for low in range(n):
        sketch.update(attention.rows(low, low + 1))
        now = [block.data_ptr() for block in sketch._blocks]
        assert now[: len(addresses)] == addresses
        addresses = now
    assert sum(block.nbytes for block in sketch._blocks) <= 4 * rank * (n + 128)
    torch.testing.assert_close(sketch.value.sums[0, 0], sign_block(torch.arange(n), rank) @ attention.pattern[0, 0])


def test_long_texts_have_few_blocks():
    sketch = Sketch(16)
    for low in (0, 5_000, 39_990):
        row = torch.zeros(1, 1, 1, low + 10, dtype=torch.float32)
        row[..., low] = 1
        sketch.update(ap.Rows.from_pattern(row))
    assert len(sketch._blocks) < 50
    assert sketch.value.sums.shape == (1, 1, 16, 40_000)
    assert sum(block.shape[-1] for block in sketch._blocks) < 1.13 * 40_000
    found = sketch.value.sums[0, 0].abs().sum(0).nonzero().flatten()
    assert found.tolist() == [0, 5_000, 39_990]


def test_no_gram_matrix_is_kept_and_sketches_of_one_kind_are_shared():
    pool = StatisticPool()
    analyzers = [
        ap.IntrinsicTDO(method="sketch", rank=RANK).start(pool),
        ap.TDO("counting", method="sketch", rank=RANK).start(pool),
        ap.TDO("counting", method="sketch", rank=RANK, seed=1).start(pool),
        ap.TDO("counting", method="sketch", rank=2 * RANK).start(pool),
    ]
    attention = random_attention(12)
    for rows in attention.chunks([4]):
        for analyzer in analyzers:
            analyzer.update(rows)
    found = [analyzer.compute() for analyzer in analyzers]
    kinds = [type(statistic) for statistic in pool._statistics.values()]
    assert Gram not in kinds
    assert (kinds.count(Sketch), kinds.count(Columns)) == (3, 1)
    assert_same(found[0], dense(attention), 1e-9)
    assert_same(found[1], dense(attention, "counting"), 1e-9)
    assert_same(found[2], dense(attention, "counting", seed=1), 1e-9)
    assert_same(found[3], dense(attention, "counting", rank=2 * RANK), 1e-9)


def test_the_estimate_is_near_the_exact_value():
    attention = random_attention(300, 8, heads=4)
    exact = feed(ap.IntrinsicTDO(lambda2=False), attention.chunks([100]))["participation_ratio"]
    found = feed(ap.IntrinsicTDO(method="sketch"), attention.chunks([100]))
    error = (found["participation_ratio"] - exact).abs()
    assert (error < 0.06 * exact).all()
    assert (error < 3.5 * found["participation_ratio_standard_error"]).all()
    assert (found["participation_ratio_standard_error"] < 0.03 * exact).all()


# -- settings and labelled results -------------------------------------------------------------------------


def test_the_second_eigenvalue_comes_with_the_exact_method_by_default():
    assert ap.IntrinsicTDO().lambda2 is True
    assert ap.IntrinsicTDO(method="sketch").lambda2 is False
    assert ap.IntrinsicTDO(method="sketch", lambda2=False).lambda2 is False
    assert "lambda2" not in feed(tdo(), random_attention(5).chunks([]))
    for options in ({"measure": "counting"}, {"scope": "generation"}):
        with pytest.raises(ValueError, match=r"lambda_2 .* method='exact'"):
            ap.TDO(method="sketch", lambda2=True, **options)


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"unknown method 'nystrom'.*exact, sketch"):
        ap.TDO(method="nystrom")
    for rank in (0, 15, 24.0, True):
        with pytest.raises(ValueError, match="rank="):
            ap.IntrinsicTDO(method="sketch", rank=rank)
    with pytest.raises(ValueError, match="seed=-1"):
        ap.IntrinsicTDO(method="sketch", seed=-1)
    with pytest.raises(ValueError, match="rank=3"):
        Sketch(3)
    with pytest.raises(ValueError, match=r"positional measure .* not causal"):
        tdo("positional").update(random_attention(5, causal=False).rows(0, 5))


def test_results_are_described():
    described = ap.TDO("counting", method="sketch", rank=RANK, seed=7).variables
    assert set(described) >= set(names("counting"))
    for attributes in described.values():
        assert attributes["method"] == f"random-sign sketch of rank {RANK}, seed 7"
        assert attributes["units"] == "1"
    assert "standard error" in described["participation_ratio_counting_standard_error"]["long_name"]
    assert set(ap.IntrinsicTDO().variables) == {"participation_ratio", "lambda2"}
    assert "method" not in ap.IntrinsicTDO().variables["lambda2"]


def test_a_probe_reports_the_standard_error_beside_the_ratio(tmp_path):
    from tiny import VOCAB, tiny_bridge

    model = tiny_bridge("llama")
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    probe = ap.Probe([ap.IntrinsicTDO(method="sketch", rank=16, trace=True), ap.TDO("counting", trace=True)])
    exact = ap.Probe([ap.IntrinsicTDO(trace=True)])
    with probe.attach(model), exact.attach(model):
        model.generate(ids, max_new_tokens=5, do_sample=False, verbose=False, stop_at_eos=False)
    found, expected = probe.results(), exact.results()
    for suffix in ("", "_trace"):
        ratio, error = (found[f"{name}{suffix}"] for name in names())
        assert ratio.dims == error.dims == expected[f"participation_ratio{suffix}"].dims
        assert (abs(ratio - expected[f"participation_ratio{suffix}"]) <= 5 * error + 1e-3).all()
        assert error.attrs["method"] == "random-sign sketch of rank 16, seed 0"
    assert (found["participation_ratio_trace"][..., -1] - found["participation_ratio"] < 0.2).all()
    assert found.sizes["step"] == 5
    found.to_netcdf(tmp_path / "found.nc")
