"""Attention kernels for unmodified Hugging Face programs.

    LOCAL_KERNELS=$(python -m torch_paged_attn hub) python program.py

The package `kernels` then loads the attention kernels of Hugging Face's hub from this folder
instead of downloading them: `attn_implementation="flash_attention_2"` works on a CPU without
flash-attn, and `generate_batch` uses it automatically. A model may also use NAME as its
implementation.

Transformers 5.17 needs kernels 0.16, 5.23 needs 0.18.
"""

from pathlib import Path

NAME = "torch-paged-attn/flash-attn2"

# the kernels that Transformers asks the hub for, and NAME
REPLACED = ("kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3", NAME)


def local_kernels() -> str:
    """The value of LOCAL_KERNELS: `name=folder` for each kernel, separated by colons."""
    folder = Path(__file__).parent
    return ":".join(f"{name}={folder}" for name in REPLACED)
