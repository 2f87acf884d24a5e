"""Calls that were checked, planned and launched once, ready to be made again.

A decode step calls with the same shapes, layer after layer; what it may cost on the host is a few
microseconds. A recipe belongs to the description of a call: types, dtypes, devices, shapes, strides
and alignment of its tensors, which of them are one, and its options. Lengths, tables and hints are
not part of it. It is a function that does what the second such call put on its tape (`launch.py`,
`playback.py`): new memory for the results, the new tensors' addresses, and the launches.

A description also holds what the dispatcher goes by: the keys of each tensor under the modes that
are on. So a recipe found before the dispatcher was asked answers what it would have led to.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton.runtime.launch import is_traced, taped
from torch_paged_attn.backends.triton.runtime.playback import write_out
from torch_paged_attn.ops._again import UNKNOWN

# recipes in all; compiled kernels are shared by recipes, and do not multiply with them
MOST_RECIPES = 4096

# recipes that differ in nothing but what only they can tell
MOST_ALIKE = 32

Recipe = Callable[..., Any]

# by operator, options and the shape of the first tensor; those used last come first. There
# are none yet where there was one call only: a size that never comes again is not worth it
_recipes: dict[Any, list[Recipe]] = {}
_count = 0

# by operator, the options and the recipe of the last call: those of the next layer, mostly
_last: dict[str, tuple[dict[str, Any], Recipe]] = {}


def forget() -> None:
    """Drop all recipes: calls are planned anew."""
    global _count
    _recipes.clear()
    _last.clear()
    _count = 0


def play(op: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """The results of a call, if others like it were made before, or UNKNOWN."""
    last = _last.get(op)
    if last is not None and last[0] == options:
        results = last[1](*tensors)
        if results is not UNKNOWN:
            return results
    alike = _recipes.get(_key(op, tensors, options))
    for i, recipe in enumerate(alike or ()):
        results = recipe(*tensors)
        if results is not UNKNOWN:
            _last[op] = options, recipe
            if alike and i:
                alike.insert(0, alike.pop(i))
            return results
    return UNKNOWN


def make(
    function: Callable[[], Any],
    op: str,
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
) -> Any:
    """The results of a call that is made by `function`, and a recipe for others like it."""
    global _count
    if is_traced() or not tensors[0].is_cuda:  # type: ignore[union-attr]
        return function()
    key = _key(op, tensors, options)
    alike = _recipes.get(key)
    if alike is None:
        if _count >= MOST_RECIPES:
            forget()
        _count += 1
        _recipes[key] = []
        return function()
    with taped() as tape:
        results = function()
    if tape.launches and (recipe := write_out(tape, tensors, results)) is not None:
        _count += 1
        alike.insert(0, recipe)
        del alike[MOST_ALIKE:]
    return results


def _key(op: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return op, tensors[0].shape, *options.items()
