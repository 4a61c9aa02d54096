"""Attaching, detaching, other hooks, and failures: the model is always left as it was found."""

# ruff: noqa: PT012

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from probe.support import FREE, alone, assert_sequence, bridge, dropped, everything, padded, scrap, tokens, traces_on

import attnprobe as ap


@pytest.fixture
def model():
    """The shared bridge, checked to be left as it was."""
    model = bridge("llama")
    before = traces_on(model)
    yield model
    after = traces_on(model)
    if after != before:
        scrap()
    assert after == before


def small():
    return [ap.IntrinsicTDO(), ap.TransportCapacity()]


def read(model, *sequences):
    with torch.no_grad():
        for sequence in sequences:
            model(sequence[None])


def assert_reads(probe, model, sequences):
    """The probe collected exactly these sequences, one call each."""
    ds = probe.results()
    assert ds.length.values.tolist() == [len(sequence) for sequence in sequences]
    assert ds.call.values.tolist() == list(range(len(sequences)))
    for i, sequence in enumerate(sequences):
        expected = alone(model, sequence, len(sequence), small())
        np.testing.assert_allclose(
            ds.participation_ratio.values[i], expected.participation_ratio.values[0], rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(ds.phi.values[i], expected.phi.values[0], rtol=1e-5, atol=1e-5)


# -- several calls, several probes -------------------------------------------------------------------------


def test_every_call_starts_new_sequences_and_is_labelled(model):
    a, b, c = tokens(5, 8, 8)
    probe = ap.Probe(everything())
    with probe.attach(model), torch.no_grad():
        model(a[None])
        output = model.generate(torch.stack([b, c]), max_new_tokens=4, **FREE)
        model(b[None])
    ds = probe.results()
    assert ds.call.values.tolist() == [0, 1, 1, 2]
    assert ds.prompt_length.values.tolist() == [5, 8, 8, 8]
    assert ds.length.values.tolist() == [5, 11, 11, 8]
    assert_sequence(ds, 0, alone(model, a, 5))
    assert_sequence(ds, 1, alone(model, output[0, :-1], 8))
    assert_sequence(ds, 2, alone(model, output[1, :-1], 8))
    assert_sequence(ds, 3, alone(model, b, 8))


def test_detaching_and_attaching_again_keeps_what_was_collected(model):
    sequences = tokens(5, 8, 6)
    probe = ap.Probe(small())
    for sequence in sequences:
        with probe.attach(model):
            read(model, sequence)
        assert probe.results().sizes["sequence"] >= 1
    assert_reads(probe, model, sequences)


def test_reset_forgets_the_sequences_and_stays_attached(model):
    a, b = tokens(5, 8)
    probe = ap.Probe(small())
    with probe.attach(model):
        read(model, a, a)
        probe.reset()
        with pytest.raises(ValueError, match="nothing has been collected"):
            probe.results()
        read(model, b)
    assert_reads(probe, model, [b])


def test_attach_and_detach_without_a_context(model):
    a, b = tokens(5, 8)
    probe = ap.Probe(small())
    assert probe.attach(model) is probe
    read(model, a)
    probe.detach()
    read(model, b)
    probe.detach()  # once too often does no harm
    assert_reads(probe, model, [a])


def test_nested_attaching_of_one_probe_counts(model):
    a, b, c = tokens(5, 8, 6)
    probe = ap.Probe(small())
    with probe.attach(model):
        read(model, a)
        with probe.attach(model):
            read(model, b)
        read(model, c)
    read(model, a)
    assert_reads(probe, model, [a, b, c])


@pytest.mark.parametrize("first", [0, 1])
def test_two_probes_at_once_leave_in_any_order(model, first):
    a, b, c = tokens(5, 8, 6)
    probes = [ap.Probe(small()), ap.Probe(everything())]
    probes[0].attach(model)
    read(model, a)
    probes[1].attach(model)
    output = model.generate(b[None], max_new_tokens=3, **FREE)
    probes[first].detach()
    read(model, c)
    probes[1 - first].detach()
    finished = output[0, :-1]
    seen = [[a, finished, c], [finished]] if first == 1 else [[a, finished], [finished, c]]
    for probe, sequences in zip(probes, seen, strict=True):
        assert probe.results().length.values.tolist() == [len(sequence) for sequence in sequences]
    index = 0
    assert_sequence(probes[1].results(), index, alone(model, finished, 8))


def test_nested_probes_of_different_layers(model):
    (a,) = tokens(7)
    inner, outer = ap.Probe(small(), layers=[1]), ap.Probe(small(), layers=[0, 2])
    with outer.attach(model), inner.attach(model):
        read(model, a)
    whole = alone(model, a, 7, small())
    assert inner.results().layer.values.tolist() == [1]
    assert outer.results().layer.values.tolist() == [0, 2]
    for probe in (inner, outer):
        found = probe.results().phi
        np.testing.assert_allclose(found, whole.phi.sel(layer=found.layer), rtol=1e-6)


def test_a_probe_attached_elsewhere_is_refused(model):
    probe = ap.Probe(small())
    with probe.attach(model), pytest.raises(ValueError, match="attached to another model"):
        probe.attach(bridge("gemma2"))


def test_a_probe_attached_nowhere_is_no_context():
    with pytest.raises(ValueError, match="attached to no model"), ap.Probe(small()):
        pass


def test_the_same_probe_may_serve_another_model_later(model):
    (a,) = tokens(6)
    probe = ap.Probe(small())
    with probe.attach(bridge("gemma2")):
        read(bridge("gemma2"), a)
    probe.reset()
    with probe.attach(model):
        read(model, a)
    assert_reads(probe, model, [a])


# -- the user's own hooks ----------------------------------------------------------------------------------


def hooks(model, name):
    return [entry.hook for entry in model.hook_dict[name].fwd_hooks]


def test_hooks_of_the_user_stay_and_ours_go(model):
    (a,) = tokens(6)
    seen = []
    name = "blocks.1.attn.hook_pattern"

    def spy(value, hook):
        seen.append(hook.name)

    model.hook_dict[name].add_hook(spy)
    model.hook_dict[name].add_hook(spy, is_permanent=True)
    before = traces_on(model)
    probe = ap.Probe(small())
    try:
        with probe.attach(model):
            model.hook_dict[name].add_hook(spy)  # one more while we are there
            with model.hooks(fwd_hooks=[(name, spy)]):
                read(model, a)
            read(model, a)
        assert len(seen) == 4 + 3
        assert len(hooks(model, name)) == 3
        model.reset_hooks()
        assert len(hooks(model, name)) == 1
    finally:
        model.reset_hooks(including_permanent=True)
    assert before["handles"].keys() == traces_on(model)["handles"].keys()
    assert_reads(probe, model, [a, a])


def test_a_hook_that_edits_the_pattern_before_us_is_what_we_see(model):
    (a,) = tokens(6)

    def copy_map(value, hook):
        return torch.eye(value.shape[-1]).expand_as(value)

    probe = ap.Probe([ap.IntrinsicTDO()])
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", copy_map)]), probe.attach(model):
        read(model, a)
    ds = probe.results()
    np.testing.assert_allclose(ds.participation_ratio.sel(layer=1), 1, atol=1e-6)
    assert (ds.participation_ratio.sel(layer=0) < 0.999).any()


def test_we_survive_what_the_user_resets(model):
    a, b, c, d = tokens(6, 5, 7, 8)
    probe = ap.Probe(small())
    with probe.attach(model):
        model.reset_hooks()
        read(model, a)
        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", lambda value, hook: None)]):
            read(model, b)
        with torch.no_grad():
            model.run_with_cache(c[None])
            model.run_with_hooks(d[None], fwd_hooks=[("blocks.0.attn.hook_z", lambda value, hook: None)])
    assert_reads(probe, model, [a, b, c, d])


def test_the_model_computes_the_same_with_and_without_us(model):
    (a,) = tokens(9)
    with torch.no_grad():
        bare, text = model(a[None]), model.generate(a[None], max_new_tokens=5, **FREE)
        with ap.Probe(everything(), logits=True).attach(model):
            assert torch.equal(model(a[None]), bare)
            assert torch.equal(model.generate(a[None], max_new_tokens=5, **FREE), text)


def test_a_generate_of_the_users_own_is_called_and_not_replaced(model):
    (a,) = tokens(5)
    calls = []
    original = type(model).generate

    def generate(*args, **kwargs):
        calls.append(kwargs)
        return original(model, *args, **kwargs)

    vars(model)["generate"] = generate
    try:
        probe = ap.Probe(small())
        with probe.attach(model):
            assert model.generate is generate
            model.generate(a[None], max_new_tokens=3, **FREE)
        assert model.generate is generate
        assert len(calls) == 1
        assert probe.results().length.values.tolist() == [7]
    finally:
        del vars(model)["generate"]


def test_generate_keeps_its_name_signature_and_documentation(model):
    import inspect

    plain = inspect.signature(model.generate)
    with ap.Probe(small()).attach(model):
        assert model.generate.__name__ == "generate"
        assert model.generate.__doc__ == type(model).generate.__doc__
        assert set(plain.parameters) <= set(inspect.signature(model.generate).parameters)


# -- failures ----------------------------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


class Explosive(ap.Analyzer):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def update(self, rows):
        self.accumulate(rows=rows.count[:, None])
        if int(self.total["rows"].max()) > self.after:
            raise Boom("analyzer")

    def compute(self):
        return {"rows": self.total["rows"].float().expand(-1, 4)}


@contextlib.contextmanager
def raising(model, name, error, after=0):
    """A hook of the user that raises at its n-th call."""
    count = []

    def hook_function(value, hook):
        count.append(1)
        if len(count) > after:
            raise error

    with model.hooks(fwd_hooks=[(name, hook_function)]):
        yield


@pytest.mark.parametrize("error", [Boom("hook"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("name", ["blocks.0.attn.hook_pattern", "blocks.1.hook_resid_post", "unembed.hook_out"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_hook_that_raises_in_generate(model, error, name, after):
    a, b = tokens(6, 7)
    before = traces_on(model)
    probe = ap.Probe(everything(), logits=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(type(error)))
        stack.enter_context(raising(model, name, error, after))
        stack.enter_context(probe.attach(model))
        model.generate(a[None], max_new_tokens=6, **FREE)
    assert traces_on(model) == before
    with pytest.raises(ValueError, match="nothing has been collected"):
        probe.results()
    with probe.attach(model), torch.no_grad():
        output = model.generate(b[None], max_new_tokens=3, **FREE)
    ds = probe.results().drop_vars(["token_log_probability", "token_entropy"])
    assert_sequence(ds, 0, alone(model, output[0, :-1], 7))


def test_an_analyzer_that_raises(model):
    (a,) = tokens(6)
    before = traces_on(model)
    probe = ap.Probe([Explosive(after=8)])
    with pytest.raises(Boom, match="analyzer"), probe.attach(model):
        model.generate(torch.cat([a, a, a])[None], max_new_tokens=6, **FREE)
    assert traces_on(model) == before
    with probe.attach(model):
        read(model, a)
    assert probe.results()["rows"].values.tolist() == [[[6.0] * 4] * 3]


def test_a_model_that_raises(model):
    (a,) = tokens(6)
    before = traces_on(model)
    probe = ap.Probe(small())
    with pytest.raises(IndexError), probe.attach(model):
        read(model, a + 1000)
    assert traces_on(model) == before
    with probe.attach(model):
        read(model, a)
    assert_reads(probe, model, [a])


def test_a_failure_takes_its_own_sequences_and_no_others(model):
    a, b, c = tokens(6, 7, 8)
    probe = ap.Probe(small())
    with dropped(), probe.attach(model):
        read(model, a)
        with pytest.raises(Boom), raising(model, "blocks.1.hook_resid_post", Boom()):
            read(model, b)
        assert probe.results().length.values.tolist() == [6]
        read(model, c)
    assert_reads(probe, model, [a, c])


def test_a_failure_before_any_attention_leaves_the_finished_sequences_alone(model):
    a, b = tokens(6, 7)
    probe = ap.Probe(small())
    with probe.attach(model):
        read(model, a)
        with pytest.raises(IndexError):
            read(model, a + 1000)
        assert probe.results().length.values.tolist() == [6]
        read(model, b)
    assert_reads(probe, model, [a, b])


def test_hooks_that_stop_firing_leave_the_finished_sequences_alone(model):
    (a,) = tokens(6)
    probe = ap.Probe(small())
    with pytest.raises(ValueError, match="did not report"), probe.attach(model):
        read(model, a)
        model.reset_hooks(including_permanent=True)
        read(model, a)
    assert_reads(probe, model, [a])


def test_warnings_turned_into_errors_leave_nothing_on_the_model(model):
    import warnings

    (a,) = tokens(6)
    before = traces_on(model)
    probe = ap.Probe(small())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            pytest.raises((Boom, UserWarning)),
            raising(model, "blocks.1.hook_resid_post", Boom()),
            probe.attach(model),
        ):
            read(model, a)
    try:
        assert traces_on(model) == before
    finally:
        for point in model.hook_dict.values():  # do not take the other tests down
            point.remove_hooks("fwd", including_permanent=True)
        with contextlib.suppress(UserWarning):
            probe._stack.close()


def test_an_attach_that_fails_leaves_nothing_on_the_model(model):
    before = traces_on(model)
    probe = ap.Probe(small())
    for settings in ({"pattern": "nothing.*"}, {"layers": [17]}):
        with pytest.raises(ValueError, match=r"matches none|layers \[17\]"):
            ap.Probe(small(), **settings).attach(model)
    with pytest.raises(TypeError, match=r"no named hook|named hook points"):
        probe.attach(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="prompt_lengths=0"):
        probe.attach(model, prompt_lengths=0)
    assert traces_on(model) == before
    (a,) = tokens(6)
    with probe.attach(model):
        read(model, a)
    assert_reads(probe, model, [a])


def test_a_missing_hook_of_a_part_leaves_nothing_on_the_model(model):
    """The second of several hooks is not there: the first goes away again."""
    before = traces_on(model)
    probe = ap.Probe([ap.MeanRoutingSplit()])
    names = [name for name in model.hook_dict if name.endswith("blocks.2.attn.hook_v")]
    hidden = {name: model.hook_dict[name] for name in names}
    full = dict(model.hook_dict)
    from attnprobe.hosts import transformer_lens as host

    class WithoutV(host.HookedHost):
        def __init__(self, given):
            super().__init__(given)
            for name in hidden:
                self._hooks.pop(name)

    assert hidden
    from attnprobe import probe as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "host_of", WithoutV)
        with pytest.raises(ValueError, match=r"blocks.2.attn has no hook 'hook_v'.*near it: .*blocks"):
            probe.attach(model)
    assert traces_on(model) == before
    assert dict(model.hook_dict) == full
    (a,) = tokens(6)
    with probe.attach(model):
        read(model, a)
    assert probe.results().sizes["layer"] == 3


# -- gradients ---------------------------------------------------------------------------------------------


def test_a_forward_with_gradients_works_and_its_graph_is_not_held(model):
    (a,) = tokens(8)
    alive = weakref.WeakSet()

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor
            alive.add(self)

    probe = ap.Probe(everything(), logits=True)
    with probe.attach(model, prompt_lengths=5):
        with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
            loss = model(a[None]).square().mean()
        assert len(alive) > 10
        grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        assert any(g is not None and g.abs().sum() > 0 for g in grads)
        del loss, grads
        gc.collect()
        assert len(alive) == 0, "the probe holds the graph of the forward"
    ds = probe.results().drop_vars(["token_log_probability", "token_entropy"])
    assert_sequence(ds, 0, alone(model, a, 5))


def test_a_training_step_with_the_probe_on(model):
    """Gradients are those of a forward without a probe."""
    (a,) = tokens(8)
    parameter = next(p for p in model.parameters() if p.requires_grad)
    (bare,) = torch.autograd.grad(model(a[None]).square().mean(), [parameter])
    with ap.Probe(small()).attach(model):
        (watched,) = torch.autograd.grad(model(a[None]).square().mean(), [parameter])
    torch.testing.assert_close(watched, bare)


def test_batches_padded_differently_follow_one_another(model):
    """Nothing of one batch's padding stays for the next."""
    sequences = tokens(9, 4)
    probe = ap.Probe(small())
    with probe.attach(model), torch.no_grad():
        for side in ("left", "right"):
            ids, mask = padded(sequences, side)
            model(ids, attention_mask=mask)
        model(torch.stack(tokens(6, 6)))
    ds = probe.results()
    assert ds.length.values.tolist() == [9, 4, 9, 4, 6, 6]
    np.testing.assert_allclose(ds.phi[:2], ds.phi[2:4], rtol=1e-5, atol=1e-5)
