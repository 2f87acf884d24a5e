"""An attention op's schema, signature and docstring, generated from the list of its arguments."""

import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from torch_paged_attn import attention_call, backward_call, selection_calls
from torch_paged_attn.argument import Argument

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
Function = TypeVar("Function", bound=Callable[..., Any])


RESULTS = ("out", "softmax_lse")
OF_SELECTION = {"selected_mass": ("mass",), "select_keys": ("key_indices", "num_selected")}


def arguments(op: str) -> tuple[Argument, ...]:
    """The arguments of an attention op or of its backward, in the order of the schema."""
    if op in OF_SELECTION:
        return selection_calls.arguments(op)
    return (backward_call if op.endswith("_backward") else attention_call).arguments(op)


def results(op: str) -> tuple[str, ...]:
    """The names of an op's results, all of them tensors."""
    if op.endswith("_out"):  # its first result is an argument
        return RESULTS[1:]
    if op.endswith("_backward"):
        return tuple(backward_call.GRADIENTS)
    return OF_SELECTION.get(op, RESULTS)


def schema(op: str) -> str:
    """The op's schema. A hint has no default in it, so no argument before a hint has one either."""
    listed = arguments(op)
    last_hint = max(i for i, x in enumerate(listed) if x.is_hint)
    words = []
    for i, x in enumerate(listed):
        if x.keyword_only and not listed[i - 1].keyword_only:
            words.append("*")
        has_default = i > last_hint and x.default is not dataclasses.MISSING
        words.append(f"{x.kind} {x.name}" + (f"={_written(x.default)}" if has_default else ""))
    returned = ", ".join(f"Tensor {name}" for name in results(op))
    return f"{op}({', '.join(words)}) -> ({returned})"


def _written(default: Any) -> Any:
    """A default as a schema writes it."""
    if isinstance(default, str):
        return f'"{default}"'
    return list(default) if isinstance(default, tuple) else default


def described(function: Function) -> Function:
    """A decorator for an op's public function: it sets the signature that `help` shows to the op's
    whole list, and replaces `{arguments}` in the docstring by a description of each argument.

    The function itself names only the arguments that it uses and passes the rest on.
    """
    listed = arguments(function.__name__)
    parameters = [_parameter(x) for x in listed]
    count = len(results(function.__name__))
    returned = Tensor if count == 1 else tuple[(Tensor,) * count]  # type: ignore[misc, valid-type]
    signature = inspect.Signature(parameters, return_annotation=returned)
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {x.name: x.annotation for x in parameters} | {"return": returned}
    if function.__doc__:  # python -OO drops it
        function.__doc__ = re.sub(
            r"^( *)\{arguments\}$",
            lambda line: textwrap.indent(_documentation(listed), line[1]),
            function.__doc__,
            flags=re.MULTILINE,
        )
    return function


def _parameter(x: Argument) -> inspect.Parameter:
    default, annotation = x.default, x.type
    if x.is_hint:
        default, annotation = None, x.type | None
    return inspect.Parameter(
        x.name,
        inspect.Parameter.KEYWORD_ONLY if x.keyword_only else POSITIONAL,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=annotation,
    )


def _documentation(listed: tuple[Argument, ...]) -> str:
    """One entry per argument, or per run of arguments with the same shape and meaning."""
    entries = []
    for (shape, meaning), group in itertools.groupby(listed, lambda x: (x.shape, x.meaning)):
        names = ", ".join(x.name for x in group)
        text = f"{names}: {shape}{'. ' if shape else ''}{meaning}"
        entries.append(textwrap.fill(text, 92, subsequent_indent="    ", break_on_hyphens=False))
    return "\n".join(entries)
