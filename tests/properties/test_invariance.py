"""With `batch_invariant`, a query's bits on the CPU: its sequence's prompt may be cut anywhere."""

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st
from same_bits import assert_same_bits
from served import HAS

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.testing import Call, build
from torch_paged_attn.testing.inputs import cumulative
from torch_paged_attn.testing.strategies import layouts, problems


@given(
    problems(st.one_of(st.none(), layouts), optional=HAS - {"tail_mask"}),
    st.data(),
)
def test_invariant_bits_depend_on_no_chunk(problem, data):
    """Nor on whether a query comes alone: its sequence's prompt may be cut anywhere."""
    problem = dataclasses.replace(problem, batch_invariant=True, dropout_p=0.0)
    lengths = problem.query_lens
    if not any(lengths):
        return
    b = data.draw(st.sampled_from([b for b, n in enumerate(lengths) if n]), "sequence")
    first = data.draw(st.integers(0, lengths[b] - 1), "first query")
    last = data.draw(st.integers(first + 1, lengths[b]), "last query")
    call = build(problem)
    found = call.run()
    chunk = dict(call.alone(b).args)
    position = int(AttentionCall.flash_varlen(**without_layout(chunk)).first_positions()[0])
    key_len = problem.key_lens[b]
    if chunk.get("block_table") is None and chunk.get("cu_seqlens_k") is None:
        chunk["cu_seqlens_k"] = cumulative([key_len])
    is_plain = problem.causal and problem.key_ranks == 1 and problem.q_positions is None
    if is_plain and data.draw(st.booleans(), "cut keys"):
        key_len = max(position + last, 0)
    chunk["seqused_k"] = torch.tensor([key_len], dtype=torch.int32)
    chunk["cu_seqlens_q"] = cumulative([last - first])
    chunk["q_position"] = torch.tensor([position + first], dtype=torch.int32)
    for name in ("q", "q_latent"):
        if chunk.get(name) is not None:
            chunk[name] = chunk[name][first:last]
    if chunk.get("attn_bias") is not None:
        chunk["attn_bias"] = chunk["attn_bias"][:, first:last]
    out, lse = Call(call.op, chunk).run()
    start = int(call.args["cu_seqlens_q"][b])
    rows = slice(start + first, start + last)
    assert_same_bits((out, lse), (found[0][rows], found[1][:, rows]))


def without_layout(args):
    of_layout = ("crow_indices", "col_indices", "q_block_size", "k_block_size")
    return {name: x for name, x in args.items() if name not in of_layout}
