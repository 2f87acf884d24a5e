"""Hugging Face programs on these operators, without a change to them.

    LOCAL_KERNELS=$(python -m torch_paged_attn hub) python program.py

The package `kernels` then takes attention kernels of Hugging Face's hub from this folder instead of
downloading them: `attn_implementation="flash_attention_2"` works on a CPU without flash-attn, and
`generate_batch` switches to it by itself. A model may also ask for NAME. Nothing is downloaded.

Transformers 5.17 wants kernels 0.16, 5.23 wants 0.18.
"""

from pathlib import Path

NAME = "torch-paged-attn/flash-attn2"

# the kernels that Transformers asks the hub for, and NAME
REPLACED = ("kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3", NAME)


def local_kernels() -> str:
    """The value of LOCAL_KERNELS: for each name of a kernel, the folder that holds it."""
    folder = Path(__file__).parent
    return ":".join(f"{name}={folder}" for name in REPLACED)
