"""Methods as callers and configuration files name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attnprobe.bench.methods import build_method
from attnprobe.uncertainty.method import Method
from attnprobe.uncertainty.registry import method_names, resolve

Specification = str | Method | Mapping[str, Any]


def single_pass_method(method: str | Method, name: str | None = None, **options: Any) -> Method:
    """A score of one answer, called `name` in results.

    Without a name, options are part of it, so that two settings of one score keep apart.

    Raises:
        ValueError: an unknown method or option, options beside an object, or a score that samples.
        TypeError: neither a name nor a method object.
    """
    if isinstance(method, str):
        found = build_method(method, options, name or _label(method, options))
    elif options:
        raise ValueError(f"options ({', '.join(options)}) go with the name of a method; an object has its own.")
    else:
        (found,) = resolve(method)
        # an object keeps its name: it may be in use elsewhere
        if name is not None and name != found.name:
            raise ValueError(
                f"the method object is called {found.name!r}: set its own name (`method.name = {name!r}`)."
            )
    if not isinstance(found, Method):
        raise ValueError(
            f"{found.name} samples answers, which LM-Polygraph does itself: take its own estimator, or one of "
            f"{', '.join(method_names(sampled=False))}."
        )
    return found


def single_pass_methods(specifications: Iterable[Specification]) -> list[Method]:
    """Names, method objects, or mappings with `method`, perhaps `name`, and options; in order.

    Raises:
        ValueError, TypeError: as `single_pass_method`; none at all, a mapping without `method`, or a name twice.
    """
    if isinstance(specifications, str | Method | Mapping):
        specifications = [specifications]
    found = []
    for one in specifications:
        if not isinstance(one, Mapping):
            found.append(single_pass_method(one))
        elif "method" not in one:
            raise ValueError(f"{dict(one)!r} names no method: write method: SAUQ, and options beside it.")
        else:
            found.append(single_pass_method(**{str(key): value for key, value in one.items()}))
    return [method for method in resolve(found) if isinstance(method, Method)]


def _label(method: str, options: Mapping[str, Any]) -> str | None:
    if not options:
        return None
    return f"{method}({', '.join(f'{key}={value}' for key, value in options.items())})"
