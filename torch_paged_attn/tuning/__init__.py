"""How a call is tiled on a chip: explicit choice, then the chip's table, then a rule of thumb."""

from torch_paged_attn.tuning.attention import Config, choose_config

__all__ = ["Config", "choose_config"]
