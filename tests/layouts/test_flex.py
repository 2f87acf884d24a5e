"""BlockMasks of flex_attention become layouts, and what would be lost is refused."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torch_paged_attn.layouts import from_block_mask


def causal(b, h, q, kv):
    return q >= kv


def windowed(b, h, q, kv):
    return (q >= kv) & (q - kv < 100)


def block_mask(mask_mod, batch=1, heads=1, length=256, block_size=64, **kwargs):
    return create_block_mask(
        mask_mod, batch, heads, length, length, device="cpu", BLOCK_SIZE=block_size, **kwargs
    )


@pytest.mark.parametrize("length", [256, 250])
@pytest.mark.parametrize("separate_full_blocks", [True, False])
def test_causal_mask(length, separate_full_blocks):
    mask = block_mask(causal, length=length, separate_full_blocks=separate_full_blocks)
    layout = from_block_mask(mask, causal=True)
    assert torch.equal(layout.dense()[0], torch.ones(4, 4, dtype=torch.bool).tril())


def test_blocks_per_batch_and_head():
    def mask_mod(b, h, q, kv):
        return (q // 32 + kv // 64 + b + h) % 2 == 0

    mask = block_mask(mask_mod, batch=2, heads=3, block_size=(32, 64))
    layout = from_block_mask(mask)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None]
    expected = (torch.arange(8)[:, None] + torch.arange(4) + b + h) % 2 == 0
    assert torch.equal(layout.dense(), expected)
    assert (layout.q_block_size, layout.k_block_size) == (32, 64)


def test_a_single_batch_entry_is_dropped():
    layout = from_block_mask(block_mask(causal, heads=2), causal=True)
    assert layout.crow_indices.shape == (2, 5)


def test_partial_blocks_are_refused_unless_given_up():
    mask = block_mask(windowed)
    instead = "cu_seqlens_q with the documents' lengths, or window_size_left"
    refused = rf"partial blocks.*causal=True.*widen_partial=True.*{instead}"
    with pytest.raises(ValueError, match=refused):
        from_block_mask(mask)
    with pytest.raises(ValueError, match="partial blocks of block_mask the mask_mod is not the c"):
        from_block_mask(mask, causal=True)
    layout = from_block_mask(mask, widen_partial=True)
    assert torch.equal(layout.dense(), mask.to_dense()[0].bool())


def test_causal_is_evaluated_not_assumed():
    # two documents that meet inside a diagonal block: only evaluating mask_mod shows it
    document = (torch.arange(250) >= 100).int()

    def documents(b, h, q, kv):
        return (document[q] == document[kv]) & (q >= kv)

    with pytest.raises(ValueError, match="mask_mod is not the causal mask"):
        from_block_mask(block_mask(documents, length=250), causal=True)


def test_causal_refuses_full_blocks_past_the_diagonal():
    with pytest.raises(ValueError, match="full blocks of block_mask reach past the diagonal"):
        from_block_mask(block_mask(lambda b, h, q, kv: q // 64 >= kv // 64), causal=True)


def test_blocks_without_mask_mod_are_whole():
    num_blocks = torch.tensor([[1, 2]], dtype=torch.int32)
    # what follows the first num_blocks of a row is undefined
    indices = torch.tensor([[[1, 77], [1, 0]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(num_blocks, indices, BLOCK_SIZE=64, compute_q_blocks=False)
    assert from_block_mask(mask).dense().tolist() == [[[False, True], [True, True]]]


def test_lengths_and_block_sizes_must_fit():
    mask = create_block_mask(causal, 1, 1, 128, 256, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match=r"equal Q_LEN and KV_LEN .* got 128 and 256"):
        from_block_mask(mask)
    with pytest.raises(ValueError, match=r"q_block_size must be one of .* got 512"):
        from_block_mask(block_mask(causal, length=512, block_size=512), causal=True)
