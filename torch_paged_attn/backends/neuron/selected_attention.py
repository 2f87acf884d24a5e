"""`selected_attention` to whole pages on Neuron, as `flash_varlen`.

Lists, lengths and block tables are read on the host, as `plan.py` reads those of any call.
"""

import dataclasses
from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron import BACKEND
from torch_paged_attn.backends.neuron.attention import attend
from torch_paged_attn.backends.neuron.plan import read
from torch_paged_attn.ops.lacking import refuse_lacking
from torch_paged_attn.ops.selected_pages import NamedPages, attend_pages, named_pages

METADATA = "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"


def selected_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.selected_attention`."""
    call = AttentionCall.selected_attention(*args, **kwargs)
    refuse_lacking(call, "neuron", BACKEND.lacks)
    return attend_pages(call, "neuron", attend, find=_named_on_host)


def _named_on_host(call: AttentionCall) -> NamedPages:
    """Neuron's compiler has no sort."""
    selection = call.selection
    assert selection is not None
    lists: dict[str, Any] = _read(selection, ("key_indices", "num_selected"))
    metadata: dict[str, Any] = _read(call, METADATA)
    metadata["selection"] = dataclasses.replace(selection, **lists)
    return named_pages(dataclasses.replace(call, **metadata)).to(call.q.device)


def _read(given: Any, names: tuple[str, ...]) -> dict[str, Tensor | None]:
    """Tensors of a call on the host."""
    tensors = ((name, getattr(given, name)) for name in names)
    return {name: None if x is None else read(x) for name, x in tensors}
