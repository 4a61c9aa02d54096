import pytest
import torch

from attnprobe.functional import asymmetry, laplacian_eigenvalues, participation_ratio
from attnprobe.functional.patterns import check_pattern, inverse_root


@pytest.fixture
def heads(make_pattern):
    return make_pattern(20, seed=1, lead=(2, 4), causal=True)


def test_valid_pattern_passes_unchanged(heads):
    checked = check_pattern(heads, square=True, causal=True)
    assert torch.equal(checked.pattern, heads)
    assert checked.length.tolist() == [[20] * 4] * 2
    assert checked.order is None


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_computing_dtype_and_tolerance_of_each_dtype(make_pattern, dtype, computed):
    pattern = make_pattern(50, seed=2, dtype=dtype)
    assert check_pattern(pattern).pattern.dtype == computed


@pytest.mark.parametrize(
    ("dtype", "off", "accepted"),
    [
        (torch.float64, 5e-7, True),
        (torch.float64, 5e-6, False),
        (torch.float32, 5e-4, True),
        (torch.float32, 5e-3, False),
        (torch.float16, 5e-3, True),
        (torch.float16, 5e-2, False),
    ],
)
def test_row_sum_tolerance_follows_the_dtype(dtype, off, accepted):
    pattern = torch.tensor([[1.0, 0.0], [0.5, 0.5 - off]], dtype=torch.float64).to(dtype)
    if accepted:
        check_pattern(pattern)
    else:
        with pytest.raises(ValueError, match="row 1 sums to"):
            check_pattern(pattern)


def test_row_sum_error_names_head_row_and_both_policies(heads):
    heads[0, 3, 17] *= 0.5
    with pytest.raises(ValueError, match=r"head \(0, 3\), row 17 sums to 0\.5; .*'renormalize'.*'sink'"):
        check_pattern(heads)


def test_row_sum_above_one_is_refused_by_every_policy(heads):
    heads[1, 2, 5] *= 1.5
    for rows in ("error", "renormalize", "sink"):
        with pytest.raises(ValueError, match=r"head \(1, 2\), row 5 sums to 1\.5, more than"):
            check_pattern(heads, rows=rows)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_entry(heads, value):
    heads[1, 0, 4, 2] = value
    with pytest.raises(ValueError, match=r"NaN or infinite entry at head \(1, 0\), row 4, column 2"):
        check_pattern(heads)


def test_negative_entry(heads):
    heads[1, 0, 4, 2] = -0.25
    with pytest.raises(ValueError, match=r"negative entry at head \(1, 0\), row 4, column 2"):
        check_pattern(heads)


@pytest.mark.parametrize("rows", ["error", "renormalize", "sink"])
def test_all_zero_row_suggests_a_mask(heads, rows):
    heads[0, 1, 0] = 0.0
    with pytest.raises(ValueError, match=r"all-zero row at head \(0, 1\), row 0; .*mask="):
        check_pattern(heads, rows=rows)


def test_pattern_without_leading_dimensions_is_named_by_row_alone():
    with pytest.raises(ValueError, match=r"all-zero row at row 1;"):
        check_pattern(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


def test_one_leading_dimension(make_pattern):
    pattern = make_pattern(3, lead=(5,))
    pattern[4, 1, 1] = -1.0
    with pytest.raises(ValueError, match=r"head \(4\), row 1, column 1"):
        check_pattern(pattern)


def test_non_causal_entry_is_located(heads):
    heads[0, 2, 3] = heads[0, 2, 4]
    with pytest.raises(ValueError, match=r"causal.*head \(0, 2\), row 3, column 4"):
        check_pattern(heads, causal=True)


def test_non_square_pattern_says_why(make_pattern):
    with pytest.raises(ValueError, match=r"3 queries and 5 keys \(cross-attention.*transpose"):
        asymmetry(make_pattern(3, 5))


def test_square_definition_refuses_the_sink(make_pattern):
    with pytest.raises(ValueError, match="rows='sink' adds a key"):
        laplacian_eigenvalues(0.5 * make_pattern(4, causal=True), rows="sink")


def test_unknown_policy_lists_the_options(heads):
    with pytest.raises(ValueError, match="'error', 'renormalize', 'sink'"):
        check_pattern(heads, rows="renormalise")


@pytest.mark.parametrize("shape", [(), (3,)])
def test_too_few_dimensions(shape):
    with pytest.raises(ValueError, match=r"\[\.\.\., n_query, n_key\]"):
        check_pattern(torch.ones(shape))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 0)])
def test_empty_pattern(shape):
    with pytest.raises(ValueError, match="at least one of each"):
        check_pattern(torch.ones(shape))


@pytest.mark.parametrize(
    "pattern", [[[1.0]], torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.complex64)]
)
def test_wrong_types(pattern):
    with pytest.raises(TypeError, match="pattern must be"):
        check_pattern(pattern)


def test_the_sentences_can_name_another_tensor():
    with pytest.raises(ValueError, match=r"^block has an all-zero row"):
        check_pattern(torch.zeros(2, 2), what="block")


