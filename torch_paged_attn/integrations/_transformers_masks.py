"""Attention masks of Transformers in a short form, without a (queries, keys) tensor if possible."""

import functools
import inspect
import math
import sys
from collections.abc import Callable
from inspect import getclosurevars
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.integrations._transformers_short import ShortMask, beside_all_pairs

# Mask functions by the names of what makes them in transformers.masking_utils
CAUSAL = ({"causal_mask_function"}, {"causal_mask_function", "sliding_window_overlay"})
BIDIRECTIONAL = (
    {"bidirectional_mask_function"},
    {"bidirectional_mask_function", "sliding_window_bidirectional_overlay"},
)
CHUNKED = {"causal_mask_function", "chunked_overlay"}

# bytes of a mask of all pairs that is made although eager layers need none
LARGEST_BESIDE = 1 << 28
# functions between `generate`'s and `make_mask`
MOST_FRAMES = 6


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
    The host reads a tensor once if there is an attention_mask or a `q_offset` on the device, and
    once more if tokens are padding.

    Returns one of:
        ShortMask: what the mask function shows, and which tokens are padding. It alone decides: the
            layer's causal mask and window do not apply.
        (batch or 1, 1, queries or 1, keys or 1) bool: exactly the keys that are seen. Where
            `generate` makes it for a static cache, it has a ShortMask beside it, for layers that
            are not compiled.
        The same as numbers that are added to the logits, for models that compute with those.
        Under torch.compile also None, a (batch, keys) mask of padding, or cu_seqlens of packed
            rows. The layer's own causal mask and window apply.

    Raises:
        NotImplementedError: the config's models do not attend by an attn_implementation.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    mask_function = mask_function or causal_mask_function

    def all_pairs(make: Callable[..., Tensor | None] = sdpa_mask) -> Tensor:
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
        mask = make(**(options | call))
        assert mask is not None  # since nothing may be skipped
        return mask

    config_class = type(options["config"]) if "config" in options else None
    wants = COMPACT if config_class is None else _wanted_mask(config_class)
    if wants == OWN:
        raise NotImplementedError(
            f"torch_paged_attn: models of {type(options['config']).__name__} attend by formulas of"
            " their own, which no attn_implementation replaces; use"
            " attn_implementation='eager'"
        )
    if wants == ADDED:
        return all_pairs(eager_mask)
    if wants == PAIRS:
        return all_pairs()
    sizes = batch_size, q_length, kv_length, kv_offset
    if torch.compiler.is_compiling():
        if config_class is not None and not _layers_know(config_class):
            return all_pairs()
        return _in_a_graph(*sizes, q_offset, mask_function, attention_mask, options, all_pairs)

    parts = _parts(mask_function)
    pattern, window = parts.names, parts.window
    if pattern == CHUNKED and kv_offset + kv_length <= options["local_size"]:
        pattern = {"causal_mask_function"}
    is_causal = pattern in CAUSAL
    # queries beside a window of both directions have to be those of the keys
    has_form = is_causal or (pattern in BIDIRECTIONAL and (window is None or q_length == kv_length))
    is_for_graph = _is_made_for_a_graph()
    is_step = is_for_graph and q_length == 1
    if not has_form or is_step or _cannot_wait(q_offset, attention_mask):
        return all_pairs()
    if parts.packed is not None:
        if not is_causal:
            return all_pairs()
        written, keys, cu_seqlens = kv_length, None, _cu_seqlens_of_rows(parts.packed)
    else:
        written, keys = _written_keys(*sizes, q_offset if is_causal else None, attention_mask)
        cu_seqlens = None
    reach = -1
    if window is not None:
        reach = window - 1 if is_causal else window
        if reach < 0:
            return all_pairs()  # no key is seen
    size = batch_size, 1, q_length, kv_length
    device = _device_of(options, q_offset, attention_mask)
    mask = ShortMask.of(all_pairs, size, device, is_causal, reach, written, keys, cu_seqlens)
    if keys is not None and window is not None and mask.ranges() is None:
        return all_pairs()  # a window counts hidden keys too
    if is_for_graph and math.prod(size) <= LARGEST_BESIDE:
        return beside_all_pairs(all_pairs(), mask)
    return mask


