"""What is computed from queries and keys at the end: the chosen head of SAUQ, and lambda_2 beside a sketch."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnprobe as ap
from attnprobe.analyzers import TDO, ScreenedTDO, ScreenedTrace
from attnprobe.analyzers.tracing import Tracer, feed
from attnprobe.functional.factored import Factors
from attnprobe.functional.gram import BlockGram
from attnprobe.functional.lanczos import eigenvalue_beside, eigenvalue_beside_of, eigenvalue_beside_operator
from attnprobe.functional.screening import first_largest
from attnprobe.rows import Rows
from attnprobe.state.statistic import StatisticPool

HEADS, KV_HEADS, D = 4, 2, 6


def factors(lengths: list[int], seed: int = 0, scale: float = 2.0) -> Factors:
    """Queries and keys of a batch, shorter sequences padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    n, batch = max(lengths), len(lengths)
    q = scale * torch.randn(batch, HEADS, n, D, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, KV_HEADS, n, D, generator=generator, dtype=torch.float64)
    position = torch.where(torch.arange(n) < torch.tensor(lengths)[:, None], torch.arange(n), -1)
    return Factors(q, k, position, kv_head=(0, 0, 1, 1), scaling=D**-0.5, padded=len(set(lengths)) > 1)


def rows_of(whole: Factors, prompt: list[int]) -> Rows:
    return Rows(
        pattern=None,
        factors=whole,
        position=whole.position,
        prompt_length=torch.tensor(prompt),
        shortest_prompt=min(prompt),
    )


def trace(analyzers: list[ap.Analyzer], rows: Rows, untraced: int, cuts: tuple[int, ...] = ()) -> dict:
    pool = StatisticPool()
    started = [analyzer.start(pool) for analyzer in analyzers]
    tracer = Tracer(started)
    for low, high in zip((0, *cuts), (*cuts, rows.n_query), strict=True):
        feed(rows[low:high], started, tracer, untraced=min(max(untraced - low, 0), high - low))
    return tracer.values(rows.position.shape[0])[0]


@pytest.mark.parametrize("cuts", [(), (3, 12), (11, 12, 13, 14, 20)])
@pytest.mark.parametrize("screen", ["final", "mean"])
@pytest.mark.parametrize("measure", ["intrinsic", "counting"])
def test_the_chosen_head_has_the_trace_it_has_among_all_heads(cuts, screen, measure):
    rows = rows_of(factors([26]), [11])
    found = trace([ScreenedTDO(measure, screen=screen)], rows, 10, cuts)
    every = trace([TDO(measure, trace=True), TDO(measure, scope="generation", trace=True)], rows, 10)
    prefix, block = TDO(measure).ratio_name, TDO(measure, scope="generation").ratio_name
    name = ScreenedTDO(measure, screen=screen).prefix_name
    close = dict(rtol=1e-9, atol=1e-9, equal_nan=True)
    compared = slice(-2, None) if screen == "final" else slice(None)
    torch.testing.assert_close(found[block][..., compared], every[block][..., compared], **close)
    steps = every[block][0, :, -1] if screen == "final" else every[block][0, :, 1:].mean(-1)
    chosen = int(steps.argmax())
    torch.testing.assert_close(found[name][0, chosen], every[prefix][0, chosen], **close)
    torch.testing.assert_close(found[block][0, chosen], every[block][0, chosen], **close)
    followed = ~found[name].isnan().all(-1)[0]
    assert 1 <= int(followed.sum()) <= 2  # the last step's choice and that of the one before


@pytest.mark.parametrize("lengths", [[26, 21], [26, 12], [11, 24], [13, 25]])
def test_a_batch_of_different_lengths_chooses_for_each(lengths):
    whole = factors(lengths, seed=3)
    found = trace([ScreenedTDO()], rows_of(whole, [11, 11]), 10)
    for i, length in enumerate(lengths):
        one = Factors(
            whole.q[i : i + 1, :, :length],
            whole.k[i : i + 1, :, :length],
            whole.position[i : i + 1, :length],
            whole.kv_head,
            whole.scaling,
        )
        alone = trace([ScreenedTDO()], rows_of(one, [11]), 10)
        for name, value in alone.items():
            steps = value.shape[-1]
            torch.testing.assert_close(found[name][i, ..., :steps], value[0], rtol=1e-9, atol=1e-9, equal_nan=True)
            assert found[name][i, ..., steps:].isnan().all()


