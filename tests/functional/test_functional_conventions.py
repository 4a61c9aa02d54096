"""What every function of a pattern promises, whatever it computes."""

import pytest
import torch

from attnprobe import functional
from attnprobe.functional import (
    asymmetry,
    attention_log_determinant,
    duplicate_token_score,
    entropy_bound,
    hodge_split,
    induction_score,
    laplacian_eigenvalues,
    mean_laplacian_eigenvalue,
    mean_look_back,
    participation_ratio,
    prefix_capacity,
    prefix_landscape,
    prefix_participation_ratio,
    routing_split,
    row_entropy,
    sink_score,
    spectral_capacity,
    tdo_matrix,
    tdo_spectrum,
    threshold_capacity,
    value_weighted_attention,
)

D = 3


def values_for(pattern):
    generator = torch.Generator().manual_seed(0)
    n_key = pattern.shape[-1]
    return torch.randn(n_key, D, generator=generator, dtype=torch.float64).to(pattern.dtype)


def with_values(function):
    """Values belong to real tokens: those of padded ones are NaN, to show that they are not read."""

    def call(pattern, *, mask=None, **options):
        if mask is None:
            return function(pattern, values_for(pattern), **options)
        values = torch.full((pattern.shape[-1], D), torch.nan, dtype=pattern.dtype)
        values[mask] = values_for(pattern[..., mask])
        return function(pattern, values, mask=mask, **options)

    return call


def with_tokens(function):
    """Two tokens by turns; padding has an id of its own, to show that it is not read."""

    def call(pattern, *, mask=None, **options):
        tokens = torch.arange(pattern.shape[-1]) % 2
        if mask is not None:
            tokens = torch.full_like(tokens, -1).masked_scatter(mask, tokens)
        return function(pattern, tokens, mask=mask, **options)

    return call


# name -> (call, axes after the leading ones, may be rectangular)
FUNCTIONS = {
    "participation_ratio": (participation_ratio, 0, True),
    "participation_ratio, counting": (lambda a, **o: participation_ratio(a, "counting", **o), 0, True),
    "participation_ratio, positional": (lambda a, **o: participation_ratio(a, "positional", **o), 0, False),
    "prefix_participation_ratio": (prefix_participation_ratio, 1, False),
    "tdo_matrix": (tdo_matrix, 2, True),
    "tdo_spectrum": (tdo_spectrum, 1, True),
    "tdo_spectrum, counting": (lambda a, **o: tdo_spectrum(a, 2, "counting", **o), 1, True),
    "tdo_spectrum, positional": (lambda a, **o: tdo_spectrum(a, 2, "positional", **o), 1, False),
    "routing_split": (with_values(routing_split), 0, True),
    "entropy_bound": (with_values(entropy_bound), 0, True),
    "prefix_landscape": (prefix_landscape, 1, False),
    "prefix_capacity": (prefix_capacity, 0, False),
    "threshold_capacity": (threshold_capacity, 0, True),
    "spectral_capacity": (spectral_capacity, 0, True),
    "asymmetry": (asymmetry, 0, False),
    "asymmetry, normalized": (lambda a, **o: asymmetry(a, "normalized", **o), 0, False),
    "hodge_split": (hodge_split, 0, False),
    "laplacian_eigenvalues": (laplacian_eigenvalues, 1, False),
    "mean_laplacian_eigenvalue": (mean_laplacian_eigenvalue, 0, False),
    "mean_laplacian_eigenvalue, mean": (lambda a, **o: mean_laplacian_eigenvalue(a, "mean", **o), 0, False),
    "attention_log_determinant": (attention_log_determinant, 0, False),
    "attention_log_determinant, epsilon": (lambda a, **o: attention_log_determinant(a, 1e-3, **o), 0, False),
    "sink_score": (sink_score, 0, True),
    "row_entropy": (row_entropy, 0, True),
    "row_entropy, without key 1": (lambda a, **o: row_entropy(a, (1,), **o), 0, True),
    "mean_look_back": (mean_look_back, 0, False),
    "mean_look_back, without key 1": (lambda a, **o: mean_look_back(a, (1,), **o), 0, False),
    "duplicate_token_score": (with_tokens(duplicate_token_score), 0, False),
    "induction_score": (with_tokens(induction_score), 0, False),
    "value_weighted_attention": (with_values(value_weighted_attention), 0, True),
}
# in their own tests: to these the extra key is not a key like the others
SINK_IS_NO_TOKEN = (
    "routing_split",
    "entropy_bound",
    "sink_score",
    "row_entropy, without key 1",
    "value_weighted_attention",
)
NOTHING_OF_ONE_TOKEN = ("prefix_capacity", "duplicate_token_score", "induction_score")
EVERY = pytest.mark.parametrize("name", FUNCTIONS)


