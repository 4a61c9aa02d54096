"""Accelerators that are not there: tensors that say they are on one, and refuse what torch refuses across devices.

`DeviceTensor` holds a CPU tensor and claims a device. Inside `SimulatedDevices`, `.to(FIRST)` and `device=SECOND` make
such tensors, every operation runs on what they hold, and one on tensors of several devices raises as it does on
hardware. Memory, streams and kernels are not simulated, nor is their arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CPU = torch.device("cpu")
# Any accelerator type will do whose tensors can be claimed without a driver or a Python module.
FIRST, SECOND = torch.device("xla:0"), torch.device("xla:1")

_COPIES = {aten.copy_.default, aten._to_copy.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Not tagged as pointwise, and takes a scalar of the CPU like those that are.
_TAKES_SCALAR = {aten.fill.Tensor, aten.fill_.Tensor, *_INDEXED}


class Crossing(NamedTuple):
    """A tensor that was copied from one device to another."""

    source: torch.device
    target: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]


class DeviceTensor(Tensor):
    """A CPU tensor that claims to be on a device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> DeviceTensor:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, held.size(), dtype=held.dtype, device=device, **layout)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    # what torch does without its dispatcher, where a device would need a driver

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad)

    def __invert__(self) -> Tensor:
        return self.bitwise_not()

    def nonzero(self) -> Tensor:
        return aten.nonzero.default(self)

    def contiguous(self) -> Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return aten.copy_.default(self, source, non_blocking)

    def __getitem__(self, index: Any) -> Tensor:
        self._check_index(index)
        return DeviceTensor(self.held[tree_map(_held, index)], self.device)

    def __setitem__(self, index: Any, value: Any) -> None:
        by_tensor = self._check_index(index)
        if isinstance(value, Tensor) and not by_tensor:
            self[index].copy_(value)
            return
        if isinstance(value, Tensor) and value.device != self.device and (value.device != CPU or value.ndim):
            raise _across({self.device, value.device}, "index_put_")
        self.held[tree_map(_held, index)] = _held(value)

    def _check_index(self, index: Any) -> bool:
        """Whether there are tensors in an index; those of other devices than the CPU are refused."""
        devices = {leaf.device for leaf in tree_leaves(index) if isinstance(leaf, Tensor)}
        if devices - {CPU, self.device}:
            raise _across({self.device, *devices}, "index")
        return bool(devices)

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.held!r}, device='{self.device}')"


def _reads(name: str) -> Any:
    return lambda self: getattr(self.held, name)()


for _name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "data_ptr", "untyped_storage"):
    setattr(DeviceTensor, _name, _reads(_name))


class SimulatedDevices(TorchDispatchMode):
    """While entered, `FIRST` and `SECOND` exist.

    Attributes:
        crossings: what was copied between devices, the CPU included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[Crossing] = []

    def __enter__(self) -> SimulatedDevices:
        # `torch.tensor(data, device=...)` then makes a CPU tensor and copies it where this mode sees the copy
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operations come whole: `to` does, with its device in any place
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = _run(func, args, kwargs)
        if func in _COPIES:
            source = args[1] if func is aten.copy_.default else args[0]
            if source.device != result.device:
                self.crossings.append(Crossing(source.device, result.device, source.dtype, tuple(source.shape)))
        return result


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on what the tensors hold, its result on the device where it belongs."""
    device = _device_of(func, args, kwargs)
    wrappers = {id(leaf.held): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor)}

    def wrapped(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in wrappers:  # written in place
            known = wrappers[id(result)]
            if (known.shape, known.stride()) != (result.shape, result.stride()):
                raise NotImplementedError(f"{func} changes the shape of a tensor in place, which is not simulated.")
            return known
        if device.type == "cpu":
            return result
        # a view in inference mode is of the kind that its base is
        with torch.inference_mode(args[0].is_inference() if func.is_view else torch.is_inference_mode_enabled()):
            return DeviceTensor(result, device)

    if "device" in kwargs:
        kwargs = {**kwargs, "device": CPU}
    return tree_map(wrapped, func(*tree_map(_held, args), **tree_map(_held, kwargs)))


def _held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def _device_of(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """The device of the result.

    Raises:
        RuntimeError: the operands are on several devices, and torch does not forgive it.
    """
    if func is aten.copy_.default:
        return args[0].device
    asked = kwargs.get("device")
    if asked is not None or func is aten._to_copy.default:
        return asked or args[0].device
    found = set(_binding_devices(func, args, kwargs)) or {CPU}
    if len(found) > 1:
        raise _across(found, func)
    return found.pop()


def _across(devices: set[torch.device], func: Any) -> RuntimeError:
    named = " and ".join(sorted(map(str, devices)))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {named}! ({func})"
    )


def _binding_devices(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.device]:
    """The devices that must be one: all but those of scalars and indices on the CPU, where torch takes these."""
    takes_scalar = torch.Tag.pointwise in func.tags or func in _TAKES_SCALAR
    written = args[0] if args and func._schema.is_mutable else None
    indices = {id(index) for index in args[1]} if func in _INDEXED else set()
    for leaf in tree_leaves((args, kwargs)):
        if not isinstance(leaf, Tensor | torch.Generator):
            continue
        from_cpu = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf is not written
        if from_cpu and (id(leaf) in indices or (takes_scalar and leaf.ndim == 0)):
            continue
        yield leaf.device
