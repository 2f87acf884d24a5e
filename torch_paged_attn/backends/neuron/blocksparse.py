"""`blocksparse` on Neuron: the same kernel, over items whose keys are those of listed blocks."""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.attention import attend


def blocksparse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.blocksparse`."""
    return attend(AttentionCall.blocksparse(*args, **kwargs))