def test_generation_blocks_are_no_wider_than_the_longest_generation():
    rows = rows_of(factors([26, 16]), [21, 11])
    narrow = replace(rows, pattern=None, longest_generation=5)
    assert (rows.generation_block().n_key, narrow.generation_block().n_key) == (15, 5)
    found, wide = (trace([ScreenedTDO(), TDO(scope="generation", trace=True)], some, 10) for some in (narrow, rows))
    for name, value in wide.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("n_generated", [1, 2])
def test_so_few_tokens_follow_every_head(n_generated):
    rows = rows_of(factors([8 + n_generated]), [9])
    found = trace([ScreenedTDO()], rows, 8)["participation_ratio_screened"]
    every = trace([TDO(trace=True)], rows, 8)["participation_ratio"]
    torch.testing.assert_close(found, every, rtol=1e-9, atol=1e-9)


def test_a_pattern_is_followed_as_it_comes():
    whole = factors([20])
    given = Rows.from_pattern(whole.pattern(), prompt_length=torch.tensor([9]), shortest_prompt=9)
    found = trace([ScreenedTDO()], given, 8)
    every = trace([TDO(trace=True)], given, 8)
    torch.testing.assert_close(
        found["participation_ratio_screened"], every["participation_ratio"], rtol=1e-9, atol=1e-9
    )