def test_renormalize_divides_by_the_row_sum():
    checked = check_pattern(torch.tensor([[0.2, 0.2], [1.0, 0.0]]), rows="renormalize")
    assert torch.allclose(checked.pattern, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))


def test_sink_takes_the_missing_mass_in_column_zero():
    checked = check_pattern(torch.tensor([[0.2, 0.2], [1.0, 0.0]]), rows="sink")
    assert torch.allclose(checked.pattern, torch.tensor([[0.6, 0.2, 0.2], [0.0, 1.0, 0.0]]))
    assert checked.key_length.item() == 3
    assert checked.length.item() == 2


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 3), (2, 1)])
@pytest.mark.parametrize("rows", ["error", "renormalize", "sink"])
def test_mask_moves_the_real_tokens_to_the_front(make_pattern, pad_pattern, left, right, rows):
    pattern = make_pattern(5, seed=3, lead=(2,), causal=True)
    padded, mask = pad_pattern(pattern, left, right)
    alone = check_pattern(pattern, rows=rows).pattern
    checked = check_pattern(padded, rows=rows, mask=mask, causal=True)
    assert torch.equal(checked.pattern[..., :5, : alone.shape[-1]], alone)
    assert checked.pattern[..., 5:, :].abs().sum() == 0
    assert checked.pattern[..., alone.shape[-1] :].abs().sum() == 0
    assert checked.length.tolist() == [5, 5]
    assert checked.real_rows.sum(-1).tolist() == [5, 5]


def test_mask_with_a_hole_keeps_the_order():
    pattern = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.75, 0.0, 0.25]])
    checked = check_pattern(pattern, mask=torch.tensor([True, False, True]))
    assert checked.pattern[:2, :2].tolist() == [[1.0, 0.0], [0.75, 0.25]]


def test_sequences_of_different_length_in_one_batch(make_pattern, pad_pattern):
    short, long = make_pattern(3, seed=4, causal=True), make_pattern(6, seed=5, causal=True)
    padded, mask = pad_pattern(short, 3, 0)
    both = torch.stack([padded, long])
    masks = torch.stack([mask, torch.ones(6, dtype=torch.bool)])
    ratio = participation_ratio(both, mask=masks)
    assert torch.allclose(ratio, torch.stack([participation_ratio(short), participation_ratio(long)]))


def test_mass_on_masked_keys_is_an_error(make_pattern):
    pattern = make_pattern(4, lead=(2,))
    with pytest.raises(ValueError, match=r"masked keys at head \(0\), row 1"):
        check_pattern(pattern, mask=torch.tensor([False, True, True, True]))


def test_mass_on_masked_keys_within_tolerance_is_dropped():
    pattern = torch.tensor([[1.0, 0.0], [5e-4, 1 - 5e-4]])
    checked = check_pattern(pattern, mask=torch.tensor([False, True]))
    assert checked.pattern.tolist() == [[pytest.approx(1 - 5e-4), 0.0], [0.0, 0.0]]


def test_all_padded_sequence(heads):
    mask = torch.ones(2, 4, 20, dtype=torch.bool)
    mask[1, 3] = False
    with pytest.raises(ValueError, match=r"every token of head \(1, 3\) is masked out"):
        check_pattern(heads, mask=mask)


def test_mask_must_be_bool(heads):
    with pytest.raises(TypeError, match=r"attention_mask\.bool\(\)"):
        check_pattern(heads, mask=torch.ones(20, dtype=torch.int64))


def test_mask_is_never_lined_up_with_heads_by_broadcasting(make_pattern):
    pattern = make_pattern(5, lead=(3, 3))
    with pytest.raises(ValueError, match=r"mask\[:, None, :\]"):
        check_pattern(pattern, mask=torch.ones(3, 5, dtype=torch.bool))
    check_pattern(pattern, mask=torch.ones(3, 1, 5, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(4,), (2, 4, 19), (3, 4, 20)])
def test_mask_of_the_wrong_shape(heads, shape):
    with pytest.raises(ValueError, match="does not fit"):
        check_pattern(heads, mask=torch.ones(shape, dtype=torch.bool))


def test_mask_on_a_rectangular_pattern(make_pattern):
    with pytest.raises(ValueError, match="square self-attention"):
        check_pattern(make_pattern(2, 3), mask=torch.ones(3, dtype=torch.bool))


def test_values_at_padded_keys_are_ignored_whatever_they_are(make_pattern, pad_pattern):
    padded, mask = pad_pattern(make_pattern(2), 1, 0)
    values = torch.tensor([[torch.nan], [1.0], [2.0]], dtype=torch.float64)
    assert check_pattern(padded, mask=mask).align_keys(values, "values").tolist() == [[1.0], [2.0], [0.0]]


def test_inverse_root_of_zero_is_zero_and_of_a_denormal_is_finite():
    roots = inverse_root(torch.tensor([4.0, 0.0, 1e-40]))
    assert roots[:2].tolist() == [0.5, 0.0]
    assert roots[2].isfinite()
    assert roots[2] > 0
