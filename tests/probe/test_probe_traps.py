"""Uses that would give a number which is not the definition's, if nobody looked."""

import pytest
import torch
import transformers
from probe.support import FREE, bridge, tokens
from tiny import tiny_bridge

import attnprobe as ap


def tdo(**settings):
    return ap.Probe([ap.IntrinsicTDO(lambda2=False, trace=True)], **settings)


@pytest.fixture
def model():
    return tiny_bridge("llama")


def ending_early(model):
    """A batch of two prompts of 6 tokens, and the token with which the first row, and no other, ends at step 3 of 8."""
    for seed in range(100):
        batch = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(seed))
        free = model.original_model.generate(batch, max_new_tokens=8, do_sample=False, eos_token_id=None)
        stop = int(free[0, 8])
        if stop not in free[1, 6:].tolist() and stop not in free[0, 6:8].tolist():
            return batch, stop
    raise AssertionError("no such batch")


def test_another_cache_of_the_same_length_is_refused(model):
    a, b = tokens(6, 6)
    inner = model.original_model
    probe = tdo()
    with probe.attach(model), torch.no_grad():
        first = inner(a[None], use_cache=True)
        inner(b[None], use_cache=True)
        with pytest.raises(ValueError, match="cache is not the one"):
            inner(torch.tensor([[7]]), past_key_values=first.past_key_values, use_cache=True)


def test_beams_of_a_generation_config_are_refused(model):
    (a,) = tokens(5)
    with tdo().attach(model), pytest.raises(ValueError, match="num_beams=3"):
        model.original_model.generate(a[None], num_beams=3, max_new_tokens=2)
    config = transformers.GenerationConfig(num_beams=2, max_new_tokens=2)
    with tdo().attach(model), pytest.raises(ValueError, match="num_beams=2"):
        model.original_model.generate(a[None], generation_config=config)
    model.original_model.generation_config.num_beams = 4
    with tdo().attach(model), pytest.raises(ValueError, match="num_beams=4"):
        model.original_model.generate(a[None], max_new_tokens=2)


def test_generate_of_the_model_inside_ends_rows_at_its_own_stop_tokens(model):
    batch, stop = ending_early(model)
    probe = tdo()
    with probe.attach(model):
        model.original_model.generate(batch, max_new_tokens=8, do_sample=False, eos_token_id=stop, pad_token_id=0)
    assert probe.results()["length"].values.tolist() == [8, 13]
    assert "generate" not in vars(model.original_model)


def test_criteria_of_ones_own_in_a_batch_are_refused(model):
    batch = torch.stack(tokens(6, 6))
    never = transformers.StoppingCriteriaList([lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)])
    with tdo().attach(model), pytest.raises(ValueError, match="generate one at a time"):
        model.original_model.generate(batch, max_new_tokens=3, do_sample=False, stopping_criteria=never)


def test_results_of_other_layers_do_not_mix(model):
    probe = tdo(layers="middle")
    with probe.attach(model):
        model(tokens(5)[0][None])
    with pytest.raises(ValueError, match="results of other layers"):
        probe.attach(tiny_bridge("llama", num_hidden_layers=2))
    probe.reset()
    with probe.attach(tiny_bridge("llama", num_hidden_layers=1)) as attached:
        attached.detach()


def test_a_prompt_longer_than_the_text_is_told(model):
    probe = tdo()
    with probe.attach(model, prompt_lengths=8):
        model(tokens(5)[0][None])
    with pytest.raises(ValueError, match="a prompt of 8 tokens, and it has 5"):
        probe.results()


def test_prompt_lengths_of_a_second_attach_are_not_ignored(model):
    probe = tdo()
    with probe.attach(model, prompt_lengths=2), pytest.raises(ValueError, match="attached already"):
        probe.attach(model, prompt_lengths=4)


def test_a_users_hook_that_came_later_is_seen(model):
    (a,) = tokens(6)

    def identity(pattern, hook):
        return torch.eye(pattern.shape[-1]).expand_as(pattern).contiguous()

    probe = tdo(layers=[0])
    with probe.attach(model), model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", identity)]):
        model(a[None])
    assert torch.tensor(probe.results().participation_ratio.values).allclose(torch.ones(1, 1, 4))


