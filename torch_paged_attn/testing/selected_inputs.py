"""The lists of selected keys of a `Problem`."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.testing.problem import Problem

# an entry of a list that no kernel may read
HOSTILE = 2**31 - 1


def selected_lists(problem: Problem, total_q: int, table: Tensor | None) -> dict[str, Any]:
    """key_indices, num_selected and select_size. Lists of rows of padding name units that are not
    there. They have a generator of their own, so that they do not change the other tensors.
    """
    selected = problem.selected
    assert selected is not None
    g = torch.Generator().manual_seed(problem.seed + 2)
    groups = 1 if selected.heads == "one" else problem.num_kv_heads
    size = selected.size
    counts = [-(-n // size) for n in problem.key_lens]
    width = max(counts, default=0) if selected.units == "all" else selected.units
    assert isinstance(width, int)
    entries = torch.full((total_q, groups, width), HOSTILE, dtype=torch.int32)
    read = torch.full((total_q, groups), width, dtype=torch.int32)
    row = 0
    firsts = problem.q_positions or [context for _, context in problem.seqs]
    for b, (query_len, count) in enumerate(zip(problem.query_lens, counts, strict=True)):
        for i in range(query_len):
            for group in range(groups):
                listed = torch.randperm(count + 3 * selected.past, generator=g)
                if selected.own:
                    own = (firsts[b] + i) // size
                    listed = torch.cat([listed[listed == own], listed[listed != own]])
                listed = listed[:width]
                holes = torch.rand(listed.shape, generator=g) < selected.holes
                listed = listed.masked_fill(holes, -1)
                if table is not None and selected.slots:
                    listed = _slots(listed, table[b], problem)
                entries[row, group] = -1
                if selected.counted:
                    n = int(torch.randint(len(listed) + 1, (), generator=g))
                    # names units twice, behind those that are read
                    entries[row, group] = 0
                    read[row, group] = n
                entries[row, group, : len(listed)] = listed.to(torch.int32)
            row += 1
    read[row:] = HOSTILE if selected.counted else width
    found: dict[str, Any] = {"key_indices": entries, "select_size": size}
    if selected.counted:
        found["num_selected"] = read.masked_fill(read == HOSTILE, width)
    return found


def _slots(listed: Tensor, pages: Tensor, problem: Problem) -> Tensor:
    """Units of a sequence as units of the cache."""
    assert problem.page_size is not None and problem.selected is not None
    per_page = problem.page_size // problem.selected.size
    units = pages.long()[listed.clamp(min=0) // per_page] * per_page + listed % per_page
    return units.where(listed >= 0, -1)