def test_the_stride_of_the_prefix_holds_values_between():
    rows = rows_of(factors([30]), [11])
    both = trace([ScreenedTDO(stride=4), ScreenedTDO()], rows, 10)
    found, every = both["participation_ratio_screened_stride4"], both["participation_ratio_screened"]
    held = every[..., [4 * (i // 4) for i in range(every.shape[-1])]]
    torch.testing.assert_close(found, held, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_keys_of_older_rows_are_let_go():
    analyzer = ScreenedTDO()
    started = analyzer.start()
    rows = rows_of(factors([24]), [10])
    for low in range(0, 24, 6):
        started.update(rows[low : low + 6])
    held = [chunk.factors.k.untyped_storage().nbytes() for chunk in started._shared_rows()._chunks[:-1]]
    assert held == [0, 0, 0]


@pytest.mark.parametrize("given", ["queries and keys", "patterns"])
def test_screenings_of_one_site_have_the_values_each_has_alone(given):
    whole = factors([26, 21], seed=5)
    rows = rows_of(whole, [11, 9])
    if given == "patterns":
        rows = replace(rows, pattern=whole.pattern(), factors=None)
    rows = replace(rows, tokens=torch.randint(0, 50, (2, 26), generator=torch.Generator().manual_seed(0)))
    several = [
        ScreenedTDO(),
        ScreenedTDO("counting"),
        ScreenedTDO("positional"),
        ScreenedTDO("zipf", block="generation-raw"),
        ScreenedTDO(stride=3),
        ScreenedTrace(ap.LaplacianEigenvalues()),
        ScreenedTrace(ap.LogDeterminant(), "counting"),
    ]
    together = trace(several, rows, 8)
    seen = set()
    for one in several:
        for name, value in trace([one], rows, 8).items():
            seen.add(name)
            chosen = ~value.isnan()
            torch.testing.assert_close(together[name][chosen], value[chosen], rtol=1e-9, atol=1e-9)
            assert chosen.any()
    assert seen == set(together)


@pytest.mark.parametrize("order", [("final", "mean"), ("mean", "final")])
def test_heads_compared_by_their_mean_keep_their_ratios_beside_the_others(order):
    rows = rows_of(factors([26]), [11])
    together = trace([ScreenedTDO(screen=screen) for screen in order], rows, 10)
    mean = trace([ScreenedTDO(screen="mean")], rows, 10)
    for name, value in mean.items():
        known = ~value.isnan()
        torch.testing.assert_close(together[name][known], value[known], rtol=1e-9, atol=1e-9)
    assert not together["participation_ratio_generation"][..., 1:].isnan().any()


def test_any_analyzer_of_rows_can_be_traced_at_the_chosen_heads():
    class FirstToken(ap.Analyzer):
        variables: ClassVar = {"first_token": {"units": "1"}}

        def update(self, rows):
            self.accumulate(mass=rows.pattern[..., 0].sum(-1), rows=rows.count[:, None])

        def compute(self):
            return {"first_token": self.total["mass"] / self.total["rows"]}

    rows = rows_of(factors([26]), [11])
    screened = ScreenedTrace(FirstToken())
    found = trace([screened, ScreenedTDO()], rows, 10)
    every = trace([FirstToken(trace=True)], rows, 10)["first_token"]
    chosen = ~found["participation_ratio_screened"].isnan()
    torch.testing.assert_close(found["first_token_screened"][chosen], every[chosen], rtol=1e-9, atol=1e-9)
    assert found["first_token_screened"][~chosen].isnan().all()
    assert set(screened.variables) == {"first_token_screened", "participation_ratio_generation"}


def test_what_reads_more_than_patterns_cannot_be_screened():
    with pytest.raises(ValueError, match=r"MeanRoutingSplit needs .*patterns and tokens only"):
        ScreenedTrace(ap.MeanRoutingSplit())
    with pytest.raises(ValueError, match="unknown screen 'last'"):
        ScreenedTrace(ap.SelfAttention(), screen="last")


def test_screening_refuses_to_merge():
    with pytest.raises(TypeError, match="cannot be merged"):
        ScreenedTDO().merge(ScreenedTDO())


def test_ties_go_to_the_lowest_head():
    values = torch.tensor([[0.1, 0.7, 0.7 * (1 + 1e-10), float("nan")], [float("nan"), 0.2, 0.3, 0.3]])
    assert first_largest(values.double(), 1e-9).tolist() == [1, 2]


# -- lambda_2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lengths", "window"), [([150], None), ([150, 120], None), ([140], 20)])
def test_lambda2_from_queries_and_keys_is_that_of_the_dense_operator(lengths, window):
    whole = factors(lengths, scale=1.0)
    if window is not None:
        whole = Factors(whole.q, whole.k, whole.position, whole.kv_head, whole.scaling, window)
    rows = rows_of(whole, lengths)
    analyzer = ap.IntrinsicTDO(method="sketch", rank=16, lambda2=True)
    for low in range(0, rows.n_query, 40):
        analyzer.update(rows[low : min(low + 40, rows.n_query)])
    found = analyzer.compute()["lambda2"]
    for i, length in enumerate(lengths):
        expected = ap.functional.tdo_spectrum(whole.pattern()[i, :, :length, :length], 2)[..., 1]
        torch.testing.assert_close(found[i], expected, rtol=1e-8, atol=1e-9)


def test_lambda2_beside_a_sketch_needs_queries_and_keys():
    rows = Rows.from_pattern(torch.eye(4).reshape(1, 1, 4, 4))
    with pytest.raises(ValueError, match="queries and keys, which this host does not show"):
        ap.IntrinsicTDO(method="sketch", lambda2=True).update(rows)


@pytest.mark.parametrize("n", [5, 130, 200])
def test_the_three_ways_to_the_second_eigenvalue_agree(n):
    whole = factors([n], scale=1.0)
    pattern = whole.pattern()
    mass = pattern.sum(-2)
    scale, known = mass.rsqrt(), mass.sqrt()
    known = known / known.norm(dim=-1, keepdim=True)
    gram = BlockGram()
    gram.add_(pattern, causal_start=0)
    dense = eigenvalue_beside(gram.dense(scale), known)
    by_blocks = eigenvalue_beside_of(gram.operators(scale), known.reshape(-1, n)).reshape(1, HEADS)
    again = eigenvalue_beside_operator(
        lambda x: whole.normal_product(x * scale.unsqueeze(-2), 64) * scale.unsqueeze(-2), known
    )
    exact = ap.functional.tdo_spectrum(pattern, 2)[..., 1]
    for found in (dense, by_blocks, again):
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-9)


@given(st.integers(1, 450), st.integers(0, 10))
@settings(deadline=None, max_examples=25)
def test_the_stored_half_is_the_whole_operator(n, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(2, n, n, generator=generator, dtype=torch.float64).tril()
    gram = BlockGram()
    for low in range(0, n, 100):
        gram.add_(rows[:, low : low + 100, : low + 100], causal_start=low)
    scale = torch.rand(2, n, generator=generator, dtype=torch.float64)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    for i, product in enumerate(gram.operators(scale)):
        expected = scale[i] * (rows[i].mT @ (rows[i] @ (scale[i] * x)))
        np.testing.assert_allclose(product(x.numpy()), expected.numpy(), rtol=1e-10, atol=1e-10)
