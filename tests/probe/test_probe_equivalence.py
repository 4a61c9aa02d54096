"""However the tokens reach the model, the numbers are those of the sequence alone in one forward."""

import inspect

import numpy as np
import pytest
import torch
from probe.support import (
    FREE,
    GREEDY,
    alone,
    assert_sequence,
    bridge,
    everything,
    padded,
    tokens,
)

import attnprobe as ap

MODELS = ["llama", "gemma2"]


@pytest.fixture
def model():
    return bridge("llama")


@pytest.fixture(params=MODELS)
def each_model(request):
    return bridge(request.param)


def run(model, call, **attach):
    probe = ap.Probe(everything())
    with probe.attach(model, **attach), torch.no_grad():
        output = call(model)
    return probe.results(), output


def test_one_forward_is_a_dense_computation(model):
    (sequence,) = tokens(14)
    ds = alone(model, sequence, 9)
    _, cache = model.run_with_cache(sequence[None])
    for layer in range(3):
        a = cache[f"blocks.{layer}.attn.hook_pattern"][0].double()
        a = a / a.sum(-1, keepdim=True)
        v = cache[f"blocks.{layer}.attn.hook_v"][0].double().transpose(0, 1).repeat_interleave(2, 0)
        for step in range(1, 7):
            n = 8 + step
            prefix = a[:, :n, :n]
            split = ap.functional.routing_split(prefix, v[:, :n])
            expected = {
                "participation_ratio": ap.functional.participation_ratio(prefix),
                "participation_ratio_counting": ap.functional.participation_ratio(prefix, "counting"),
                "participation_ratio_positional": ap.functional.participation_ratio(prefix, "positional"),
                "routed_fraction": split.routed_fraction,
                "entropy": ap.functional.entropy_bound(prefix, v[:, :n]).entropy,
                "phi": ap.functional.prefix_capacity(prefix).phi,
                "asymmetry": ap.functional.asymmetry(prefix),
                "self_attention": prefix[:, -1, -1],
                "previous_token_attention": prefix[:, -1, -2],
            }
            if step > 1:
                block = prefix[:, 9:, 9:]
                expected["participation_ratio_generation"] = ap.functional.participation_ratio(
                    block, rows="renormalize"
                )
            else:
                assert ds.participation_ratio_generation_trace.sel(layer=layer, step=1).isnull().all()
            for name, value in expected.items():
                found = ds[f"{name}_trace"].sel(layer=layer, step=step).values[0]
                np.testing.assert_allclose(found, value.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
                if step == 6 and not name.endswith("attention"):
                    np.testing.assert_allclose(
                        ds[name].sel(layer=layer).values[0], value.numpy(), rtol=1e-5, atol=1e-5, err_msg=name
                    )
        np.testing.assert_allclose(
            ds.lambda2.sel(layer=layer).values[0], ap.functional.tdo_spectrum(a)[:, 1].numpy(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_in_one_forward(each_model, side):
    sequences, prompts = tokens(14, 9, 11), [10, 4, 11]
    ids, mask = padded(sequences, side)
    ds, _ = run(each_model, lambda m: m(ids, attention_mask=mask), prompt_lengths=prompts)
    assert ds.sizes["sequence"] == 3
    assert ds.length.values.tolist() == [14, 9, 11]
    for i, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        assert_sequence(ds, i, alone(each_model, sequence, prompt))


@pytest.mark.parametrize("cuts", [[3], [1, 2, 7], [13]])
def test_a_text_in_cached_chunks(model, cuts):
    (sequence,) = tokens(14)

    def chunked(m):
        cache = None
        for low, high in zip([0, *cuts], [*cuts, 14], strict=True):
            _, cache = m(
                sequence[None, low:high], return_type="logits_and_cache", past_key_values=cache, use_cache=True
            )

    ds, _ = run(model, chunked, prompt_lengths=9)
    assert ds.sizes["sequence"] == 1
    assert_sequence(ds, 0, alone(model, sequence, 9))


@pytest.mark.parametrize("how", ["whole", "chunked prompt"])
def test_a_padded_batch_decoded_by_hand(model, how):
    prompts = tokens(9, 5)
    answers = torch.stack(tokens(4, 4, seed=1))
    ids, mask = padded(prompts, "left")

    def decode(m):
        cache = None
        for low, high in ((0, 9),) if how == "whole" else ((0, 2), (2, 6), (6, 9)):
            _, cache = m(
                ids[:, low:high],
                attention_mask=mask[:, :high],
                return_type="logits_and_cache",
                past_key_values=cache,
                use_cache=True,
            )
        seen = mask
        for step in range(3):
            seen = torch.cat([seen, torch.ones(2, 1).long()], 1)
            _, cache = m(
                answers[:, step : step + 1],
                attention_mask=seen,
                return_type="logits_and_cache",
                past_key_values=cache,
                use_cache=True,
            )

    ds, _ = run(model, decode)
    for i, prompt in enumerate(prompts):
        assert_sequence(ds, i, alone(model, torch.cat([prompt, answers[i, :3]]), len(prompt)))


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate(each_model, use_cache):
    (prompt,) = tokens(9)
    ds, output = run(
        each_model, lambda m: m.generate(prompt[None], max_new_tokens=12, use_past_kv_cache=use_cache, **FREE)
    )
    assert ds.sizes["step"] == 12
    assert_sequence(ds, 0, alone(each_model, output[0, :-1], 9))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_padded_batch_generates(each_model, use_cache):
    prompts = tokens(9, 3, 6)
    ids, mask = padded(prompts, "left")
    ds, output = run(
        each_model,
        lambda m: m.generate(ids, attention_mask=mask, max_new_tokens=10, use_past_kv_cache=use_cache, **FREE),
    )
    for i, prompt in enumerate(prompts):
        finished = torch.cat([prompt, output[i, 9:-1]])
        assert_sequence(ds, i, alone(each_model, finished, len(prompt)))


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("prompt_length", [1, 2, 9])
def test_one_and_two_new_tokens(model, new, prompt_length):
    (prompt,) = tokens(prompt_length)
    ds, output = run(model, lambda m: m.generate(prompt[None], max_new_tokens=new, **FREE))
    assert ds.sizes["step"] == new
    assert_sequence(ds, 0, alone(model, output[0, :-1], prompt_length))


def test_generate_stream(model):
    (prompt,) = tokens(9)
    ds, parts = run(
        model, lambda m: list(m.generate_stream(prompt[None], max_new_tokens=7, max_tokens_per_yield=2, **FREE))
    )
    output = model.generate(prompt[None], max_new_tokens=7, **FREE)
    assert len(parts) > 1
    assert_sequence(ds, 0, alone(model, output[0, :-1], 9))


def test_a_stream_abandoned_half_way(model):
    """What was read is there; the next call starts anew."""
    (prompt,) = tokens(9)
    probe = ap.Probe(everything())
    with probe.attach(model):
        stream = model.generate_stream(prompt[None], max_new_tokens=8, max_tokens_per_yield=1, **FREE)
        next(stream)
        next(stream)
        stream.close()
        with torch.no_grad():
            model(prompt[None])
    ds = probe.results()
    assert ds.sizes["sequence"] == 2
    assert 9 <= int(ds.length[0]) < 17
    assert_sequence(ds, 1, alone(model, prompt, 9))


def ragged(model):
    """Prompts and a stop token that ends them at different steps, one of them not at all or last."""
    for seed in range(200):
        prompts = tokens(7, 3, 5, seed=seed)
        ids, mask = padded(prompts, "left")
        with torch.no_grad():
            output = model.generate(ids, attention_mask=mask, max_new_tokens=9, **FREE)[:, 7:]
        for stop in output.unique().tolist():
            first = [row.tolist().index(stop) if stop in row.tolist() else 9 for row in output]
            if len(set(first)) == 3 and min(first) < 3 and 0 < sorted(first)[1] < 9:
                return prompts, ids, mask, stop
    raise AssertionError("no prompts found that end at different steps")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("how", ["generate", "generate_stream"])
def test_sequences_that_end_at_different_steps(each_model, use_cache, how):
    if "attention_mask" not in inspect.signature(getattr(each_model, how)).parameters:
        pytest.skip(f"{how} of this transformer-lens takes no mask")
    prompts, ids, mask, stop = ragged(each_model)
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 9,
        "eos_token_id": stop,
        "use_past_kv_cache": use_cache,
        **GREEDY,
    }
    output = each_model.generate(ids, **settings)
    ds, _ = run(each_model, lambda m: list(getattr(m, how)(ids, **settings)))
    lengths = set()
    for i, prompt in enumerate(prompts):
        answer = output[i, 7:].tolist()
        answer = answer[: answer.index(stop) + 1] if stop in answer else answer
        lengths.add(len(answer))
        finished = torch.cat([prompt, torch.tensor(answer[:-1], dtype=torch.int64)])
        assert_sequence(ds, i, alone(each_model, finished, len(prompt)))
    assert len(lengths) > 1


def test_a_stop_token_inside_the_prompt_stops_nothing(model):
    prompts = tokens(6, 4)
    prompts[0][2] = prompts[1][3] = 50
    ids, mask = padded(prompts, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 5, "eos_token_id": 50, **GREEDY}
    ds, output = run(model, lambda m: m.generate(ids, **settings))
    for i, prompt in enumerate(prompts):
        answer = output[i, 6:].tolist()
        answer = answer[: answer.index(50) + 1] if 50 in answer else answer
        finished = torch.cat([prompt, torch.tensor(answer[:-1], dtype=torch.int64)])
        assert_sequence(ds, i, alone(model, finished, len(prompt)))


def test_an_immediate_end(model):
    (prompt,) = tokens(6)
    first = int(model.generate(prompt[None], max_new_tokens=1, **FREE)[0, -1])
    ds, _ = run(model, lambda m: m.generate(prompt[None], max_new_tokens=5, eos_token_id=first, **GREEDY))
    assert ds.sizes["step"] == 1
    assert_sequence(ds, 0, alone(model, prompt, 6))


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_returned_cache_adds_nothing(model, new, use_cache):
    (prompt,) = tokens(9)
    settings = {"max_new_tokens": new, "use_past_kv_cache": use_cache, **FREE}
    ds, _ = run(model, lambda m: m.generate(prompt[None], return_cache=True, **settings))
    output = model.generate(prompt[None], **settings)
    assert ds.sizes["sequence"] == 1
    assert_sequence(ds, 0, alone(model, output[0, :-1], 9))


def test_long_generation_crosses_every_buffer(model):
    (prompt,) = tokens(30)
    ds, output = run(model, lambda m: m.generate(prompt[None], max_new_tokens=45, **FREE))
    assert ds.sizes["step"] == 45
    assert_sequence(ds, 0, alone(model, output[0, :-1], 30))


def test_final_values_do_not_depend_on_the_trace(model):
    (prompt,) = tokens(30)
    datasets = []
    for trace in (False, True):
        probe = ap.Probe([ap.IntrinsicTDO(trace=trace), ap.MeanRoutingSplit(trace=trace), ap.Asymmetry()])
        with probe.attach(model):
            model.generate(prompt[None], max_new_tokens=40, **FREE)
        datasets.append(probe.results())
    assert "step" not in datasets[0].sizes
    for name in datasets[0].data_vars:
        np.testing.assert_allclose(datasets[1][name], datasets[0][name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_results_may_be_read_in_the_middle(model):
    (prompt,) = tokens(9)
    expected = [alone(model, prompt[:n], 5) for n in range(5, 10)]
    probe = ap.Probe(everything())
    with probe.attach(model), torch.no_grad():
        _, cache = model(prompt[None, :5], return_type="logits_and_cache", use_cache=True)
        assert_sequence(probe.results(), 0, expected[0])
        for i in range(5, 9):
            _, cache = model(
                prompt[None, i : i + 1], return_type="logits_and_cache", past_key_values=cache, use_cache=True
            )
            assert_sequence(probe.results(), 0, expected[i - 4])


# -- token probabilities -----------------------------------------------------------------------------------


def dense_tokens(model, prompt, answer):
    with torch.no_grad():
        logits = model(torch.cat([prompt, torch.tensor(answer)])[None])[0]
    log_probability = logits.double().log_softmax(-1)[len(prompt) - 1 : -1]
    chosen = log_probability[torch.arange(len(answer)), answer]
    return chosen.numpy(), -(log_probability.exp() * log_probability).sum(-1).numpy()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("ends", ["together", "raggedly"])
def test_token_probabilities_and_entropies(model, use_cache, ends):
    prompts, ids, mask, stop = ragged(model)
    settings = {"attention_mask": mask, "max_new_tokens": 9, "use_past_kv_cache": use_cache, **GREEDY}
    settings |= {"eos_token_id": stop} if ends == "raggedly" else {"stop_at_eos": False}
    probe = ap.Probe([ap.SelfAttention()], logits=True)
    with probe.attach(model):
        output = model.generate(ids, **settings)
    ds = probe.results()
    assert ds.token_log_probability.dims == ("sequence", "step")
    for i, prompt in enumerate(prompts):
        answer = output[i, 7:].tolist()
        if ends == "raggedly" and stop in answer:
            answer = answer[: answer.index(stop) + 1]
        log_probability, entropy = dense_tokens(model, prompt, answer)
        n = len(answer)
        np.testing.assert_allclose(ds.token_log_probability.values[i, :n], log_probability, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(ds.token_entropy.values[i, :n], entropy, rtol=1e-4, atol=1e-4)
        assert np.isnan(ds.token_log_probability.values[i, n:]).all()
        assert np.isnan(ds.token_entropy.values[i, n:]).all()
    assert ds.attrs["vocabulary"] == 97


@pytest.mark.parametrize("side", ["left", "right"])
def test_token_probabilities_of_text_that_is_read(model, side):
    sequences, prompts = tokens(12, 8, 10), [7, 3, 10]
    ids, mask = padded(sequences, side)
    probe = ap.Probe([ap.SelfAttention()], logits=True)
    with probe.attach(model, prompt_lengths=prompts), torch.no_grad():
        model(ids, attention_mask=mask)
        before = probe.results()
        probe.last_tokens(torch.tensor([5, 6, 7]))
    ds = probe.results()
    for i, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        answer = [*sequence[prompt:].tolist(), 5 + i]
        log_probability, entropy = dense_tokens(model, sequence[:prompt], answer)
        n = len(answer)
        np.testing.assert_allclose(ds.token_log_probability.values[i, :n], log_probability, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(ds.token_entropy.values[i, :n], entropy, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            before.token_log_probability.values[i, : n - 1], log_probability[:-1], rtol=1e-4, atol=1e-4
        )
        assert np.isnan(before.token_log_probability.values[i, n - 1])


def test_token_probabilities_survive_a_prompt_in_chunks(model):
    (sequence,) = tokens(10)
    probe = ap.Probe([ap.SelfAttention()], logits=True)
    cache = None
    with probe.attach(model), torch.no_grad():
        for low, high in ((0, 3), (3, 7), (7, 8), (8, 9), (9, 10)):
            _, cache = model(
                sequence[None, low:high], return_type="logits_and_cache", past_key_values=cache, use_cache=True
            )
    ds = probe.results()
    log_probability, entropy = dense_tokens(model, sequence[:7], [*sequence[7:].tolist(), 0])
    assert ds.sizes["step"] == 4
    np.testing.assert_allclose(ds.token_log_probability.values[0, :3], log_probability[:3], rtol=1e-4, atol=1e-4)
    assert np.isnan(ds.token_log_probability.values[0, 3])
    np.testing.assert_allclose(ds.token_entropy.values[0], entropy, rtol=1e-4, atol=1e-4)


def test_many_rows_at_once(model):
    """More rows than are valued together, from a text whose every token is traced."""
    (sequence,) = tokens(75)
    probe = ap.Probe([ap.IntrinsicTDO(trace=True)], logits=True)
    with probe.attach(model, prompt_lengths=1), torch.no_grad():
        model(sequence[None])
    ds = probe.results()
    assert ds.sizes["step"] == 75
    log_probability, _ = dense_tokens(model, sequence[:1], sequence[1:].tolist())
    np.testing.assert_allclose(ds.token_log_probability.values[0, :74], log_probability, rtol=1e-4, atol=1e-4)
    _, cache = model.run_with_cache(sequence[None])
    for layer in range(3):
        expected = ap.functional.prefix_participation_ratio(cache[f"blocks.{layer}.attn.hook_pattern"][0].double())
        np.testing.assert_allclose(
            ds.participation_ratio_trace.sel(layer=layer).values[0], expected.numpy(), rtol=1e-5, atol=1e-5
        )
