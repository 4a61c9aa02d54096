"""A model whose layers are on two devices, as `device_map` makes it: the numbers are those of one device.

The devices are simulated (`simulated_devices.py`). What layers are given is moved by hooks of our own, and where
accelerate is installed by those of its `dispatch_model` too.
"""

import functools
from collections import Counter

import numpy as np
import pytest
import torch
from probe.support import padded, tokens
from simulated_devices import CPU, FIRST, SECOND, SimulatedDevices
from tiny import tiny_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

import attnprobe as ap
from attnprobe.sequences import Sequences

N_LAYERS = 2
DEVICES = [FIRST, SECOND]
# where what is not a layer is: the model's input on the first device, its output on the second
MAP = {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.norm": SECOND, "lm_head": SECOND} | {
    f"model.layers.{layer}": device for layer, device in enumerate(DEVICES)
}
GREEDY = {"do_sample": False, "pad_token_id": 0}


def whole(name="llama", attention="sdpa"):
    """A tiny model on the CPU, without a stop token."""
    model = tiny_model(name, attention=attention, num_hidden_layers=N_LAYERS).requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def by_accelerate(model):
    accelerate = pytest.importorskip("accelerate")
    skipped = model._skip_keys_device_placement
    return accelerate.dispatch_model(model, MAP, main_device=FIRST, skip_keys=skipped, force_hooks=True)


def by_hand(model):
    """What `dispatch_model` does: parameters on their devices, and arguments moved to those, caches excepted."""
    for path, device in MAP.items():
        module = model.get_submodule(path)
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                part._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = buffer.to(device)
        module.register_forward_pre_hook(functools.partial(_arguments_on, device), with_kwargs=True)
    return model


def _arguments_on(device, _, args, kwargs):
    cache = {name: kwargs.pop(name) for name in ("past_key_values",) if name in kwargs}
    args, kwargs = tree_map_only(Tensor, lambda value: value.to(device), (args, kwargs))
    return args, {**kwargs, **cache}


@pytest.fixture
def devices():
    with SimulatedDevices() as devices, torch.no_grad():
        yield devices


def attached(model, call, analyzers, device, **settings):
    """A probe that has listened to a call of the model, which was given what is on `device`."""
    probe = ap.Probe(analyzers, logits=True, **settings)
    with probe.attach(model), same_attention():
        call(model, device)
    return probe


def same_attention():
    """The attention that torch has for a device it does not know, so that rounding is the same everywhere."""
    return sdpa_kernel(SDPBackend.MATH)


@functools.cache
def expected(call, analyzers, **model):
    with torch.no_grad():
        return attached(whole(**model), call, analyzers(), CPU).results()


def assert_same(found, wanted, tolerance=1e-6):
    assert set(found.variables) == set(wanted.variables)
    for name in wanted.variables:
        np.testing.assert_allclose(found[name], wanted[name], rtol=tolerance, atol=tolerance, err_msg=name)


def forward(model, device, length=23):
    model(tokens(length)[0][None].to(device))


def long_forward(model, device):
    forward(model, device, length=120)


def batch(model, device, side="left"):
    ids, mask = padded(tokens(9, 17, 12), side)
    model(ids.to(device), attention_mask=mask.to(device))


def batch_right(model, device):
    batch(model, device, side="right")


def generate(model, device):
    model.generate(tokens(7)[0][None].to(device), max_new_tokens=7, **GREEDY)


def generate_batch(model, device, **more):
    ids, mask = padded(tokens(5, 9), "left")
    model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=7, **GREEDY, **more)


def generate_without_cache(model, device):
    generate_batch(model, device, use_cache=False)


def chunks_then_steps(model, device):
    text, cache = tokens(18)[0][None].to(device), None
    for low, high in ((0, 6), (6, 13), *((i, i + 1) for i in range(13, 18))):
        cache = model(text[:, low:high], past_key_values=cache).past_key_values


CALLS = [forward, batch, batch_right, generate, generate_batch, generate_without_cache, chunks_then_steps]


def five():
    return [
        ap.IntrinsicTDO(trace=True),
        ap.MeanRoutingSplit(trace=True),
        ap.SpectralEntropyBound(trace=True),
        ap.TransportCapacity(trace=True),
        ap.Asymmetry(trace=True),
    ]


def more():
    return [
        ap.IntrinsicTDO(method="sketch", rank=16, trace=True),
        ap.SelfAttention(trace=True, stride=2),
        ap.TDO("unembedding", lambda2=False, trace=True),
        ap.TDO("zipf", trace=True),
        ap.LaplacianEigenvalues(trace=True),
        ap.LogDeterminant(1e-12, trace=True),
        ap.IntrinsicTDO(scope="generation", trace=True),
    ]


def second_eigenvalues():
    return [ap.IntrinsicTDO(), ap.TDO("counting")]


@pytest.mark.parametrize("analyzers", [five, more])
@pytest.mark.parametrize("call", CALLS)
def test_results_are_those_of_one_device(devices, call, analyzers):
    found = attached(by_hand(whole()), call, analyzers(), FIRST).results()
    assert_same(found, expected(call, analyzers))


