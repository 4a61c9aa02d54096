import pytest
import torch

from attnprobe.functional import (
    leverage_scores,
    participation_ratio,
    positional_measure,
    tdo_spectrum,
    unembedding_measure,
    zipf_measure,
)
from attnprobe.functional.measures import key_weights
from attnprobe.functional.patterns import check_pattern


def test_named_measures_by_their_definition(make_pattern):
    pattern = make_pattern(5, seed=1, causal=True)
    checked = check_pattern(pattern)
    intrinsic = key_weights(checked, "intrinsic")
    assert intrinsic.query.item() == pytest.approx(1 / 5)
    assert torch.allclose(intrinsic.key, pattern.sum(0) / 5)
    counting = key_weights(checked, "counting")
    assert counting.query.item() == 1.0
    assert counting.key.tolist() == [1.0] * 5
    positional = key_weights(checked, "positional")
    assert torch.allclose(positional.key, positional_measure(5))


@pytest.mark.parametrize("n", [1, 2, 7])
def test_positional_measure_is_what_uniform_causal_attention_induces(uniform_causal, n):
    induced = uniform_causal(n).sum(0) / n
    assert torch.allclose(positional_measure(n), induced)
    written_out = [sum(1 / i for i in range(j, n + 1)) / n for j in range(1, n + 1)]
    assert positional_measure(n).tolist() == pytest.approx(written_out)


