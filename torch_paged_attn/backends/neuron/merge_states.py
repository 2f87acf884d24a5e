"""`merge_states` on Neuron: elementwise, so that the graph compiler fuses plain PyTorch."""

from torch import Tensor

from torch_paged_attn.ops.merge_states import composed_list as merge_states_list

__all__ = ["merge_states", "merge_states_list"]


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.merge_states`; computed in float32."""
    return merge_states_list([out_a, out_b], [lse_a, lse_b])
