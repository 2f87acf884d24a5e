"""What the report promises: long DMAs, keys read once in a decode, room to double buffer."""

from torch_paged_attn.backends.neuron import report


def test_decode_reads_keys_once_and_in_long_pieces():
    decode = next(problem for problem in report.CASES if "decode" in problem.name)
    cost = report.cost_of(decode)
    assert cost.long_share >= 0.95
    assert cost.dma_bytes <= 1.3 * cost.fewest_bytes
    # two items in flight fit
    assert cost.peak["sbuf"] <= 96 * 1024 and cost.peak["psum"] <= 8 * 1024