def test_positional_measure_of_shorter_sequences():
    weights = positional_measure(5, torch.tensor([[3], [5]]))
    assert weights.shape == (2, 1, 5)
    assert torch.allclose(weights[0, 0, :3], positional_measure(3))
    assert weights[0, 0, 3:].tolist() == [0.0, 0.0]
    assert positional_measure(3, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(("n", "length"), [(0, None), (3, torch.tensor([4])), (3, torch.tensor([0]))])
def test_positional_measure_refuses(n, length):
    with pytest.raises(ValueError, match=r"at least one key|1\.\.3"):
        positional_measure(n, length)


def test_zipf_measure_by_its_definition():
    tokens = torch.tensor([[5, 0, 100], [7, 7, 7]])
    weights = zipf_measure(tokens)
    expected = [1 / 7.7, 1 / 2.7, 1 / 102.7]
    assert weights[0].tolist() == pytest.approx([w / sum(expected) for w in expected])
    assert weights[1].tolist() == pytest.approx([1 / 3] * 3)
    assert weights.dtype == torch.float64


def test_zipf_measure_with_a_frequency_table():
    rank = torch.tensor([2, 0, 1])
    assert torch.allclose(zipf_measure(torch.tensor([0, 1]), rank), zipf_measure(torch.tensor([2, 0])))
    with pytest.raises(ValueError, match=r"in 0\.\.2"):
        zipf_measure(torch.tensor([3]), rank)


def test_zipf_measure_refuses_what_is_no_token_id():
    with pytest.raises(TypeError, match="integer ids"):
        zipf_measure(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="0 or more"):
        zipf_measure(torch.tensor([-1]))
    with pytest.raises(ValueError, match="at least one key"):
        zipf_measure(torch.zeros(2, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="ranks must be 0 or more"):
        zipf_measure(torch.tensor([0]), torch.tensor([-3]))


def test_padding_has_no_weight_and_may_have_any_id():
    mask = torch.tensor([False, True, True])
    weights = zipf_measure(torch.tensor([-100, 3, 4]), mask=mask)
    assert weights[0] == 0
    assert torch.allclose(weights[1:], zipf_measure(torch.tensor([3, 4])))
    leverage = torch.tensor([0.1, 0.9])
    weights = unembedding_measure(torch.tensor([99, 0, 1]), leverage, mask=mask)
    assert weights.tolist() == pytest.approx([0.0, 0.1, 0.9])


@pytest.mark.parametrize("rank", [None, 1, 3])
@pytest.mark.parametrize("shape", [(20, 4), (3, 6)])
def test_leverage_scores_against_the_thin_svd(shape, rank):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = torch.linalg.svd(matrix, full_matrices=False).U
    expected = left[:, :rank].square().sum(-1)
    assert torch.allclose(leverage_scores(matrix, rank), expected)


def test_leverage_scores_drop_zero_singular_values():
    column = torch.arange(1.0, 6.0)[:, None]
    matrix = torch.cat([column, 2 * column], 1)
    expected = (column / column.norm()).square().squeeze(-1)
    assert torch.allclose(leverage_scores(matrix), expected.double())
    with pytest.raises(ValueError, match=r"1\.\.1, the rank of the unembedding, but it is 2"):
        leverage_scores(matrix, rank=2)


def test_leverage_scores_over_several_blocks(monkeypatch):
    matrix = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
    whole = leverage_scores(matrix)
    monkeypatch.setattr("attnprobe.functional.measures._VOCABULARY_BLOCK", 7)
    assert torch.allclose(leverage_scores(matrix), whole)
    assert whole.sum().item() == pytest.approx(5)


def test_leverage_scores_refuse():
    for matrix in (torch.zeros(4), torch.full((2, 2), torch.nan)):
        with pytest.raises(ValueError, match="finite matrix"):
            leverage_scores(matrix)
    with pytest.raises(ValueError, match=r"1\.\.0"):
        leverage_scores(torch.zeros(3, 2))


def test_unembedding_measure_refuses():
    with pytest.raises(ValueError, match=r"in 0\.\.1"):
        unembedding_measure(torch.tensor([2]), torch.ones(2))
    with pytest.raises(ValueError, match="negative"):
        unembedding_measure(torch.tensor([0]), torch.tensor([-1.0]))
    with pytest.raises(ValueError, match="no key with a positive weight"):
        unembedding_measure(torch.tensor([0]), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(
    ("measure", "sentence"),
    [
        ("zipf", r"zipf_measure\(tokens\)"),
        ("unembedding", r"unembedding_measure\(tokens, leverage\)"),
        ("euclidean", "'intrinsic', 'counting', 'positional'"),
    ],
)
def test_names_that_are_no_measure(make_pattern, measure, sentence):
    with pytest.raises(ValueError, match=sentence):
        participation_ratio(make_pattern(3), measure)


def test_measure_of_the_wrong_type(make_pattern):
    with pytest.raises(TypeError, match="not list"):
        participation_ratio(make_pattern(3), [1.0, 1.0, 1.0])


def test_positional_measure_needs_a_causal_square_pattern(make_pattern):
    with pytest.raises(ValueError, match="causal"):
        participation_ratio(make_pattern(3), "positional")
    with pytest.raises(ValueError, match=r"2 queries and 3 keys .*uniform causal attention"):
        participation_ratio(make_pattern(2, 3), "positional")


@pytest.mark.parametrize(
    "measure",
    [
        torch.tensor([1.0, -1.0, 1.0]),
        torch.tensor([1.0, torch.nan, 1.0]),
        torch.zeros(3),
        torch.ones(4),
        torch.ones(2, 3),
        torch.tensor(1.0),
    ],
)
def test_weights_that_are_no_measure(make_pattern, measure):
    with pytest.raises(ValueError, match="the measure"):
        participation_ratio(make_pattern(3), measure)


def test_given_weights_are_aligned_with_padding(make_pattern, pad_pattern):
    pattern = make_pattern(4, seed=2, lead=(2,))
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.4, 0.1]], dtype=torch.float64)
    padded, mask = pad_pattern(pattern, 2, 1)
    padded_weights = torch.full((2, 7), torch.nan, dtype=torch.float64)
    padded_weights[:, 2:6] = weights
    spectrum = tdo_spectrum(padded, k=4, measure=padded_weights, mask=mask)
    assert torch.allclose(spectrum, tdo_spectrum(pattern, measure=weights))


def test_given_weights_cover_the_sink(make_pattern):
    pattern = 0.5 * make_pattern(3, seed=3)
    completed = torch.cat([torch.full((3, 1), 0.5, dtype=torch.float64), pattern], -1)
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    assert torch.allclose(tdo_spectrum(pattern, measure=weights, rows="sink"), tdo_spectrum(completed, measure=weights))
    with pytest.raises(ValueError, match=r"4 keys .*sink"):
        tdo_spectrum(pattern, measure=weights[1:], rows="sink")