def _is_made_for_a_graph() -> bool:
    """Whether `generate` asks: for a static cache it makes masks outside of the model's forward
    pass, which may be compiled, by a function of this name. No argument says so.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == "create_masks_for_generate":
            return True
        frame = frame.f_back
    return False


def _device_of(options: dict[str, Any], *tensors: Any) -> Any:
    found = [x.device for x in tensors if isinstance(x, Tensor)]
    return options.get("device", found[0] if found else "cpu")


def _cannot_wait(*values: Any) -> bool:
    """Whether the host would have to read one of the values, and may not: a CUDA graph is being
    captured."""
    if not any(isinstance(x, Tensor) for x in values) or not torch.cuda.is_available():
        return False
    return torch.cuda.is_current_stream_capturing()


def _written_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    kv_offset: int,
    q_offset: int | Tensor | None,
    attention_mask: Tensor | None,
) -> tuple[int, Tensor | None]:
    """How many of the cache's keys are written, and (batch, written) bool: False for those that are
    padding; None if none is. q_offset None: all keys are written.
    """
    is_read = isinstance(q_offset, Tensor)
    whole = True
    if attention_mask is not None:
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        is_whole = attention_mask.all()
        if is_read:  # both at once: the host waits for the device
            offset = torch.as_tensor(q_offset).reshape(()).to(is_whole.device)
            whole, q_offset = torch.stack([is_whole.long(), offset.long()]).tolist()
        else:
            whole = bool(is_whole)
    written = kv_length
    if q_offset is not None:
        written = min(kv_length, int(q_offset) + q_length - kv_offset)
    if attention_mask is None or (whole and attention_mask.shape[1] >= written):
        return written, None
    keys = _padded_to(attention_mask, written)
    is_cut = keys.shape[1] < attention_mask.shape[1]
    return written, None if is_cut and bool(keys.all()) else keys


def _in_a_graph(
    batch_size: int,
    q_length: int,
    kv_length: int,
    kv_offset: int,
    q_offset: int | Tensor,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    options: dict[str, Any],
    all_pairs: Callable[[], Tensor],
) -> Tensor | None:
    """The mask while torch.compile traces the model: no value is read."""
    if attention_mask is not None or isinstance(q_offset, Tensor):
        return all_pairs()
    pattern = _pattern_of_arguments(mask_function, options)
    may_be_packed = pattern in CAUSAL and mask_function.__name__ == "and_mask"
    if may_be_packed and q_length == kv_length:
        return _cu_seqlens_of_neighbours(mask_function, batch_size, q_length, options)
    if pattern == CHUNKED and kv_offset + kv_length <= options["local_size"]:
        pattern = {"causal_mask_function"}
    if pattern in CAUSAL:
        written = min(kv_length, q_offset + q_length - kv_offset)
        if written == kv_length:
            return None
        return torch.ones(batch_size, written, dtype=torch.bool, device=options.get("device"))
    if pattern not in BIDIRECTIONAL or (len(pattern) > 1 and q_length != kv_length):
        return all_pairs()
    if len(pattern) > 1:
        return None
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=options.get("device"))


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


@torch.compiler.assume_constant_result
def _layers_know(config_class: type) -> bool:
    """Whether the layers of a config's models apply by themselves what their masks say, and take a
    mask as it is. Asked under torch.compile only, where masks in a short form are plain tensors.
    """
    return _search_layers_know(config_class)


@functools.cache
def _search_layers_know(config_class: type) -> bool:
    from transformers import PreTrainedModel

    for model in _subclasses(PreTrainedModel):
        if model.config_class is not config_class:
            continue
        source = inspect.getsource(inspect.getmodule(model) or model)
        is_any_causal = "is_causal: bool = False" not in source or "is_causal=True" in source
        has_windows = "create_sliding_window_causal_mask" in source
        windows_are_passed = not has_windows or "sliding_window=" in source
        # Gemma 4 cuts queries off masks
        if not is_any_causal or not windows_are_passed or "kv_shared_inputs" in source:
            return False
    return True


class Parts(NamedTuple):
    """What a mask function combines with `and`."""

    names: set[str]  # of the functions
    packed: Tensor | None = None  # the number of each token's sequence, (batch, tokens)
    window: int | None = None  # the number that a window's function has


def _parts(mask_function: Callable[..., Any]) -> Parts:
    name = mask_function.__qualname__.partition(".")[0]
    if mask_function.__module__ != "transformers.masking_utils":
        return Parts({f"{mask_function.__module__}.{name}"})
    closure = getclosurevars(mask_function).nonlocals
    if name == "and_masks":
        parts = list(map(_parts, closure["mask_functions"]))
        packed = next((x.packed for x in parts if x.packed is not None), None)
        windows = [x.window for x in parts if x.window is not None]
        names = set().union(*(x.names for x in parts))
        return Parts(names, packed, min(windows) if windows else None)
    if name == "packed_sequence_mask_function":
        return Parts(set(), closure["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":  # does not change masks within a sequence
        return _parts(closure["mask_function"])
    return Parts({name}, None, closure.get("sliding_window"))


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


def _padded_to(keys: Tensor, length: int) -> Tensor:
    """(batch, length): the first columns of keys, and False for those that it does not have."""
    return torch.nn.functional.pad(keys[:, :length], (0, max(length - keys.shape[1], 0)))


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
