"""Schema, Python signature and documentation of an attention op, from the list of its arguments."""

import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from torch_paged_attn import attention_call, backward_call
from torch_paged_attn.attention_call import Argument

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
Function = TypeVar("Function", bound=Callable[..., Any])


RESULTS = ("out", "softmax_lse")


def arguments(op: str) -> tuple[Argument, ...]:
    """What an attention op or the backward of one takes, in the order of its schema."""
    return (backward_call if op.endswith("_backward") else attention_call).arguments(op)


def results(op: str) -> tuple[str, ...]:
    """The names of what it returns, all tensors."""
    return tuple(backward_call.GRADIENTS) if op.endswith("_backward") else RESULTS


def schema(op: str) -> str:
    """The op's schema. Nothing up to the last hint has a default: a hint has none."""
    listed = arguments(op)
    last_hint = max(i for i, x in enumerate(listed) if x.is_hint)
    words = []
    for i, x in enumerate(listed):
        if x.keyword_only and not listed[i - 1].keyword_only:
            words.append("*")
        default = list(x.default) if isinstance(x.default, tuple) else x.default
        words.append(f"{x.kind} {x.name}" + (f"={default}" if i > last_hint else ""))
    returned = ", ".join(f"Tensor {name}" for name in results(op))
    return f"{op}({', '.join(words)}) -> ({returned})"


def described(function: Function) -> Function:
    """Show the op's whole signature, and its arguments in place of `{arguments}` in the docstring.

    The function itself takes what it needs by name and passes the rest on.
    """
    listed = arguments(function.__name__)
    parameters = [_parameter(x) for x in listed]
    returned = tuple[(Tensor,) * len(results(function.__name__))]  # type: ignore[misc, valid-type]
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
    """One entry for each argument, or for neighbouring arguments that have the same meaning."""
    entries = []
    for (shape, meaning), group in itertools.groupby(listed, lambda x: (x.shape, x.meaning)):
        names = ", ".join(x.name for x in group)
        text = f"{names}: {shape}{'. ' if shape else ''}{meaning}"
        entries.append(textwrap.fill(text, 92, subsequent_indent="    ", break_on_hyphens=False))
    return "\n".join(entries)
