"""The simulated devices do what torch does on several devices."""

from __future__ import annotations

import pytest
import torch
from simulated_devices import CPU, FIRST, SECOND, SimulatedDevices

ACROSS = "Expected all tensors to be on the same device"


@pytest.fixture
def devices():
    with SimulatedDevices() as devices:
        yield devices


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_are_made_on_a_device_and_stay_there(devices, inference):
    with torch.inference_mode(inference):
        made = [torch.zeros(2, device=FIRST), torch.tensor([1.0, 2.0], device=FIRST), torch.ones(2).to(FIRST)]
        made += [made[0].new_tensor([3.0]), made[1][:1], made[0] + made[1], torch.zeros_like(made[2]).add_(made[1])]
        made += [torch.stack(made[:2]).softmax(-1) @ made[1], made[1].sum(), made[1].double()]
    assert {tensor.device for tensor in made} == {FIRST}
    assert made[6].tolist() == [1.0, 2.0]
    assert made[6].cpu().device == CPU
    assert made[8].item() == 3.0


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("other", [CPU, SECOND])
def test_mixing_devices_raises(devices, other, inference):
    with torch.inference_mode(inference):
        here, there = torch.ones(2, 2, device=FIRST), torch.ones(2, 2, device=other)
        index = torch.zeros(2, 2, dtype=torch.int64, device=other)
        mixtures = [
            lambda: here + there,
            lambda: here.add_(there),
            lambda: there.add_(here),
            lambda: here @ there,
            lambda: torch.cat([here, there]),
            lambda: torch.where(there > 0, here, 0.0),
            lambda: here.gather(1, index),
            lambda: torch.nn.functional.embedding(index, here),
            lambda: here.masked_fill(there > 0, 0.0),
            lambda: there[here > 0],
            lambda: torch.equal(here, there),
            lambda: there.sum() + here[0] if other != CPU else torch.stack([there.sum(), here.sum()]),
            lambda: here.sum() + there,
        ]
        for mixture in mixtures:
            with pytest.raises(RuntimeError, match=ACROSS):
                mixture()


def test_what_torch_allows_is_allowed(devices):
    here = torch.arange(4.0, device=FIRST)
    assert (here * torch.tensor(2.0)).device == FIRST  # a scalar of the CPU
    assert torch.where(here > 1, here, torch.tensor(0.0)).tolist() == [0.0, 0.0, 2.0, 3.0]
    assert here[torch.tensor([3, 0])].tolist() == [3.0, 0.0]  # an index of the CPU
    here[torch.tensor([True, False, False, False])] = 5.0
    there = torch.zeros(4, device=SECOND)
    there[1:] = here[:3]  # a copy
    assert there.tolist() == [0.0, 5.0, 1.0, 2.0]
    assert here.to(SECOND).device == SECOND
    with pytest.raises(RuntimeError, match=ACROSS):
        here[torch.zeros(1, dtype=torch.int64, device=SECOND)]


def test_memory_of_a_device_is_no_array(devices):
    with pytest.raises((TypeError, RuntimeError)):
        torch.ones(2, device=FIRST).numpy()


def test_copies_between_devices_are_noted(devices):
    torch.ones(3, device=FIRST).to(SECOND).to(SECOND).double()
    assert devices.crossings == [(FIRST, SECOND, torch.float32, (3,))]
