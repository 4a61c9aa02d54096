"""All keys of one attention, by slot, whatever its cache keeps."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


class KeyHistory:
    """The keys seen so far.

    A cache that holds them all is referred to, not copied. A sliding cache forgets: then the new keys are copied into
    a history of our own, which grows by doubling.

    >>> import torch
    >>> history = KeyHistory()
    >>> history.see(torch.zeros(1, 1, 3, 2), new=3, seen=3)
    >>> history.see(torch.ones(1, 1, 2, 2), new=1, seen=4)  # the cache slides: it shows the last two keys
    >>> history.keys[0, 0, :, 0].tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._size = 0
        self._borrowed = False  # the tensor is the host's, not to be written to

    @property
    def keys(self) -> Float[Tensor, "batch kv_head slot d"]:
        """The keys of every slot seen."""
        assert self._keys is not None, "no keys have been seen"
        return self._keys[:, :, : self._size]

    def see(self, keys: Float[Tensor, "batch kv_head key d"], *, new: int, seen: int) -> None:
        """Take what an attention showed in a forward of `new` tokens, after which there are `seen`.

        Raises:
            ValueError: keys are missing that were never shown.
        """
        if keys.shape[2] >= seen:
            self._keys, self._size, self._borrowed = keys.detach(), seen, True
            return
        if self._borrowed and self._keys is not None and _same_memory(keys, self._keys):
            raise ValueError(
                "a static cache slides by moving keys in place, so that earlier ones are lost: use a dynamic cache."
            )
        if self._keys is None or self._size != seen - new or keys.shape[2] < new:
            raise ValueError(
                f"an attention shows {keys.shape[2]} keys of {seen} tokens, and {self._size} were seen before: attach "
                "the probe before the prompt is read."
            )
        if self._keys.shape[2] < seen or self._borrowed:
            grown = keys.new_empty(*keys.shape[:2], 2 * seen, keys.shape[3])
            grown[:, :, : self._size] = self._keys[:, :, : self._size]
            self._keys, self._borrowed = grown, False
        self._keys[:, :, self._size : seen] = keys[:, :, -new:].detach()
        self._size = seen


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
