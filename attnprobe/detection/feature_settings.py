"""Which features, of which heads: everything that decides the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

from attnprobe.analyzers import Analyzer, Asymmetry, TDOSpectrum, TopLaplacianEigenvalues, TopSelfAttention
from attnprobe.analyzers import TransportCapacity as Capacity
from attnprobe.functional.top_values import check_top

#: set of features -> what is in it
KINDS = {
    "tdo": "the k largest eigenvalues of the Token Difference Operator",
    "laplacian": "the k largest eigenvalues of the attention Laplacian",
    "diagonal": "the k largest weights of tokens on themselves",
    "transport": "prefix capacity phi, its cut, and asymmetry",
}
# Sets with one value a token: a text must have k of them.
_BY_TOKEN = ("laplacian", "diagonal")

Head = tuple[int, int]


class Column(NamedTuple):
    """One feature: a set, a number of it, and the head it belongs to."""

    kind: str
    variable: str
    layer: int
    head: int


@dataclass(frozen=True)
class FeatureSettings:
    """Which features of which heads.

    Attributes:
        kinds: sets of features, among `KINDS`; a name alone is one set.
        heads: "all", or (layer, head) pairs.
        k: how many eigenvalues, or diagonal entries, a head.
        max_tokens: prompt and answer together, at most; longer prompts lose their middle (`reading.reading_of`).
        rows: policy for models whose rows do not sum to 1, as in `Probe`.

    Raises:
        ValueError: an unknown set, none, heads that are not different pairs, or k or max_tokens out of range.

    >>> FeatureSettings("tdo", heads=[(2, 0), (2, 3)]).heads
    ((2, 0), (2, 3))
    """

    kinds: str | Sequence[str] = ("tdo",)
    heads: Literal["all"] | Sequence[Head] = "all"
    k: int = 16
    max_tokens: int = 1024
    rows: str = "error"

    def __post_init__(self) -> None:
        kinds = (self.kinds,) if isinstance(self.kinds, str) else tuple(self.kinds)
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(f"kinds={self.kinds!r}: use one or more of {', '.join(KINDS)}, each once.")
        check_top(self.k)
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, Integral) or self.max_tokens < 2:
            raise ValueError(f"max_tokens={self.max_tokens!r}: use a whole number of at least 2.")
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "heads", _heads(self.heads))

    @property
    def fewest_tokens(self) -> int:
        """How many tokens a text must have for its features to be numbers."""
        return max(2, self.k if any(kind in _BY_TOKEN for kind in self.kinds) else 2)

    def analyzers(self) -> list[Analyzer]:
        """What computes the features."""
        return [analyzer for kind in self.kinds for analyzer in _analyzers(kind, self.k)]

    @property
    def variables(self) -> tuple[str, ...]:
        """What the features of a head are called, in order."""
        return tuple(name for kind in self.kinds for name in variables_of(kind, self.k))

    def columns(self, heads: Iterable[Head]) -> tuple[Column, ...]:
        """The features of these heads, in the order of their columns: set by set, number by number, head by head."""
        listed = tuple(heads)
        return tuple(
            Column(kind, variable, layer, head)
            for kind in self.kinds
            for variable in variables_of(kind, self.k)
            for layer, head in listed
        )


def variables_of(kind: str, k: int) -> tuple[str, ...]:
    """What the results of a set are called.

    >>> variables_of("transport", 16)
    ('phi', 'cut', 'asymmetry')
    """
    if kind == "transport":
        return ("phi", "cut", "asymmetry")
    (analyzer,) = _analyzers(kind, k)
    assert isinstance(analyzer, TDOSpectrum | TopLaplacianEigenvalues | TopSelfAttention)
    return analyzer.names


def _analyzers(kind: str, k: int) -> list[Analyzer]:
    match kind:
        case "tdo":
            return [TDOSpectrum(k)]
        case "laplacian":
            return [TopLaplacianEigenvalues(k)]
        case "diagonal":
            return [TopSelfAttention(k)]
    return [Capacity(), Asymmetry()]


def _heads(given: Any) -> Literal["all"] | tuple[Head, ...]:
    if isinstance(given, str) and given == "all":
        return "all"
    pairs = [] if isinstance(given, str) else [tuple(pair) if isinstance(pair, list | tuple) else () for pair in given]
    right = all(len(pair) == 2 and all(_is_number(number) for number in pair) for pair in pairs)
    if not pairs or not right or len(set(pairs)) < len(pairs):
        raise ValueError(f"heads={given!r}: use 'all', or different (layer, head) pairs, counted from 0.")
    return tuple((int(layer), int(head)) for layer, head in pairs)


def _is_number(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
