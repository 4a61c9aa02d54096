"""The Token Difference Operator in every measure and scope, against dense definitions."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream.dense import (
    dense_measure,
    dense_ratio,
    dense_second,
    dense_tdo,
    feed,
    functional,
    random_attention,
    traced,
)

import attnprobe as ap

MEASURES = ["intrinsic", "counting", "positional", "zipf", "unembedding"]
LEVERAGE = functional.leverage_scores(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).double())


def tdo(measure, **settings):
    return ap.TDO(measure, **settings).start(None, LEVERAGE)


def suffix(measure):
    return "" if measure == "intrinsic" else f"_{measure}"


def dense(measure, a, tokens):
    mu, pi = dense_measure(measure, a, tokens, LEVERAGE.to(a))
    return dense_tdo(a, mu, pi)


@pytest.mark.parametrize("measure", MEASURES)
@settings(max_examples=12, deadline=None)
@given(shape=st.tuples(st.integers(1, 70), st.integers(0, 1000), st.lists(st.integers(0, 70), max_size=6)))
def test_every_measure_equals_its_definition(measure, shape):
    n, seed, cuts = shape
    attention = random_attention(n, seed)
    found = feed(tdo(measure), attention.chunks(cuts))
    assert set(found) == {f"participation_ratio{suffix(measure)}", f"lambda2{suffix(measure)}"}
    for i in range(2):
        for h in range(2):
            s = dense(measure, attention.pattern[i, h], attention.tokens[i])
            ratio = found[f"participation_ratio{suffix(measure)}"][i, h].item()
            assert ratio == pytest.approx(dense_ratio(s, n), rel=1e-10)
            second = found[f"lambda2{suffix(measure)}"][i, h].item()
            assert second == pytest.approx(dense_second(s), rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_in_float32(measure):
    attention = random_attention(100, 3, dtype=torch.float32)
    found = feed(tdo(measure), attention.chunks([40, 41, 42]))
    for i in range(2):
        for h in range(2):
            s = dense(measure, attention.pattern[i, h].double(), attention.tokens[i])
            ratio = found[f"participation_ratio{suffix(measure)}"][i, h].item()
            assert ratio == pytest.approx(dense_ratio(s, 100), rel=1e-5)
            assert found[f"lambda2{suffix(measure)}"][i, h].item() == pytest.approx(dense_second(s), rel=1e-5)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_trace_of_every_measure_equals_its_definition_on_every_prefix(measure):
    attention = random_attention(70, 4)
    found = traced(tdo(measure, trace=True), attention.chunks([1, 2, 30, 35, 60]))
    assert set(found) == {f"participation_ratio{suffix(measure)}"}
    for n in (1, 2, 3, 17, 30, 31, 35, 63, 64, 65, 70):
        for i in range(2):
            for h in range(2):
                s = dense(measure, attention.pattern[i, h, :n, :n], attention.tokens[i, :n])
                value = found[f"participation_ratio{suffix(measure)}"][i, h, n - 1].item()
                assert value == pytest.approx(dense_ratio(s, n), rel=1e-10)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("split", [1, 9, 19])
def test_halves_of_every_measure_merge(measure, split):
    attention = random_attention(20, 6)
    whole = feed(tdo(measure), attention.chunks([]))
    first, second = tdo(measure), tdo(measure)
    first.update(attention.rows(0, split))
    second.update(attention.rows(split, 20))
    first.merge(second)
    for name, value in first.compute().items():
        torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("measure", MEASURES)
def test_reset_of_every_measure(measure):
    analyzer = tdo(measure)
    feed(analyzer, random_attention(20, 6).chunks([4]))
    analyzer.reset()
    attention = random_attention(7, 7)
    found = feed(analyzer, attention.chunks([2]))
    for name, value in feed(tdo(measure), attention.chunks([])).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("measure", MEASURES)
def test_keys_without_mass_are_outside_the_space(measure):
    attention = random_attention(12, 2, batch=1, heads=1)
    pattern = attention.pattern.clone()
    pattern[..., 1:, 0] = 0  # key 0 receives only its own row, key 3 nothing
    pattern[..., 3] = 0
    pattern[..., 3, 2] += 1
    attention.pattern = pattern / pattern.sum(-1, keepdim=True)
    found = feed(tdo(measure), attention.chunks([5]))
    s = dense(measure, attention.pattern[0, 0], attention.tokens[0])
    assert s.shape[0] == 11
    assert found[f"participation_ratio{suffix(measure)}"].item() == pytest.approx(dense_ratio(s, 12), rel=1e-10)
    assert found[f"lambda2{suffix(measure)}"].item() == pytest.approx(dense_second(s), rel=1e-9)


def maps(n):
    copy, sink, shift = torch.eye(n), torch.zeros(n, n), torch.eye(n).roll(1, 0)
    sink[:, 0] = 1
    shift[0] = 0
    shift[0, 0] = 1
    return {"copy": copy.double(), "sink": sink.double(), "shift": shift.double()}


@pytest.mark.parametrize("n", [1, 2, 3, 8, 65, 200])
def test_closed_forms(n):
    cases = maps(n)
    found = {}
    for name, a in cases.items():
        analyzer = ap.IntrinsicTDO()
        analyzer.update(ap.Rows.from_pattern(a[None, None]))
        found[name] = {key: value.item() for key, value in analyzer.compute().items()}
    assert found["copy"]["participation_ratio"] == pytest.approx(1, abs=1e-12)
    assert found["sink"]["participation_ratio"] == pytest.approx(1 / n, abs=1e-12)
    assert found["shift"]["participation_ratio"] == pytest.approx(max(1, n - 1) / n, abs=1e-12)
    assert found["copy"]["lambda2"] == pytest.approx(1.0 if n > 1 else 0.0, abs=1e-9)
    assert found["sink"]["lambda2"] == pytest.approx(0.0, abs=1e-9)
    assert found["shift"]["lambda2"] == pytest.approx(1.0 if n > 2 else 0.0, abs=1e-9)


def test_a_sink_biased_router_is_told_from_a_sink():
    cases = maps(256)
    a = (0.7 * cases["sink"] + 0.3 * cases["shift"])[None, None]
    for measure, value in (("intrinsic", 0.972), ("counting", 0.0054)):
        analyzer = ap.TDO(measure)
        analyzer.update(ap.Rows.from_pattern(a))
        ratio = analyzer.compute()[f"participation_ratio{suffix(measure)}"].item()
        assert ratio == pytest.approx(value, abs=0.0006 if measure == "intrinsic" else 0.00006)


def test_lambda2_can_be_left_out():
    attention = random_attention(5)
    assert set(feed(ap.IntrinsicTDO(lambda2=False), attention.chunks([]))) == {"participation_ratio"}


def test_a_bidirectional_pattern():
    attention = random_attention(30, 5, causal=False)
    for measure in ("intrinsic", "counting", "zipf", "unembedding"):
        found = feed(tdo(measure), attention.chunks([7, 20]))
        for i in range(2):
            s = dense(measure, attention.pattern[i, 0], attention.tokens[i])
            ratio = found[f"participation_ratio{suffix(measure)}"][i, 0].item()
            assert ratio == pytest.approx(dense_ratio(s, 30), rel=1e-10)
            assert found[f"lambda2{suffix(measure)}"][i, 0].item() == pytest.approx(dense_second(s), rel=1e-9)
    with pytest.raises(ValueError, match=r"positional measure .* not causal"):
        tdo("positional").update(attention.rows(0, 30))


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"unknown measure 'zip'.*intrinsic"):
        ap.TDO("zip")
    with pytest.raises(ValueError, match=r"unknown scope 'all'.*generation"):
        ap.IntrinsicTDO(scope="all")
    rows = ap.Rows.from_pattern(torch.eye(3)[None, None])
    with pytest.raises(ValueError, match=r"zipf.* token ids"):
        ap.TDO("zipf").update(rows)
    with pytest.raises(ValueError, match="unembedding"):
        ap.TDO("unembedding").update(random_attention(3).rows(0, 3))


# -- the generation block ----------------------------------------------------------------------------------


def block(a, prompt, renormalize):
    """The dense generation block of one head [n, n]."""
    inside = a[prompt:, prompt:]
    return inside / inside.sum(-1, keepdim=True) if renormalize else inside


@pytest.mark.parametrize("measure", ["intrinsic", "counting", "positional", "zipf", "unembedding"])
@pytest.mark.parametrize("scope", ["generation", "generation-raw"])
def test_the_generation_block(scope, measure):
    n, prompts = 20, [6, 9]
    attention = random_attention(n, 8)
    attention.fields = {"prompt_length": torch.tensor(prompts), "shortest_prompt": 6}
    analyzer = tdo(measure, scope=scope, trace=True)
    chunks = attention.chunks([3, 6, 7, 8, 9, 12, 13])
    trace = traced(analyzer, chunks)
    found = analyzer.compute()
    tail = f"{suffix(measure)}_{scope.replace('-', '_')}"
    assert set(found) == {f"participation_ratio{tail}", f"lambda2{tail}"}
    for i, prompt in enumerate(prompts):
        for h in range(2):
            a = attention.pattern[i, h]
            whole = block(a, prompt, scope == "generation")
            s = dense(measure, whole, attention.tokens[i, prompt:])
            assert found[f"participation_ratio{tail}"][i, h].item() == pytest.approx(
                dense_ratio(s, n - prompt), rel=1e-9
            )
            assert found[f"lambda2{tail}"][i, h].item() == pytest.approx(dense_second(s), rel=1e-8)
            for row in range(n):
                value = trace[f"participation_ratio{tail}"][i, h, row].item()
                size = row + 1 - prompt
                if size < 1:
                    assert value != value
                    continue
                s = dense(measure, whole[:size, :size], attention.tokens[i, prompt : prompt + size])
                assert value == pytest.approx(dense_ratio(s, size), rel=1e-9)


@pytest.mark.parametrize("measure", ["intrinsic", "counting", "zipf"])
def test_an_empty_generation_block_has_no_number(measure):
    attention = random_attention(5, 1)
    attention.fields = {"prompt_length": torch.tensor([5, 5]), "shortest_prompt": 5}
    analyzer = tdo(measure, scope="generation", trace=True)
    trace = traced(analyzer, attention.chunks([4]))
    for value in (*trace.values(), *analyzer.compute().values()):
        assert value.isnan().all()


def test_an_empty_block_beside_a_full_one_has_no_number_either():
    attention = random_attention(8, 1)
    attention.fields = {"prompt_length": torch.tensor([5, 8]), "shortest_prompt": 5}
    found = feed(ap.IntrinsicTDO(scope="generation"), attention.chunks([5, 6]))
    assert not found["participation_ratio_generation"][0].isnan().any()
    for name in ("participation_ratio_generation", "lambda2_generation"):
        assert found[name][1].isnan().all(), name


def test_a_block_of_one_row_is_a_copy_map():
    attention = random_attention(6, 1)
    attention.fields = {"prompt_length": torch.tensor([5, 5]), "shortest_prompt": 5}
    for scope in ("generation", "generation-raw"):
        found = feed(ap.IntrinsicTDO(scope=scope), attention.chunks([5]))
        name = f"participation_ratio_{scope.replace('-', '_')}"
        torch.testing.assert_close(found[name], torch.ones(2, 2, dtype=torch.float64))


def test_the_generation_block_of_a_sequence_does_not_depend_on_its_batch():
    prompts = [2, 9, 5]
    attention = random_attention(14, 3, batch=3)
    attention.fields = {"prompt_length": torch.tensor(prompts), "shortest_prompt": 2}
    together = feed(ap.IntrinsicTDO(scope="generation"), attention.chunks([9, 10, 11]))
    for i, prompt in enumerate(prompts):
        alone = attention.sequence(i)
        alone.fields = {"prompt_length": torch.tensor([prompt]), "shortest_prompt": prompt}
        for name, value in feed(ap.IntrinsicTDO(scope="generation"), alone.chunks([])).items():
            torch.testing.assert_close(together[name][i : i + 1], value, rtol=1e-10, atol=1e-10)


def test_the_generation_block_needs_a_prompt_and_causal_rows():
    with pytest.raises(ValueError, match="prompt lengths"):
        ap.IntrinsicTDO(scope="generation").update(random_attention(4).rows(0, 4))
    attention = random_attention(4, causal=False)
    attention.fields |= {"prompt_length": torch.tensor([2, 2]), "shortest_prompt": 2}
    with pytest.raises(ValueError, match="causal self-attention only"):
        ap.IntrinsicTDO(scope="generation").update(attention.rows(0, 4))


# -- rows with a sink that is no token ---------------------------------------------------------------------


def with_sink(n, seed=0):
    attention = random_attention(n, seed)
    kept = torch.rand(2, 2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.8 + 0.1
    attention.pattern = attention.pattern * kept.unsqueeze(-1)
    return attention, 1 - kept


def sink_rows(attention, sink, cuts):
    edges = sorted({0, attention.n, *cuts})
    for low, high in itertools.pairwise(edges):
        attention.fields = {"sink": sink[..., low:high]}
        yield attention.rows(low, high)


@pytest.mark.parametrize("n", [1, 2, 30, 64, 70])
def test_the_sink_is_a_key_for_participation_routing_and_entropy(n):
    attention, sink = with_sink(n, 3)
    how = {"rows": "sink"}
    ratio = functional.participation_ratio(attention.pattern, **how)
    split = functional.routing_split(attention.pattern, attention.v_by_head, **how)
    bound = functional.entropy_bound(attention.pattern, attention.v_by_head, **how)
    analyzers = [ap.IntrinsicTDO(), ap.MeanRoutingSplit(), ap.SpectralEntropyBound()]
    for rows in sink_rows(attention, sink, [3, 4, 20]):
        for analyzer in analyzers:
            analyzer.update(rows)
    found = {}
    for analyzer in analyzers:
        found |= analyzer.compute()
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(found["participation_ratio"], ratio, **close)
    torch.testing.assert_close(found["lambda2"], functional.tdo_spectrum(attention.pattern, **how)[..., 1], **close)
    for name in ("mean_energy", "routed_energy", "routed_fraction", "value_energy"):
        torch.testing.assert_close(found[name], getattr(split, name), **close)
    torch.testing.assert_close(found["gain_bound"].square(), split.bound.square(), **close)
    torch.testing.assert_close(found["entropy"], bound.entropy, **close)


def test_the_trace_with_a_sink():
    n = 40
    attention, sink = with_sink(n, 3)
    analyzer, split = ap.IntrinsicTDO(trace=True), ap.MeanRoutingSplit(trace=True)
    chunks = list(sink_rows(attention, sink, [3, 4, 20]))
    ratios, routed = traced(analyzer, chunks), traced(split, chunks)
    for t in (1, 2, 4, 5, 20, 40):
        prefix = attention.prefix(t)
        expected = functional.participation_ratio(prefix.pattern, rows="sink")
        torch.testing.assert_close(ratios["participation_ratio"][..., t - 1], expected, rtol=1e-10, atol=1e-10)
        expected = functional.routing_split(prefix.pattern, prefix.v_by_head, rows="sink")
        for name in ("value_energy", "routed_fraction"):
            torch.testing.assert_close(routed[name][..., t - 1], getattr(expected, name), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", [ap.TransportCapacity, ap.Asymmetry])
def test_the_sink_has_no_place_where_tokens_are_paired(kind):
    attention, sink = with_sink(5)
    (rows,) = sink_rows(attention, sink, [])
    for call in (kind().update, kind(trace=True).trace_rows):
        with pytest.raises(ValueError, match=r"sink key.*rows='renormalize'"):
            call(rows)


def test_the_positional_measure_refuses_a_sink_as_the_functional_one_does():
    attention, sink = with_sink(5)
    (rows,) = sink_rows(attention, sink, [])
    with pytest.raises(ValueError, match="sink"):
        functional.participation_ratio(attention.pattern, "positional", rows="sink")
    with pytest.raises(ValueError, match="sink"):
        ap.TDO("positional").update(rows)


def test_tokens_without_weight_in_the_unembedding_measure():
    """A padding token's row of the unembedding may be zero, and the model may generate that token."""
    leverage = torch.tensor([0.0, 0.5, 0.25], dtype=torch.float64)
    pattern = random_attention(5, 4, batch=1).pattern
    found = {}
    for tokens in ([1, 2, 0, 0, 0], [1, 2, 0, 1, 2]):
        rows = ap.Rows.from_pattern(
            pattern, tokens=torch.tensor([tokens]), prompt_length=torch.tensor([2]), shortest_prompt=2
        )
        analyzer = ap.TDO("unembedding", scope="generation", lambda2=False, trace=True).start(leverage=leverage)
        found[tokens[-1]] = analyzer.trace_rows(rows)[analyzer.ratio_name]
        analyzer.update(rows)
        torch.testing.assert_close(analyzer.compute()[analyzer.ratio_name], found[tokens[-1]][..., -1])
    assert (found[0][..., 2:] == 0).all()  # a block of which no token has weight
    assert (found[2][..., 2] == 0).all()
    block = pattern[0, 0, 2:, 2:] / pattern[0, 0, 2:, 2:].sum(-1, keepdim=True)
    mu = torch.tensor([0.0, 2 / 3, 1 / 3], dtype=torch.float64)
    assert found[2][0, 0, -1].item() == pytest.approx(dense_ratio(dense_tdo(block, mu), 3), abs=1e-9)
