"""Attention masks of Transformers in a short form, without a (queries, keys) tensor if possible."""

import functools
from collections.abc import Callable
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor

# Mask functions by the names of what makes them in transformers.masking_utils
CAUSAL = ({"causal_mask_function"}, {"causal_mask_function", "sliding_window_overlay"})
BIDIRECTIONAL = (
    {"bidirectional_mask_function"},
    {"bidirectional_mask_function", "sliding_window_bidirectional_overlay"},
)
CHUNKED = {"causal_mask_function", "chunked_overlay"}


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask of a forward pass in the shortest form that `attention_forward` needs.

    Arguments are those of Transformers' own mask interfaces. Query i has position `q_offset + i`,
    key j `kv_offset + j`; attention_mask (batch, seen tokens) is False where a token is padding.

    Returns one of:
        None: queries see every key that the layer's causal mask and window leave.
        (batch, keys) bool: False for padding; the last `q_length` keys are the queries. Keys past
            the last column are not written yet.
        cu_seqlens (num_sequences + 1,) int32: the batch's rows are packed sequences.
        (batch or 1, 1, queries or 1, keys or 1) bool: exactly the keys that are seen. The layer's
            causal mask and window do not apply.
        The same as numbers that are added to the logits, for models that compute with those.

    Raises:
        NotImplementedError: the config's models do not attend by an attn_implementation.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    mask_function = mask_function or causal_mask_function

    def all_pairs(make: Callable[..., Tensor | None] = sdpa_mask) -> Tensor | None:
        call: dict[str, Any] = {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
        return make(**(options | call))

    wants = _wanted_mask(type(options["config"])) if "config" in options else COMPACT
    if wants == OWN:
        raise NotImplementedError(
            f"torch_paged_attn: models of {type(options['config']).__name__} attend by formulas of"
            " their own, which no attn_implementation replaces: use"
            " attn_implementation='eager'"
        )
    if wants == ADDED:
        return all_pairs(eager_mask)
    if wants == PAIRS:
        return all_pairs()
    if torch.compiler.is_compiling():
        pattern = _pattern_of_arguments(mask_function, options)
        values_matter = attention_mask is not None or isinstance(q_offset, Tensor)
    else:
        pattern, packed = _pattern(mask_function)
        if packed is not None and pattern in CAUSAL:
            return _cu_seqlens_of_rows(packed)
        values_matter = isinstance(q_offset, Tensor) and q_length == 1  # a static cache's decode
    if values_matter:  # the short forms would read the values, and wait for the device
        return all_pairs()
    may_be_packed = pattern in CAUSAL and mask_function.__name__ == "and_mask"
    if torch.compiler.is_compiling() and may_be_packed and q_length == kv_length:
        return _cu_seqlens_of_neighbours(mask_function, batch_size, q_length, options)
    if pattern == CHUNKED and kv_offset + kv_length <= options["local_size"]:
        pattern = {"causal_mask_function"}

    written = kv_length
    if pattern in CAUSAL:
        written = min(kv_length, int(q_offset) + q_length - kv_offset)
    elif pattern not in BIDIRECTIONAL or (len(pattern) > 1 and q_length != kv_length):
        return all_pairs()
    keys = _keys(attention_mask, kv_offset, written)
    if pattern == {"bidirectional_mask_function"}:
        if keys is None:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=options.get("device"))
        return keys[:, None, None]  # the queries may be those of another sequence
    if keys is not None and len(pattern) > 1 and _has_holes(keys):
        return all_pairs()  # a window counts hidden keys too
    if keys is None and written < kv_length:
        return torch.ones(batch_size, written, dtype=torch.bool, device=options.get("device"))
    return keys


# What a model does with a mask before attention sees it: nothing, formulas of bools or of numbers
COMPACT, PAIRS, ADDED, OWN = "compact", "pairs", "added", "own"

# models without flash-attn that hand every mask on as it is
COMPACT_WITHOUT_FLASH = {"llama4_text"}


@torch.compiler.assume_constant_result  # a compiler would trace the search
def _wanted_mask(config_class: type) -> str:
    return _search_wanted_mask(config_class)


