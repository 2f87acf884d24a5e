"""An attention backend of diffusers, on CPUs and GPUs.

    from torch_paged_attn.integrations import diffusers as paged

    paged.register()
    pipe.transformer.set_attention_backend(paged.NAME)

or `with attention_backend(paged.NAME): ...` of `diffusers.models.attention_dispatch`. Masks (bool
or added to the scores, of any shape that SDPA takes), causal calls, grouped heads, dropout and
gradients are supported; diffusers' context parallelism is not.

diffusers has a registry of functions, and an enumeration of their names, to which this one is
added. Both are private: `register` raises if they are not as expected. The environment variable
DIFFUSERS_ATTN_BACKEND cannot be used, because diffusers reads it before this name is registered.
Works with diffusers 0.42.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations._arguments import of_equal_lengths
from torch_paged_attn.integrations._dropout import drawn_rng_state
from torch_paged_attn.integrations._versions import require
from torch_paged_attn.ops import flash_varlen

NAME = "paged_attn"
MEMBER = "PAGED_ATTN"


def register() -> None:
    """Make NAME an attention backend of diffusers. A second call changes nothing.

    Raises:
        ImportError: diffusers is not installed, or too old.
        RuntimeError: another package has registered the name, or diffusers' registry is different.
    """
    version = require("diffusers", "integrations.diffusers", "diffusers")
    from diffusers.models import attention_dispatch as dispatch

    names = dispatch.AttentionBackendName
    registry = dispatch._AttentionBackendRegistry
    if NAME in names._value2member_map_:
        taken = registry._backends.get(names(NAME))
        if taken is attention:
            return
        raise RuntimeError(
            f"torch_paged_attn.integrations.diffusers: diffusers {version} has a backend {NAME!r}"
            f" of {getattr(taken, '__module__', 'another package')} already"
        )
    if not all(hasattr(registry, x) for x in ("_backends", "_supported_arg_names", "register")):
        raise RuntimeError(
            "torch_paged_attn.integrations.diffusers serves diffusers 0.42, and diffusers"
            f" {version} keeps its attention backends elsewhere"
        )
    registry.register(_new_member(names))(attention)


def _new_member(names: Any) -> Any:
    """Add NAME to the enumeration of backends, and return the new member."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = MEMBER, NAME
    names._member_map_[MEMBER] = member
    names._value2member_map_[NAME] = member
    names._member_names_.append(MEMBER)
    return member


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention` with tokens before heads, as diffusers' models call it.

    query: (batch, L, num_heads, head_dim)
    key, value: (batch, S, num_kv_heads, head_dim), (..., head_dim_v)
    attn_mask: (batch, S), or broadcastable to (batch, num_heads, L, S); bool or added to the
        scores. Two dimensions are (batch, S) if that fits, as in diffusers' native backend

    Returns (batch, L, num_heads, head_dim_v); with return_lse also (batch, L, num_heads) float32.
    """
    if _parallel_config is not None:
        raise NotImplementedError(
            f"torch_paged_attn: the backend {NAME!r} does not support _parallel_config"
        )
    if attn_mask is not None and is_causal:
        raise ValueError("torch_paged_attn: expected attn_mask or is_causal, got both")
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    batch, queries, heads = query.shape[:3]
    options: dict[str, Any] = {}
    if attn_mask is not None and attn_mask.shape == (batch, key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    if is_causal and queries != key.shape[1]:
        # SDPA's causal mask is aligned to the top left, the op's to the bottom right
        attn_mask = torch.ones(queries, key.shape[1], dtype=torch.bool, device=query.device).tril()
    elif is_causal:
        options["causal"] = True
    if attn_mask is not None:
        options["attn_bias"] = _bias(attn_mask, batch, heads, queries, key.shape[1])
    if dropout_p > 0.0:
        options["dropout_p"] = dropout_p
        options["rng_state"] = drawn_rng_state(query.device)
    tensors = of_equal_lengths(query, key, value, attn_mask)
    out, lse = flash_varlen(**tensors, softmax_scale=scale, **options)
    out = out.unflatten(0, (batch, queries))
    return (out, lse.view(heads, batch, queries).permute(1, 2, 0)) if return_lse else out


def _bias(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """The mask as (1 or num_heads, batch * L, S)."""
    mask = mask[(None,) * (4 - mask.dim())]
    shared = mask.shape[1] == 1
    mask = mask.expand(batch, 1 if shared else heads, queries, keys)
    return mask.transpose(0, 1).flatten(1, 2)