@pytest.mark.parametrize("given", [FIRST, CPU])
@pytest.mark.parametrize("call", [batch, generate_batch])
def test_a_model_that_accelerate_dispatched(devices, call, given):
    """Its logits are on the device of the tokens, which may be the CPU, whatever the layers' devices."""
    found = attached(by_accelerate(whole()), call, five(), given).results()
    assert_same(found, expected(call, five))


@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("mistral", "sdpa")])
@pytest.mark.parametrize("call", [batch, generate_batch])
def test_patterns_and_windows(devices, call, name, attention):
    found = attached(by_hand(whole(name, attention)), call, five(), FIRST).results()
    assert_same(found, expected(call, five, name=name, attention=attention))


@pytest.mark.parametrize("spread", [by_hand, by_accelerate])
def test_a_bridge_of_such_a_model(devices, spread):
    found = attached(ap.load_model(spread(whole(attention="eager"))), batch, five(), FIRST).results()
    assert_same(found, expected(batch, five, attention="eager"))


def test_a_foreign_mask_is_told_with_the_results(devices):
    """On an accelerator nobody waits for the look at a mask."""
    looks_ahead = {"attention_mask": torch.ones(1, 1, 23, 23, dtype=torch.bool, device=SECOND)}
    model = by_hand(whole())
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | looks_ahead), with_kwargs=True)
    probe = ap.Probe([ap.TransportCapacity()])
    with probe.attach(model):
        forward(model, FIRST)
    with pytest.raises(ValueError, match=r"blocks.1.attn attends by a mask that is not plain causal"):
        probe.results()


def test_eigenvalues_of_long_texts(devices):
    """Another iteration than on the CPU, to the same tolerance."""
    found = attached(by_hand(whole()), long_forward, second_eigenvalues(), FIRST).results()
    assert_same(found, expected(long_forward, second_eigenvalues), tolerance=2e-5)


METHODS = [
    *("SAUQ", "SAUQ-generation", "RAUQ", "LapEigValRAUQ", "LogDetRAUQ", "AttentionScore"),
    *("Perplexity", "MeanTokenEntropy", ap.SAUQ(measure="counting", stride=2)),
]


@pytest.mark.parametrize("spread", [by_hand, by_accelerate])
@pytest.mark.parametrize("completions", [None, [[5, 6, 7, 8], [9, 10, 11]]])
def test_scores_are_those_of_one_device(devices, spread, completions):
    asked = dict(methods=METHODS, completions=completions, max_new_tokens=8)
    prompts = [one.tolist() for one in tokens(5, 9)]
    with same_attention():
        wanted = ap.score(whole(), prompts, **asked)
        found = ap.score(spread(whole()), prompts, **asked)
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert one.uncertainty == pytest.approx(other.uncertainty, rel=1e-6)


def test_samples_are_drawn_where_tokens_are(devices):
    prompts = [[5, 6, 7], [8, 9]]
    found = ap.score(by_hand(whole()), prompts, do_sample=True, top_k=5, max_new_tokens=4)
    assert [len(one.token_ids) for one in found] == [4, 4]


def test_offloaded_weights():
    """Without a device at all: the weights wait elsewhere, and come when they are used."""
    accelerate = pytest.importorskip("accelerate")
    prompts = [one.tolist() for one in tokens(5, 9)]
    wanted = ap.score(whole(), prompts, methods=METHODS, max_new_tokens=4)
    model = accelerate.cpu_offload(whole(), execution_device=CPU)
    for one, other in zip(ap.score(model, prompts, methods=METHODS, max_new_tokens=4), wanted, strict=True):
        assert one.uncertainty == pytest.approx(other.uncertainty, rel=1e-6)
    with pytest.raises(ValueError, match="is offloaded"):
        ap.Probe([ap.TDO("unembedding")]).attach(model)


@pytest.mark.parametrize("analyzers", [five, more])
def test_what_is_kept_of_a_layer_is_on_its_device(devices, analyzers):
    probe = attached(by_hand(whole()), generate_batch, analyzers(), FIRST)
    for site, stream in probe._streams.items():
        kept = list(_tensors_in(stream, set()))
        assert kept
        assert {tensor.device for tensor in kept} == {DEVICES[site.layer]}


def test_only_tokens_and_masks_go_from_device_to_device(devices):
    """Beside what the model moves itself, until results are asked for: no patterns, keys, outputs or sums."""
    model = by_hand(whole())
    moved = []
    for run in (lambda: generate_batch(model, FIRST), lambda: attached(model, generate_batch, five(), FIRST)):
        devices.crossings.clear()
        with same_attention():
            run()
        moved.append(Counter(devices.crossings))
    ours = moved[1] - moved[0]
    assert ours
    assert {crossing.dtype for crossing in ours} <= {torch.int64, torch.bool}
    assert all(len(crossing.shape) <= 2 for crossing in ours)  # [batch] or [batch, slot]


def _tensors_in(value, seen):
    """Every tensor that an object holds on to, those of the whole batch (`Sequences`, `leverage`) left out."""
    if id(value) in seen or isinstance(value, Sequences):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            if name != "_leverage":
                yield from _tensors_in(part, seen)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _tensors_in(part, seen)
    elif type(value).__module__.startswith("attnprobe"):
        yield from _tensors_in(vars(value), seen)