def test_a_prompt_in_chunks_with_one_token_left_over():
    model = bridge("llama")
    (a,) = tokens(9)
    probe = tdo()
    with probe.attach(model):
        model.original_model.generate(
            a[None], max_new_tokens=4, do_sample=False, prefill_chunk_size=4, eos_token_id=None
        )
        model.generate(a[None], max_new_tokens=4, **FREE)
    ds = probe.results()
    assert ds["prompt_length"].values.tolist() == [9, 9]
    torch.testing.assert_close(
        torch.tensor(ds.participation_ratio_trace.values[0]), torch.tensor(ds.participation_ratio_trace.values[1])
    )


def test_logits_that_hold_nan_are_told(model):
    handle = model.original_model.lm_head.register_forward_hook(lambda module, args, output: output * float("nan"))
    try:
        with pytest.raises(ValueError, match="logits hold NaN"):
            ap.score(model, [[5, 6, 7]], max_new_tokens=2)
    finally:
        handle.remove()


def test_a_batch_that_ended_is_not_taken_further(model):
    batch, stop = ending_early(model)
    inner = model.original_model
    with tdo().attach(model), torch.no_grad():
        out = inner.generate(
            batch, max_new_tokens=6, do_sample=False, eos_token_id=stop, pad_token_id=0, return_dict_in_generate=True
        )
        with pytest.raises(ValueError, match="ended in the last generate"):
            inner(torch.full((2, 3), 9), past_key_values=out.past_key_values, use_cache=True)


@pytest.mark.parametrize(
    ("computed", "sentence"),
    [
        (lambda self: None, "NoneType, not a dict"),
        (lambda self: {}, "not a dict"),
        (lambda self: {"x": 1.0}, "'x' of shape None"),
        (lambda self: {"x": torch.zeros(1)}, r"'x' of shape \(1,\)"),
        (lambda self: {"x": torch.zeros(1, 4, 3)}, "3 entries on the position axis"),
    ],
)
def test_results_of_the_wrong_form(model, computed, sentence):
    kind = type("Odd", (ap.Analyzer,), {"update": lambda self, rows: None, "compute": computed})
    probe = ap.Probe([kind()])
    with probe.attach(model):
        model(tokens(9)[0][None])
    with pytest.raises((ValueError, TypeError), match=sentence):
        probe.results()


def test_a_sum_that_was_never_kept(model):
    class Forgetful(ap.Analyzer):
        def update(self, rows):
            self.accumulate(mass=rows.pattern.sum((-1, -2)))

        def compute(self):
            return {"x": self.total["mas"]}

    probe = ap.Probe([Forgetful()])
    with probe.attach(model):
        model(tokens(5)[0][None])
    with pytest.raises(KeyError, match="nothing was accumulated as 'mas': there are mass"):
        probe.results()


@pytest.mark.parametrize("eps", [1e-2, 1e-3])
def test_a_head_that_looks_at_itself_keeps_its_small_asymmetry(eps):
    n = 256
    uniform = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
    pattern = ((1 - eps) * torch.eye(n, dtype=torch.float64) + eps * uniform)[None, None]
    analyzer = ap.Asymmetry()
    for low in range(0, n, 50):
        analyzer.update(ap.Rows.from_pattern(pattern[:, :, low : low + 50].float(), start=low))
    expected = ap.functional.asymmetry(pattern)
    torch.testing.assert_close(analyzer.compute()["asymmetry"].double(), expected, rtol=2e-4, atol=0)


def test_prefix_participation_ratio_has_a_gradient():
    logits = torch.randn(20, 20, dtype=torch.float64, requires_grad=True)

    def last(x):
        causal = x.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
        return ap.functional.prefix_participation_ratio(causal.softmax(-1)).sum()

    torch.autograd.gradcheck(last, (logits,))


def test_whole_numbers_only():
    with pytest.raises(TypeError, match=r"layers=\[1.7\]: give whole numbers"):
        ap.Probe([ap.Asymmetry()], layers=[1.7])
    with pytest.raises(TypeError, match="heads=None"):
        ap.Probe([ap.Asymmetry()], heads=None)
    with pytest.raises(TypeError, match="pattern="):
        ap.Probe([ap.Asymmetry()], pattern=["blocks.0"])
    import numpy as np

    assert ap.Probe([ap.Asymmetry()], layers=np.arange(2)).layers == (0, 1)
    assert ap.Probe([ap.Asymmetry()], layers=np.int64(1)).layers == (1,)