def fields(result):
    """The tensors of a result, bare or in a NamedTuple."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


@EVERY
def test_leading_dimensions_are_kept_and_mean_a_loop(make_pattern, name):
    call, axes, _ = FUNCTIONS[name]
    pattern = make_pattern(6, seed=1, lead=(2, 3), causal=True)
    together = fields(call(pattern))
    for i in range(2):
        for j in range(3):
            for field, alone in zip(together, fields(call(pattern[i, j])), strict=True):
                assert field.shape[:2] == (2, 3)
                assert field.ndim == 2 + axes
                assert torch.allclose(field[i, j], alone, atol=1e-7, equal_nan=True)


@EVERY
def test_no_leading_dimension_and_empty_batches(make_pattern, name):
    call, axes, _ = FUNCTIONS[name]
    assert all(field.ndim == axes for field in fields(call(make_pattern(4, causal=True))))
    empty = fields(call(torch.zeros(0, 2, 4, 4, dtype=torch.float64)))
    assert all(field.shape[:2] == (0, 2) for field in empty)


@EVERY
def test_precision_follows_the_input(make_pattern, name):
    call, _, _ = FUNCTIONS[name]
    exact = make_pattern(8, seed=2, lead=(2,), causal=True, scale=1.0)
    reference = fields(call(exact))
    assert all(field.dtype == torch.float64 for field in reference)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        for field, expected in zip(fields(call(exact.to(dtype))), reference, strict=True):
            assert field.dtype == torch.float32
            assert torch.allclose(field.double(), expected, atol=tolerance, rtol=tolerance)


@EVERY
def test_float32_loses_nothing_over_long_sequences(make_pattern, name):
    call, _, _ = FUNCTIONS[name]
    single = make_pattern(300, seed=11, causal=True, dtype=torch.float32)
    # The same numbers in float64, made rows of float64 accuracy: what is left is rounding in the computation.
    double = single.double() / single.double().sum(-1, keepdim=True)
    for field, expected in zip(fields(call(single)), fields(call(double)), strict=True):
        assert torch.allclose(field.double(), expected, atol=2e-6, rtol=2e-6)


@EVERY
@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 3), (2, 2)])
def test_padding_changes_nothing(make_pattern, pad_pattern, name, left, right):
    call, _, _ = FUNCTIONS[name]
    pattern = make_pattern(5, seed=3, lead=(2,), causal=True)
    padded, mask = pad_pattern(pattern, left, right)
    for field, alone in zip(fields(call(padded, mask=mask)), fields(call(pattern)), strict=True):
        real = field[tuple(slice(size) for size in alone.shape)]
        assert torch.allclose(real, alone, atol=1e-7)
        if name in ("prefix_landscape", "prefix_participation_ratio", "laplacian_eigenvalues"):
            assert field[..., alone.shape[-1] :].isnan().all()


@EVERY
def test_renormalize_means_dividing_first(make_pattern, name):
    call, _, _ = FUNCTIONS[name]
    pattern = make_pattern(5, seed=4, causal=True)
    block = pattern * torch.tensor([1.0, 0.3, 0.7, 0.1, 0.9]).double()[:, None]
    with pytest.raises(ValueError, match="row 1 sums to"):
        call(block)
    for field, expected in zip(fields(call(block, rows="renormalize")), fields(call(pattern)), strict=True):
        assert torch.allclose(field, expected, atol=1e-7)


@EVERY
def test_sink_is_accepted_or_refused(make_pattern, name):
    call, _, rectangular = FUNCTIONS[name]
    block = 0.5 * make_pattern(5, seed=5, causal=True)
    if not rectangular:
        with pytest.raises(ValueError, match="rows='sink' adds a key"):
            call(block, rows="sink")
    elif name not in SINK_IS_NO_TOKEN:
        completed = torch.cat([torch.full((5, 1), 0.5, dtype=torch.float64), block], -1)
        for field, expected in zip(fields(call(block, rows="sink")), fields(call(completed)), strict=True):
            assert torch.allclose(field, expected, atol=1e-7)


@EVERY
def test_sink_and_mask_together(make_pattern, pad_pattern, name):
    call, _, rectangular = FUNCTIONS[name]
    if rectangular:
        block = 0.5 * make_pattern(5, seed=6, causal=True)
        padded, mask = pad_pattern(block, 1, 2)
        results = call(padded, mask=mask, rows="sink"), call(block, rows="sink")
        for field, alone in zip(*map(fields, results), strict=True):
            real = field[tuple(slice(size) for size in alone.shape)]
            assert torch.allclose(real, alone, atol=1e-7)


@EVERY
def test_rectangular_patterns_are_accepted_or_refused(make_pattern, name):
    call, _, rectangular = FUNCTIONS[name]
    for shape in ((3, 5), (5, 3)):
        pattern = make_pattern(*shape, seed=7)
        if rectangular:
            assert all(field.isfinite().all() for field in fields(call(pattern)))
        else:
            with pytest.raises(ValueError, match=f"{shape[0]} queries and {shape[1]} keys"):
                call(pattern)


@EVERY
def test_inputs_are_left_alone(make_pattern, pad_pattern, name):
    call, _, rectangular = FUNCTIONS[name]
    padded, mask = pad_pattern(make_pattern(4, seed=8, causal=True), 1, 1)
    before = padded.clone(), mask.clone()
    for rows in ("error", "renormalize", "sink")[: 3 if rectangular else 2]:
        call(padded, mask=mask, rows=rows)
    assert torch.equal(padded.nan_to_num(-1), before[0].nan_to_num(-1))
    assert torch.equal(mask, before[1])


@EVERY
def test_errors_name_the_head_and_the_row(make_pattern, name):
    call, _, _ = FUNCTIONS[name]
    pattern = make_pattern(6, seed=9, lead=(1, 4), causal=True)
    pattern[0, 3, 4] = 0.0
    with pytest.raises(ValueError, match=r"all-zero row at head \(0, 3\), row 4; .*mask="):
        call(pattern)


@EVERY
def test_a_single_token(name):
    call, _, _ = FUNCTIONS[name]
    if name not in ("tdo_spectrum, counting", "tdo_spectrum, positional"):  # these ask for two eigenvalues
        one = fields(call(torch.ones(2, 1, 1, dtype=torch.float64)))
        assert all(field.shape[0] == 2 for field in one)
        assert name in NOTHING_OF_ONE_TOKEN or not any(field.isnan().any() for field in one)


@EVERY
def test_non_contiguous_patterns(make_pattern, name):
    call, _, _ = FUNCTIONS[name]
    pattern = make_pattern(5, seed=10, lead=(2, 3), causal=True)
    strided = pattern.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not strided.is_contiguous()
    for field, expected in zip(fields(call(strided)), fields(call(pattern)), strict=True):
        assert torch.allclose(field, expected, atol=1e-7)


def test_every_public_name_is_documented_with_an_example():
    for name in functional.__all__:
        public = getattr(functional, name)
        assert public.__doc__, name
        if not isinstance(public, type):
            assert ">>>" in public.__doc__, name
            assert name == "check_pattern" or "Source:" in public.__doc__, name
