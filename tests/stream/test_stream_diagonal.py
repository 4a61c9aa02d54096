"""LaplacianEigenvalues and LogDeterminant: what the tests of every analyzer do not ask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream.dense import feed, laplacian, log_determinant, random_attention, traced

import attnprobe as ap
from attnprobe.analyzers.tracing import Tracer
from attnprobe.analyzers.tracing import feed as feed_and_trace
from attnprobe.functional.factored import Factors

KINDS = [ap.LaplacianEigenvalues, ap.LogDeterminant]
chunkings = st.lists(st.integers(0, 40), max_size=8)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 2.0, 30.0]),
    cuts=chunkings,
    clip=st.sampled_from(["each", "mean"]),
)
def test_signals_lie_in_the_unit_interval_however_rows_come(n, seed, scale, cuts, clip):
    attention = random_attention(n, seed, scale=scale)
    analyzers = [ap.LaplacianEigenvalues(clip, trace=True), ap.LogDeterminant(trace=True)]
    eigenvalue, logs = (traced(analyzer, attention.chunks(cuts)) for analyzer in analyzers)
    signal = eigenvalue[analyzers[0].result_name]
    assert ((signal >= 0) & (signal <= 1)).all()
    mean = logs["log_determinant_mean"].exp()
    assert ((mean >= 0) & (mean <= 1)).all()
    for t in {1, (n + 1) // 2, n}:
        prefix = attention.pattern[..., :t, :t]
        expected = ap.functional.mean_laplacian_eigenvalue(prefix, clip)
        torch.testing.assert_close(signal[..., t - 1], expected, rtol=1e-10, atol=1e-12)
        expected = ap.functional.attention_log_determinant(prefix)
        torch.testing.assert_close(logs["log_determinant"][..., t - 1], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [1, 5, 33])
def test_a_head_that_copies(n):
    rows = [
        ap.Rows.from_pattern(torch.eye(n)[None, None, low : low + 4, : low + 4], start=low) for low in range(0, n, 4)
    ]
    found = feed(ap.LogDeterminant(), rows) | feed(ap.LaplacianEigenvalues(), rows)
    assert {name: value.item() for name, value in found.items()} == {
        "log_determinant": 0.0,
        "log_determinant_mean": 0.0,
        "laplacian_eigenvalue_mean": 0.0,
    }


def test_a_head_that_looks_one_token_back():
    n = 9
    shift = torch.zeros(1, 1, n, n, dtype=torch.float64)
    shift[..., 0, 0] = 1
    shift[..., range(1, n), range(n - 1)] = 1
    rows = [ap.Rows.from_pattern(shift[..., low : low + 2, : low + 2], start=low) for low in range(0, n, 2)]
    found = traced(ap.LaplacianEigenvalues(trace=True), rows)["laplacian_eigenvalue_mean"].flatten()
    # of t tokens the inner ones, i = 1..t-2, receive 1 of t - i rows
    expected = [sum(1 / (t - i) for i in range(1, t - 1)) / t for t in range(1, n + 1)]
    assert found.tolist() == pytest.approx(expected, abs=1e-14)
    logs = traced(ap.LogDeterminant(trace=True), rows)["log_determinant_mean"].flatten()
    assert logs.tolist() == [0.0] + [-math.inf] * (n - 1)


def test_a_weight_of_zero_counts_from_its_row_on_unless_there_is_an_epsilon():
    attention = random_attention(12, 3)
    attention.pattern[:, 0, 5, 5] = 0.0
    found = traced(ap.LogDeterminant(trace=True), attention.chunks([4, 6, 7]))["log_determinant_mean"]
    assert found[:, 0, :5].isfinite().all()
    assert (found[:, 0, 5:] == -math.inf).all()
    assert found[:, 1].isfinite().all()
    with_epsilon = traced(ap.LogDeterminant(1e-12, trace=True), attention.chunks([4, 6, 7]))
    assert set(with_epsilon) == {"log_determinant_epsilon1e-12", "log_determinant_mean_epsilon1e-12"}
    diagonal = attention.pattern.diagonal(dim1=-2, dim2=-1)
    expected = (diagonal + 1e-12).log().cumsum(-1)
    torch.testing.assert_close(with_epsilon["log_determinant_epsilon1e-12"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_loses_nothing_over_a_long_text(kind):
    single = random_attention(1500, 1, batch=1, dtype=torch.float32)
    found = traced(kind(trace=True), single.chunks([700, 701, 1400]))
    last = feed(kind(), single.chunks([700, 701, 1400]))
    single.pattern = single.pattern.double()
    definition = laplacian if kind is ap.LaplacianEigenvalues else log_determinant
    for t in (1, 400, 1500):
        for name, expected in definition(single.prefix(t)).items():
            torch.testing.assert_close(found[name][..., t - 1].double(), expected, rtol=2e-7, atol=1e-6)
            if t == 1500:
                torch.testing.assert_close(last[name].double(), expected, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_from_queries_and_keys_give_what_their_pattern_gives(kind):
    generator = torch.Generator().manual_seed(4)
    q = 2 * torch.randn(2, 4, 21, 6, generator=generator, dtype=torch.float64)
    k = torch.randn(2, 2, 21, 6, generator=generator, dtype=torch.float64)
    position = torch.where(torch.arange(21) < torch.tensor([[21], [15]]), torch.arange(21), -1)
    factors = Factors(q, k, position, kv_head=(0, 0, 1, 1), scaling=6**-0.5, padded=True)
    made = ap.Rows(pattern=None, factors=factors, position=position)
    given_ = ap.Rows(pattern=factors.pattern(), position=position)
    values = []
    for rows in (made, given_):
        analyzer = kind(trace=True)
        tracer = Tracer([analyzer])
        feed_and_trace(rows[:13], [analyzer], tracer, untraced=13)
        feed_and_trace(rows[13:21], [analyzer], tracer, untraced=0)
        values.append((analyzer.compute(), tracer.values(2)[0]))
    for one, other in zip(*values, strict=True):
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)
    for name, trace in values[0][1].items():  # step 2 of the second sequence is its last row
        torch.testing.assert_close(trace[1, :, 1], values[0][0][name][1], rtol=1e-12, atol=1e-12)
        assert trace[1, :, 2:].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_sites_that_have_no_such_diagonal(kind):
    bidirectional = random_attention(5, causal=False).rows(0, 5)
    cross = ap.Rows.from_pattern(torch.full((1, 1, 2, 3), 1 / 3), causal=False, self_attention=False)
    for rows in (bidirectional, cross):
        with pytest.raises(ValueError, match="causal self-attention only"):
            kind().update(rows)
        with pytest.raises(ValueError, match="causal self-attention only"):
            kind(trace=True).trace_rows(rows)


def test_a_sink_is_no_token():
    attention = random_attention(6)
    attention.pattern = attention.pattern * 0.75
    attention.fields = {"sink": torch.full((2, 2, 6), 0.25, dtype=torch.float64)}
    with pytest.raises(ValueError, match="rows='renormalize'"):
        ap.LaplacianEigenvalues().update(attention.rows(0, 6))
    found = feed(ap.LogDeterminant(), attention.chunks([2]))["log_determinant"]
    torch.testing.assert_close(found, attention.pattern.diagonal(dim1=-2, dim2=-1).log().sum(-1))


def test_a_stride_holds_the_value_between():
    rows = random_attention(11, 2).rows(0, 11)
    analyzers = [ap.LogDeterminant(trace=True, stride=3), ap.LaplacianEigenvalues(trace=True, stride=3)]
    tracer, every = Tracer(analyzers), Tracer([ap.LogDeterminant(trace=True), ap.LaplacianEigenvalues(trace=True)])
    tracer.take(rows, analyzers)
    every.take(rows, every._traced)
    held, whole = tracer.values(2)[0], every.values(2)[0]
    assert len(held) == 3
    for name, value in held.items():
        torch.testing.assert_close(value, whole[name][..., [3 * (i // 3) for i in range(11)]], rtol=1e-12, atol=1e-12)


def test_settings_are_checked_and_tell_analyzers_apart():
    with pytest.raises(ValueError, match="unknown clip"):
        ap.LaplacianEigenvalues("both")
    with pytest.raises(ValueError, match="epsilon=-1"):
        ap.LogDeterminant(-1)
    with pytest.raises(ValueError, match="settings differ"):
        ap.LogDeterminant().merge(ap.LogDeterminant(1e-12))
    assert repr(ap.LogDeterminant()) != repr(ap.LogDeterminant(1e-12))
    assert repr(ap.LaplacianEigenvalues()) != repr(ap.LaplacianEigenvalues("mean"))
    described = {**ap.LogDeterminant(1e-12).variables, **ap.LaplacianEigenvalues().variables}
    assert {"log_determinant_epsilon1e-12", "laplacian_eigenvalue_mean_clipped_once"} <= set(described)
    assert described["log_determinant_epsilon1e-12"]["units"] == "nats"
