"""TDOSpectrum, TopLaplacianEigenvalues and TopSelfAttention against their definitions, however rows come."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe.support import bridge, padded, tokens
from stream.dense import dense_measure, dense_tdo, feed, random_attention, traced
from tiny import tiny_model

import attnprobe as ap
from attnprobe.functional.top_values import top_values

K = 5
chunkings = st.lists(st.integers(0, 40), max_size=8)


def stacked(found: dict[str, torch.Tensor]) -> torch.Tensor:
    """[batch, head, k], in the order of the numbers in the names."""
    return torch.stack([found[name] for name in sorted(found, key=lambda name: int(name.split("_")[2]))], -1)


def first(values: torch.Tensor, k: int, fill: float) -> torch.Tensor:
    """The k largest of a vector, by a plain sort."""
    ordered = sorted(values.tolist(), reverse=True)[:k]
    return torch.tensor(ordered + [fill] * (k - len(ordered)), dtype=torch.float64)


def dense_spectrum(a: torch.Tensor, k: int, mu: torch.Tensor | None = None, pi: float | None = None) -> torch.Tensor:
    return first(torch.linalg.eigvalsh(dense_tdo(a, mu, pi)), k, 0.0)


def dense_laplacian(a: torch.Tensor, k: int) -> torch.Tensor:
    n = len(a)
    eigenvalues = [sum(float(a[u, i]) for u in range(i, n)) / (n - i) - float(a[i, i]) for i in range(n)]
    return first(torch.tensor(eigenvalues, dtype=torch.float64), k, torch.nan)


def dense_diagonal(a: torch.Tensor, k: int) -> torch.Tensor:
    return first(torch.tensor([float(a[i, i]) for i in range(len(a))], dtype=torch.float64), k, torch.nan)


DENSE = {
    ap.TDOSpectrum: dense_spectrum,
    ap.TopLaplacianEigenvalues: dense_laplacian,
    ap.TopSelfAttention: dense_diagonal,
}


def by_head(pattern: torch.Tensor, definition) -> torch.Tensor:
    return torch.stack([torch.stack([definition(head.double(), K) for head in one]) for one in pattern])


@pytest.mark.parametrize("kind", DENSE)
@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 1000), scale=st.sampled_from([0.0, 2.0, 30.0]), cuts=chunkings)
def test_the_definition_however_rows_come(kind, n, seed, scale, cuts):
    attention = random_attention(n, seed, scale=scale)
    found = stacked(feed(kind(k=K), attention.chunks(cuts)))
    expected = by_head(attention.pattern, DENSE[kind])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 30), seed=st.integers(0, 1000), measure=st.sampled_from(["intrinsic", "counting", "positional"])
)
def test_the_functional_form_and_what_is_known_of_it(n, seed, measure):
    attention = random_attention(n, seed)
    found = stacked(feed(ap.TDOSpectrum(n, measure), attention.chunks([n // 2])))
    expected = ap.functional.tdo_spectrum(attention.pattern, measure=measure)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert (found.diff(dim=-1) <= 0).all()
    if measure == "intrinsic":
        torch.testing.assert_close(found[..., 0], torch.ones_like(found[..., 0]), rtol=1e-12, atol=0)
        assert (found <= 1 + 1e-12).all()
        second = feed(ap.IntrinsicTDO(), attention.chunks([3]))["lambda2"]
        if n > 1:
            torch.testing.assert_close(found[..., 1], second, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("measure", ["zipf", "unembedding"])
def test_measures_by_token(measure):
    attention = random_attention(13, 4)
    leverage = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    analyzer = ap.TDOSpectrum(K, measure).start(leverage=leverage)
    found = stacked(feed(analyzer, attention.chunks([4, 9])))
    for b in range(2):
        for h in range(2):
            a = attention.pattern[b, h]
            expected = dense_spectrum(a, K, *dense_measure(measure, a, attention.tokens[b], leverage))
            torch.testing.assert_close(found[b, h], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", DENSE)
def test_every_prefix(kind):
    attention = random_attention(9, 3)
    found = traced(kind(k=K, trace=True), attention.chunks([4]))
    for t in range(1, 10):
        there = stacked({name: value[..., t - 1] for name, value in found.items()})
        expected = by_head(attention.prefix(t).pattern, DENSE[kind])
        torch.testing.assert_close(there, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_merged_halves_are_the_whole():
    attention = random_attention(20, 5)
    for kind in DENSE:
        one, other = kind(k=K), kind(k=K)
        chunks = attention.chunks([7])
        one.update(chunks[0])
        other.update(chunks[1])
        one.merge(other)
        whole = feed(kind(k=K), [attention.rows(0, 20)])
        torch.testing.assert_close(stacked(one.compute()), stacked(whole), rtol=1e-10, atol=1e-12)


def test_generation_block():
    attention = random_attention(12, 6)
    attention.fields = {"prompt_length": torch.tensor([8, 9])}
    found = stacked(feed(ap.TDOSpectrum(K, scope="generation"), attention.chunks([8, 10])))
    for b, prompt in enumerate((8, 9)):
        for h in range(2):
            block = attention.pattern[b, h, prompt:, prompt:]
            expected = dense_spectrum(block / block.sum(-1, keepdim=True), K)
            torch.testing.assert_close(found[b, h], expected, rtol=1e-9, atol=1e-12)
    attention.fields = {"prompt_length": torch.tensor([12, 12])}
    assert stacked(feed(ap.TDOSpectrum(K, scope="generation"), attention.chunks([]))).isnan().all()


def test_heads_whose_spectrum_is_known():
    n = 6
    sink = torch.zeros(n, n, dtype=torch.float64)
    sink[:, 0] = 1
    shift = torch.zeros(n, n, dtype=torch.float64)
    shift[0, 0] = 1
    shift[range(1, n), range(n - 1)] = 1
    rows = ap.Rows.from_pattern(torch.stack([torch.eye(n).double(), sink, shift])[None])
    found = stacked(feed(ap.TDOSpectrum(8), [rows]))[0]
    expected = torch.tensor([[1.0] * 6 + [0, 0], [1.0] + [0] * 7, [1.0] * 5 + [0] * 3], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    counting = stacked(feed(ap.TDOSpectrum(2, "counting"), [rows]))[0]
    # the Euclidean geometry sees a sink of n tokens as n, and the shift head's doubled first key as 2
    torch.testing.assert_close(
        counting, torch.tensor([[1.0, 1.0], [6.0, 0.0], [2.0, 1.0]]).double(), atol=1e-12, rtol=0
    )


def test_single_precision_at_length():
    attention = random_attention(700, 1, batch=1, dtype=torch.float32)
    found = stacked(feed(ap.TDOSpectrum(K), attention.chunks([500, 600, 601])))
    assert found.dtype == torch.float32
    expected = by_head(attention.pattern, dense_spectrum)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


HOSTS = {"bridge": lambda: bridge("llama"), "transformers": lambda: tiny_model("llama", attention="sdpa")}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_models_batched_and_padded_agree_with_eager_attention(host, side):
    sequences = tokens(21, 6, 14, seed=3)
    ids, mask = padded(sequences, side)
    probe = ap.Probe([kind(k=K) for kind in DENSE])
    model = HOSTS[host]()
    with probe.attach(model), torch.no_grad():
        model(ids, attention_mask=mask)
    results = probe.results()
    eager = tiny_model("llama").double()
    for i, sequence in enumerate(sequences):
        with torch.no_grad():
            layers = eager(sequence[None], output_attentions=True).attentions
        for kind, definition in DENSE.items():
            for layer, pattern in enumerate(layers):
                expected = by_head(pattern, definition)[0]
                found = np.stack([results[name].values[i, layer] for name in kind(k=K).names], -1)
                np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, equal_nan=True)


def test_top_values_by_sorting():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, 7, generator=generator)
    values[0, 0, 2:] = torch.nan
    values[1, 1] = torch.nan
    values[2, 2, 3] = -torch.inf
    found = top_values(values, 9)
    for b in range(3):
        for h in range(4):
            real = [value for value in values[b, h].tolist() if value == value]
            expected = torch.tensor(sorted(real, reverse=True) + [torch.nan] * (9 - len(real)))
            torch.testing.assert_close(found[b, h], expected, equal_nan=True, rtol=0, atol=0)


def test_what_is_refused():
    for kind in DENSE:
        for k in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match="whole number of at least 1"):
                kind(k=k)
    with pytest.raises(ValueError, match="unknown measure"):
        ap.TDOSpectrum(measure="euclid")
    with pytest.raises(ValueError, match="unknown scope"):
        ap.TDOSpectrum(scope="answer")
    with pytest.raises(ValueError, match="causal self-attention only"):
        ap.TopLaplacianEigenvalues().update(random_attention(5, causal=False).rows(0, 5))
    cross = ap.Rows.from_pattern(torch.full((1, 1, 2, 3), 1 / 3), causal=False, self_attention=False)
    with pytest.raises(ValueError, match="cross-attention"):
        ap.TopSelfAttention().update(cross)
    with pytest.raises(TypeError, match="cannot merge"):
        ap.TDOSpectrum().merge(ap.TDO())


def test_names_and_descriptions():
    assert ap.TDOSpectrum(2).names == ("tdo_eigenvalue_1", "tdo_eigenvalue_2")
    named = ap.TDOSpectrum(1, "counting", scope="generation")
    assert named.names == ("tdo_eigenvalue_1_counting_generation",)
    assert named.variables[named.names[0]]["measure"] == "counting"
    assert set(ap.TopLaplacianEigenvalues(3).variables) == set(ap.TopLaplacianEigenvalues(3).names)


def test_bidirectional_attention_has_a_spectrum_too():
    attention = random_attention(8, 2, causal=False)
    found = stacked(feed(ap.TDOSpectrum(K), [attention.rows(0, 8)]))
    torch.testing.assert_close(found, by_head(attention.pattern, dense_spectrum), rtol=1e-9, atol=1e-12)
