"""Tile sizes: given by the caller, else from the GPU's table, else by a rule of thumb."""

from torch_paged_attn.backends.triton.tuning.backward import BackwardConfig, choose_backward_config
from torch_paged_attn.backends.triton.tuning.hopper import (
    HopperConfig,
    choose_8_bit_config,
    choose_copied_config,
    choose_guessed_8_bit_config,
    choose_guessed_config,
    choose_hopper_config,
    choose_narrow_config,
    choose_short_config,
    choose_split_config,
)
from torch_paged_attn.backends.triton.tuning.portable import (
    Config,
    choose_config,
    choose_config_in_turns,
)

__all__ = [
    "BackwardConfig",
    "Config",
    "HopperConfig",
    "choose_8_bit_config",
    "choose_backward_config",
    "choose_config",
    "choose_config_in_turns",
    "choose_copied_config",
    "choose_guessed_8_bit_config",
    "choose_guessed_config",
    "choose_hopper_config",
    "choose_narrow_config",
    "choose_short_config",
    "choose_split_config",
]
