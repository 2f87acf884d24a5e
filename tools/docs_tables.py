"""Tables of the documentation that are generated: tested versions, and features beside the peers'.

    python tools/docs_tables.py            write them
    python tools/docs_tables.py --check    exit status 1 if a page is not up to date

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. A test checks them.
"""

import re
import sys
from pathlib import Path

from torch_paged_attn.attention_call import arguments
from torch_paged_attn.integrations._versions import TESTED

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PEERS = ("flash-attn 2", "FlashAttention-3", "FlashInfer", "FlexAttention", "SDPA")

# feature, our argument or operator, and each peer's support
FEATURES = (
    ("packed sequences", "cu_seqlens_q", "yes", "yes", "yes", "by `mask_mod`", "nested tensors"),
    ("paged keys and values", "block_table", "pages of 256", "yes", "yes", "by a mask", "no"),
    ("sliding window", "window_size_left", "yes", "yes", "yes", "by `mask_mod`", "by a mask"),
    ("soft cap", "softcap", "yes", "yes", "yes", "by `score_mod`", "no"),
    ("ALiBi", "alibi_slopes", "yes", "no", "yes", "by `score_mod`", "by a mask"),
    ("bias or any mask", "attn_bias", "no", "no", "a bool mask", "by `score_mod`", "yes"),
    ("dropout", "dropout_p", "yes", "no", "no", "no", "yes"),
    ("8-bit keys and values", "k_descale", "no", "float8", "float8", "no", "no"),
    ("MLA with separate latents", "q_latent", "no", "yes", "yes", "no", "no"),
    ("block-sparse masks", "blocksparse", "no", "no", "yes", "yes", "no"),
    ("same bits in any batch", "batch_invariant", "no", "no", "with fixed splits", "no", "no"),
    ("gradients", "flash_varlen_backward", "yes", "yes", "no", "yes", "yes"),
    ("CPU kernels", "", "no", "no", "no", "yes", "yes"),
)  # fmt: skip


def versions() -> str:
    """The oldest version of each project that works, and the newest that was tested."""
    lines = ["| project | oldest | newest tested |", "|---|---|---|"]
    lines += [f"| {name} | {x.oldest} | {x.newest} |" for name, x in TESTED.items()]
    return "\n".join(lines)


def features() -> str:
    """A row for each feature. Ours are arguments of the operators, or operators."""
    import torch_paged_attn

    known = {x.name for x in arguments("blocksparse")} | set(torch_paged_attn.__all__)
    lines = [f"| feature | torch_paged_attn | {' | '.join(PEERS)} |", "|---" * 7 + "|"]
    for feature, ours, *peers in FEATURES:
        if ours and ours not in known:
            raise ValueError(f"{feature}: there is no {ours}")
        lines.append(f"| {feature} | {f'`{ours}`' if ours else 'yes'} | {' | '.join(peers)} |")
    return "\n".join(lines)


def rendered(page: Path) -> str:
    tables = {"versions": versions, "features": features}
    return MARK.sub(lambda x: f"{x[1]}\n{tables[x[2]]()}\n\n{x[3]}", page.read_text())


def main() -> int:
    pages = {page: rendered(page) for page in sorted((ROOT / "docs").rglob("*.md"))}
    stale = [page for page, text in pages.items() if page.read_text() != text]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: run python tools/docs_tables.py")
        if "--check" not in sys.argv:
            page.write_text(pages[page])
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