@functools.cache
def _search_wanted_mask(config_class: type) -> str:
    """COMPACT for models that flash-attn can serve: its masks, too, say less than all pairs.

    The others may add to a mask or index it (Doge, DeepSeek V4): PAIRS of bools if SDPA can serve
    them, else ADDED, numbers as eager attention adds them to its logits. OWN: they take no
    attn_implementation, and their own formulas would read a mask of ours as one of theirs.
    """
    from transformers import PreTrainedModel

    models = [m for m in _subclasses(PreTrainedModel) if m.config_class is config_class]
    if models and not any(m._can_set_attn_implementation() for m in models):
        return OWN
    if not models or getattr(config_class, "model_type", None) in COMPACT_WITHOUT_FLASH:
        return COMPACT
    if any(m._supports_flash_attn for m in models):
        return COMPACT
    return PAIRS if any(m._supports_sdpa for m in models) else ADDED


def _subclasses(kind: type) -> set[Any]:
    """All classes that are derived from `kind` and loaded."""
    found: set[Any] = set(kind.__subclasses__())
    return found.union(*map(_subclasses, found))


def _pattern(mask_function: Callable[..., Any]) -> tuple[set[str], Tensor | None]:
    """The names of the functions that a mask function combines with `and`; and if rows are packed,
    the number of each token's sequence, (batch, tokens), else None.
    """
    name = mask_function.__qualname__.partition(".")[0]
    if mask_function.__module__ != "transformers.masking_utils":
        return {f"{mask_function.__module__}.{name}"}, None
    if name == "and_masks":
        parts = map(_pattern, getclosurevars(mask_function).nonlocals["mask_functions"])
        names, packed = zip(*parts, strict=True)
        return set().union(*names), next((p for p in packed if p is not None), None)
    if name == "packed_sequence_mask_function":
        return set(), getclosurevars(mask_function).nonlocals["packed_sequence_mask"]
    if name == "remap_positions_for_packed_sequence":  # does not change masks within a sequence
        return _pattern(getclosurevars(mask_function).nonlocals["mask_function"])
    return {name}, None


def _pattern_of_arguments(mask_function: Callable[..., Any], options: dict[str, Any]) -> set[str]:
    """The names that `_pattern` finds, from the other arguments: torch.compile cannot read
    closures.
    """
    if options.get("use_vmap") or mask_function.__name__ == "or_mask":
        return {"unknown"}
    local, config = options.get("local_size"), options.get("config")
    bidirectional = "allow_is_bidirectional_skip" in options
    if local is None:
        return BIDIRECTIONAL[0] if bidirectional else CAUSAL[0]
    if local == getattr(config, "sliding_window", None):
        return BIDIRECTIONAL[1] if bidirectional else CAUSAL[1]
    return CHUNKED


def _keys(attention_mask: Tensor | None, kv_offset: int, length: int) -> Tensor | None:
    """(batch, length) bool: False for keys from kv_offset on that are padding. None if none is."""
    if attention_mask is None:
        return None
    keys = attention_mask[:, kv_offset : kv_offset + length].bool()
    keys = torch.nn.functional.pad(keys, (0, length - keys.shape[1]))
    return None if keys.all() else keys


def _has_holes(keys: Tensor) -> bool:
    """Whether a masked key lies between two visible ones, in any row."""
    return bool((keys.int().diff() == 1).sum(1).add(keys[:, 0]).gt(1).any())


def _cu_seqlens_of_rows(sequence: Tensor) -> Tensor:
    """cu_seqlens of packed rows. `sequence` (batch, tokens): each token's sequence number."""
    return _cu_seqlens_of_starts(sequence.diff() != 0, sequence.numel())


def _cu_seqlens_of_neighbours(
    mask_function: Callable[..., Any], batch_size: int, length: int, options: dict[str, Any]
) -> Tensor:
    """cu_seqlens of packed rows under torch.compile, where closures cannot be read: a sequence
    starts at a token that does not see the one before it. (A causal mask shows that one, and so
    does a window of two tokens or more.)
    """
    device = options.get("device")
    batch = torch.arange(batch_size, device=device)[:, None]
    tokens = torch.arange(1, length, device=device)[None]
    sees = mask_function(batch, torch.zeros_like(batch), tokens, tokens - 1)
    return _cu_seqlens_of_starts(~sees.expand(batch_size, -1), batch_size * length)


def _cu_seqlens_of_starts(starts: Tensor, num_tokens: int) -> Tensor:
    """cu_seqlens of packed rows. `starts` (batch, tokens - 1): whether a sequence starts at a row's
    second token, its third, ... At its first one does."""
    starts = torch.nn.functional.pad(starts, (1, 0), value=True)
    bounds = starts.flatten().nonzero().flatten()
    # `pad` with this number would make a graph of this length alone
    return torch.cat([bounds, bounds.new_full((1,), num_tokens)]).int()
