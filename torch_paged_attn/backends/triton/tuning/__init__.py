"""Tile sizes: given by the caller, else from the GPU's table, else by a rule of thumb."""

from torch_paged_attn.backends.triton.tuning.backward import BackwardConfig, choose_backward_config
from torch_paged_attn.backends.triton.tuning.hopper import FORWARD, HopperConfig
from torch_paged_attn.backends.triton.tuning.portable import (
    Config,
    choose_config,
    choose_config_in_turns,
)

__all__ = [
    "FORWARD",
    "BackwardConfig",
    "Config",
    "HopperConfig",
    "choose_backward_config",
    "choose_config",
    "choose_config_in_turns",
]
