"""`selected_attention` to whole pages on Neuron, as `flash_varlen`.

Lists, lengths and block tables are read on the host, as `plan.py` reads those of any call.
"""

import dataclasses
from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron import BACKEND
from torch_paged_attn.backends.neuron.attention import attend
from torch_paged_attn.backends.neuron.plan import on_host, values_of
from torch_paged_attn.ops.lacking import refuse_lacking
from torch_paged_attn.ops.selected_pages import NamedPages, attend_pages, named_pages

LISTS = "key_indices", "num_selected"


def selected_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.selected_attention`."""
    call = AttentionCall.selected_attention(*args, **kwargs)
    refuse_lacking(call, "neuron", BACKEND.lacks)
    return attend_pages(call, "neuron", attend, find=_named_on_host)


def _named_on_host(call: AttentionCall) -> NamedPages:
    """Neuron's compiler has no sort."""
    assert call.selection is not None
    lists = dataclasses.replace(call.selection, **values_of(call.selection, LISTS))
    return named_pages(dataclasses.replace(on_host(call), selection=lists)).to(call.q.device)
