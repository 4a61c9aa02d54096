import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import laplacian_eigenvalues, mean_laplacian_eigenvalue


def lower_triangular(rows):
    pattern = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, row in enumerate(rows):
        pattern[i, : i + 1] = torch.tensor(row, dtype=torch.float64)
    return pattern


# A head of random weights, and the diagonal that the published LapEigvals code gives for it.
PUBLISHED_PATTERN = lower_triangular(
    [
        [1.0],
        [0.5416228959845932, 0.4583771040154067],
        [0.5800719605155492, 0.12688306999919327, 0.2930449694852575],
        [0.1057934593506257, 0.6969160744031146, 0.017087906889564766, 0.18020255935669485],
        [
            *(0.012416911186230548, 0.8949413010102545, 0.010105665029487038, 0.0061216986457486985),
            0.07641442412827928,
        ],
        [
            *(0.1282775328686782, 0.19059039177583317, 0.48417650125128386, 0.10953054937459819),
            *(0.05511578852964279, 0.03230923619996366),
        ],
        [
            *(0.04976780024880479, 0.00480162107994686, 0.041254850821884216, 0.007366757979105639),
            *(0.011733231710182859, 0.8754800952555276, 0.009595642904547981),
        ],
        [
            *(0.012076548287998914, 0.18291236186506526, 0.03200499069111281, 0.043652844598232564),
            *(0.6174708503107013, 0.08089384770410979, 0.017369042162372197, 0.01361951438040717),
        ],
    ]
)
PUBLISHED_EIGENVALUES = [
    *(-0.6962466114446899, -0.09331682913700468, -0.14676582212382577, -0.11082767736581886),
    *(0.11376914954142228, 0.2972518235199033, 0.0038866996289121086, 0.0),
]


def test_numbers_of_the_published_code():
    assert laplacian_eigenvalues(PUBLISHED_PATTERN).tolist() == pytest.approx(PUBLISHED_EIGENVALUES, abs=1e-14)
    clipped = [min(max(value, 0.0), 1.0) for value in PUBLISHED_EIGENVALUES]
    assert mean_laplacian_eigenvalue(PUBLISHED_PATTERN).item() == pytest.approx(sum(clipped) / 8, abs=1e-14)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 8), seed=st.integers(0, 10_000), scale=st.sampled_from([0.0, 1.0, 4.0, 1000.0]))
def test_against_the_laplacian_matrix(make_pattern, n, seed, scale):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=True)
    degrees = [sum(pattern[u, i].item() for u in range(i, n)) / (n - i) for i in range(n)]
    laplacian = torch.diag(torch.tensor(degrees, dtype=torch.float64)) - pattern
    values = laplacian_eigenvalues(pattern)
    assert values.tolist() == pytest.approx(laplacian.diagonal().tolist(), abs=1e-12)
    assert sorted(values.tolist()) == pytest.approx(sorted(torch.linalg.eigvals(laplacian).real.tolist()), abs=1e-4)
    assert values[-1].item() == 0.0
    assert values.abs().max() <= 1


def test_masked_sequence_ends_in_nan(make_pattern, pad_pattern):
    pattern = make_pattern(4, seed=1, causal=True)
    padded, mask = pad_pattern(pattern, 2, 0)
    values = laplacian_eigenvalues(padded, mask=mask)
    assert torch.allclose(values[:4], laplacian_eigenvalues(pattern))
    assert values[4:].isnan().all()


def test_needs_a_causal_square_pattern(make_pattern):
    with pytest.raises(ValueError, match="causal"):
        laplacian_eigenvalues(make_pattern(3))
    with pytest.raises(ValueError, match="both the query and the key"):
        laplacian_eigenvalues(make_pattern(3, 2))


# -- the mean -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 1.0, 4.0, 1000.0]),
    clip=st.sampled_from(["each", "mean"]),
)
def test_the_mean_is_that_of_the_eigenvalues_and_in_the_unit_interval(make_pattern, n, seed, scale, clip):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=True)
    eigenvalues = laplacian_eigenvalues(pattern).tolist()
    kept = [min(max(value, 0.0), 1.0) for value in eigenvalues] if clip == "each" else eigenvalues
    found = mean_laplacian_eigenvalue(pattern, clip).item()
    assert found == pytest.approx(min(max(sum(kept) / n, 0.0), 1.0), abs=1e-14)
    assert 0 <= found <= 1


@pytest.mark.parametrize("n", [1, 2, 3, 10, 40])
def test_closed_forms(uniform_causal, n):
    # A token that keeps to itself receives 1 of all rows and gives itself 1.
    eye = torch.eye(n, dtype=torch.float64)
    assert laplacian_eigenvalues(eye).tolist() == pytest.approx([1 / (n - i) - 1 for i in range(n)], abs=1e-14)
    assert mean_laplacian_eigenvalue(eye).item() == 0.0
    assert mean_laplacian_eigenvalue(eye, "mean").item() == 0.0
    # Uniform causal attention: token i receives 1/u from the rows u > i, which is less than the 1/(i+1) it keeps.
    uniform = uniform_causal(n)
    expected = [sum(1 / u for u in range(i + 1, n + 1)) / (n - i) - 1 / (i + 1) for i in range(n)]
    assert laplacian_eigenvalues(uniform).tolist() == pytest.approx(expected, abs=1e-14)
    assert max(expected) <= 1e-15
    assert mean_laplacian_eigenvalue(uniform).item() == pytest.approx(0.0, abs=1e-15)
    # Every token looks at the one before it: the inner ones receive 1 of the rows from their own on, and keep nothing.
    if n > 2:
        shift = torch.zeros(n, n, dtype=torch.float64)
        shift[0, 0] = 1
        shift[range(1, n), range(n - 1)] = 1
        inner = sum(1 / (n - i) for i in range(1, n - 1))
        assert mean_laplacian_eigenvalue(shift).item() == pytest.approx(inner / n, abs=1e-14)
        assert mean_laplacian_eigenvalue(shift, "mean").item() == pytest.approx(
            max(inner + 2 / n - 1, 0.0) / n, abs=1e-14
        )


def test_clipped_one_by_one_negative_eigenvalues_cancel_nothing():
    pattern = lower_triangular([[1.0], [1.0, 0.0], [0.0, 1.0, 0.0]])
    assert laplacian_eigenvalues(pattern).tolist() == pytest.approx([2 / 3 - 1, 1 / 2, 0.0])
    assert mean_laplacian_eigenvalue(pattern).item() == pytest.approx(1 / 6)
    assert mean_laplacian_eigenvalue(pattern, "mean").item() == pytest.approx((2 / 3 - 1 + 1 / 2) / 3)


def test_an_unknown_clip():
    with pytest.raises(ValueError, match="unknown clip 'none': use 'each' or 'mean'"):
        mean_laplacian_eigenvalue(torch.eye(2), "none")
