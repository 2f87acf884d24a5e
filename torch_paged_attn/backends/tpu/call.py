"""A call of `flash_varlen` or `blocksparse` as a JAX pytree, made from the one list of arguments.

Its leaves are the tensors that are there; programs are compiled for the rest of it.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from torch_paged_attn import attention_call, backward_call
from torch_paged_attn.argument import Argument
from torch_paged_attn.attention_call import AttentionCall, is_by_token
from torch_paged_attn.backends.tpu.kernels.layout_mask import Layout
from torch_paged_attn.backends.tpu.tiles import Window

Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULTS = {op: attention_call.defaults(op) for op in ("flash_varlen", "blocksparse")}

# the arguments of the ops that `described` knows
_LISTS = {op: attention_call.arguments(op) for op in DEFAULTS}
_LISTS["flash_varlen_backward"] = backward_call.arguments("flash_varlen_backward")

# of both ops: a call of `flash_varlen` has None for a layout
_NAMES = tuple(DEFAULTS["blocksparse"])
_TENSORS = attention_call.tensor_names("blocksparse")
# what no kernel takes: no program is compiled for it
_DROPPED = ("max_seqlen_k", "deterministic")
_COMPILED_FOR = ("op", *(name for name in _NAMES if name not in (*_TENSORS, *_DROPPED)))

# `Any`, for mypy sees no fields that come from a list
_Arguments: Any = dataclasses.make_dataclass(
    "_Arguments", [(name, Any, None) for name in _NAMES], eq=False, kw_only=True
)


@dataclasses.dataclass(eq=False, kw_only=True)
class Call(_Arguments):
    """The arguments of one call, by their names, as JAX arrays or as torch tensors.

    A cache that is one array, keys and values in its first dimension, is `k`; `v` is None then.
    Where values are the first numbers of keys, `v` is an array of no pages, as wide as the values.
    """

    op: str

    @classmethod
    def of(cls, op: str, given: dict[str, Any]) -> "Call":
        """From the arguments that a call of `op` gives."""
        return cls(op=op, **DEFAULTS[op] | given)

    # as of a call of torch tensors
    total_q, batch = AttentionCall.total_q, AttentionCall.batch
    num_heads, head_dim = AttentionCall.num_heads, AttentionCall.head_dim
    group_size = AttentionCall.group_size

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1] if self.block_table is None else self.k.shape[-3]

    @property
    def head_dim_v(self) -> int:
        # a row of a cache may hold several keys, or one and numbers of no key
        is_alike = self.v is None or self.v.shape[-1] == self.k.shape[-1]
        return self.head_dim if is_alike else self.v.shape[-1]

    @property
    def keys_of_row(self) -> int:
        """Keys that a row of the cache holds: 1, also where the row ends in numbers of no key."""
        width = self.k.shape[-1]
        return width // self.head_dim if width % self.head_dim == 0 else 1

    @property
    def values_are_keys(self) -> bool:
        """Whether values are the first numbers of keys: `v` has no pages, but their width."""
        paged = self.block_table is not None and self.v is not None
        return paged and self.v.shape[0] == 0 < self.k.shape[0]

    @property
    def has_token_scales(self) -> bool:
        """Whether keys or values have a scale for each token and head."""
        scales = self.k_descale, self.v_descale
        return any(is_by_token(x, self.batch) for x in scales)

    @property
    def scale(self) -> float:
        """The factor of `q . k`."""
        given = self.softmax_scale
        return float(self.head_dim**-0.5 if given is None else given)

    @property
    def window(self) -> Window:
        return Window(self.window_size_left, 0 if self.causal else self.window_size_right)

    @property
    def result_dtype(self) -> Any:
        return jnp.dtype(self.out_dtype or self.q.dtype)

    @property
    def layout(self) -> Layout | None:
        """The block-sparse layout, if the op has one."""
        if self.op != "blocksparse":
            return None
        pages = self.block_table
        max_keys = self.k.shape[0]
        if pages is not None:
            max_keys = pages.shape[1] * self.k.shape[-2] * self.keys_of_row
        blocks = self.q_block_size, self.k_block_size
        return Layout(self.crow_indices, self.col_indices, *blocks, max_keys)


def tensors_of(call: Call) -> dict[str, Any]:
    """The tensors that a call has, by their names."""
    given = ((name, getattr(call, name)) for name in _TENSORS)
    return {name: x for name, x in given if x is not None}


def _flatten(call: Call) -> tuple[list[Any], tuple[Any, ...]]:
    tensors = [getattr(call, name) for name in _TENSORS]
    return tensors, tuple(getattr(call, name) for name in _COMPILED_FOR)


def _unflatten(compiled_for: tuple[Any, ...], tensors: list[Any]) -> Call:
    static = zip(_COMPILED_FOR, compiled_for, strict=True)
    return Call(**dict(static), **dict(zip(_TENSORS, tensors, strict=True)))


# not as a dataclass: JAX 0.7 drops the letters of a field's name instead of the field
jax.tree_util.register_pytree_node(Call, _flatten, _unflatten)


def static_names(op: str) -> tuple[str, ...]:
    """The arguments of an op's JAX function that are no arrays."""
    listed = tuple(x.name for x in _LISTS[op] if not x.is_tensor)
    return (*listed, "config", "interpret")


def described(function: Function) -> Function:
    """Show the op's arguments as JAX takes them: tensors in their order, the others by name."""
    listed = _LISTS[function.__name__]
    options = {x.name: None if x.is_hint else x.default for x in listed if not x.is_tensor}
    options |= {"config": None, "interpret": False}
    parameters = [_tensor(x) for x in listed if x.is_tensor]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Any)
        for name, default in options.items()
    ]
    signature = inspect.Signature(parameters, return_annotation=_returns(function))
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _returns(function: Any) -> Any:
    return inspect.signature(function).return_annotation


def _tensor(x: Argument) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if x.default is dataclasses.MISSING:
        return inspect.Parameter(x.name, kind, annotation=Array)
    return inspect.Parameter(x.name, kind, default=None, annotation=Array | None)


def bind(
    function: Callable[..., Any], tensors: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """What a `described` function was called with, by name; TypeError for what it does not take."""
    op = function.__name__
    try:
        return inspect.signature(function).bind(*tensors, **options).arguments
    except TypeError as error:
        raise TypeError(f"{op}(): {error}") from None
