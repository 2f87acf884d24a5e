"""How many kernels a process compiles whose lengths grow with each call. Nothing is compiled."""

from kernel_counts import in_process


def decodes(steps):
    import torch

    from torch_paged_attn.integrations.flash_attn import flash_attn_func

    def new(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16)

    for i in range(steps):
        keys = new(4, 1000 + i, 8, 128)
        flash_attn_func(new(4, 1, 32, 128), keys, keys, causal=True)


def test_decode_over_dense_keys():
    kernels = in_process("sm90", decodes, 200)
    assert kernels.by_name() == {"_attention_fwd_kernel": 1}, kernels.report()
