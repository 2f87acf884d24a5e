"""The pages of the API reference, generated from signatures, docstrings and the argument table.

`tools/docs_site.py` calls it while mkdocs builds the site. The signatures of the attention
operators are made when the package is imported (`ops/signature.py`), so a tool that only reads the
sources would not see them. A test checks that every stable name is on a page.
"""

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch_paged_attn import ops

# the operators whose arguments are the list's
OPS = tuple(x for x in ops.__all__ if hasattr(inspect.unwrap(getattr(ops, x)), "__signature__"))
ENTRY = re.compile(r"([a-z_][\w]*(?:, [a-z_]\w*)*|[A-Z]\w*(?:Error|Full)): +(.*)", re.DOTALL)
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Sources):(?: (.*))?$")


class Page(NamedTuple):
    """A page: its title, an introduction, and the names of each module."""

    title: str
    about: str
    names: dict[str, tuple[str, ...]]


PAGES = {
    "operators": Page(
        "Operators",
        "Shapes, dtypes and errors of each operator. [Semantics](../semantics.md) defines results.",
        {"torch_paged_attn": tuple(sorted(ops.__all__, key=lambda x: x.endswith("_backward")))},
    ),
    "flash_attn": Page(
        "flash-attn's functions",
        "The same arguments as flash-attn's functions ([migration](../migration/flash-attn.md)).",
        {
            "torch_paged_attn.integrations.flash_attn": (
                *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
                *("flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"),
                *("flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"),
                *("install", "uninstall"),
            )
        },
    ),
    "kv_cache": Page(
        "KV cache",
        "Page allocation, shared prefixes and the metadata of a step, on the host.",
        {"torch_paged_attn": ("PagedKVCache", "PagedBatch", "CacheFull")},
    ),
    "layouts": Page(
        "Block-sparse layouts",
        "Layouts for `blocksparse`, and functions that build them.",
        {
            "torch_paged_attn.layouts": (
                *("BlockSparseLayout", "from_block_mask", "from_dense_mask", "sliding_window"),
                *("local_strided", "bigbird", "BLOCK_SIZES"),
            )
        },
    ),
    "planning": Page(
        "Kernel selection and warm-up",
        "Which kernel runs a call ([explained here](../running.md)), and compiling in advance.",
        {"torch_paged_attn": ("explain", "Explanation", "warmup", "use_compiled")},
    ),
    "integrations": Page(
        "Integrations",
        "Each client has a page of its own: [integrations](../adoption.md).",
        {
            "torch_paged_attn.integrations.transformers": ("NAME", "register", "use"),
            "torch_paged_attn.integrations.diffusers": ("NAME", "register"),
            "torch_paged_attn.integrations.vllm": ("register",),
            "torch_paged_attn.integrations.sglang": ("register",),
            "torch_paged_attn.integrations.torch_attention": ("activate",),
            "torch_paged_attn.integrations.torch_sdpa": ("activate",),
            "torch_paged_attn.integrations.flash_mla": (
                *("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"),
            ),
            "torch_paged_attn.integrations.fla": ("native_sparse_attention",),
            "torch_paged_attn.integrations.minimax_m3": (
                *("minimax_m3_sparse_attn", "minimax_m3_sparse_attn_decode"),
            ),
        },
    ),
    "distributed": Page(
        "Several devices",
        "Unstable: names may change in a minor version. [Several devices](../distributed.md) says"
        " which of them to use.",
        {
            "torch_paged_attn.distributed.context_parallel": (
                *("Shards", "all_gather_attention", "ring_attention", "ulysses_attention"),
                "SharedKeys",
            ),
            "torch_paged_attn.distributed.load_balance": (
                *("owners", "contiguous", "head_tail", "documents"),
            ),
            "torch_paged_attn.distributed.decode": (
                *("decode_attention", "local_lengths", "local_slots", "gather_heads"),
                "SymmetricCombine",
            ),
            "torch_paged_attn.distributed.sharding": (
                *("flash_varlen", "local_flash_varlen", "blocksparse", "reshape_and_cache"),
            ),
        },
    ),
    "testing": Page(
        "Testing",
        "Unstable: accuracy checks for kernels and models of your own. `PROBLEMS` run on every"
        " backend, `EXTENDED` have arguments that a backend may refuse; `DIFFERENTIABLE` and"
        " `EXTENDED_DIFFERENTIABLE` are those with gradients, `TRAINING` are further ones, and"
        " `SELECTED` and `SELECTED_DIFFERENTIABLE` are those of `selected_attention`.",
        {
            "torch_paged_attn.testing": (
                *("assert_accurate", "assert_accurate_gradients"),
                *("assert_accurate_merge_gradients", "assert_batch_invariant"),
                *("assert_as_right_as", "assert_same_in_float64", "assert_rounded_alike"),
                *("assert_close_as_baseline",),
                *("Problem", "Layout", "Selected", "Call", "build", "Truth"),
                *("Gradients", "MergeGradients"),
                *("PROBLEMS", "EXTENDED", "DIFFERENTIABLE", "EXTENDED_DIFFERENTIABLE", "TRAINING"),
                *("SELECTED", "SELECTED_DIFFERENTIABLE"),
            )
        },
    ),
}


def names() -> set[str]:
    """All names that have an entry, with their modules."""
    return {
        f"{module}.{name}"
        for page in PAGES.values()
        for module, listed in page.names.items()
        for name in listed
    }


def contents() -> str:
    """A list of all pages with their names, as markdown."""
    lines = []
    for file, page in PAGES.items():
        listed = (f"`{name}`" for names in page.names.values() for name in names)
        lines.append(f"- [{page.title}]({file}.md): {', '.join(listed)}")
    return "\n".join(lines)


def text(file: str) -> str:
    """One page as markdown."""
    page = PAGES[file]
    parts = [f"# {page.title}", page.about]
    for module, listed in page.names.items():
        if len(page.names) > 1:
            parts += [f"## {module.removeprefix('torch_paged_attn.')}", f"Module `{module}`."]
        level = "###" if len(page.names) > 1 else "##"
        for name in listed:
            value = getattr(importlib.import_module(module), name)
            parts += list(entry(name, value, level))
    return "\n\n".join(parts) + "\n"


def entry(name: str, value: Any, level: str) -> Iterator[str]:
    """The parts of an entry: heading, signature, description, methods."""
    yield f"{level} {name}"
    if isinstance(value, str | tuple):
        yield f"```python\n{name} = {value!r}\n```"
        return
    if isinstance(value, dict):
        yield f"A dictionary of {len(value)} problems by name, such as `{next(iter(value))}`."
        return
    yield f"```python\n{signature(name, value)}\n```"
    yield from description(name, value)
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if not field.name.startswith("_")]
        if fields:
            rows = [f"| `{x.name}` | `{annotation(x.type)}` |" for x in fields]
            yield "\n".join(["| field | type |", "|---|---|", *rows])
    if inspect.isclass(value):
        for method, member in vars(value).items():
            function = getattr(member, "__func__", member)
            if isinstance(member, property):
                yield f"{level}# {name}.{method}"
                yield from prose(member.__doc__ or "")
            elif inspect.isfunction(function) and not method.startswith("_"):
                yield f"{level}# {name}.{method}"
                yield f"```python\n{signature(method, getattr(value, method))}\n```"
                yield from prose(function.__doc__ or "")


def annotation(value: Any) -> str:
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    return re.sub(r"\b(?:torch_paged_attn|collections|typing|torch)\.(?:\w+\.)*(?=[A-Z])", "", text)


def signature(name: str, value: Any) -> str:
    """A call with its arguments, in several lines if it is long."""
    found = inspect.signature(value)
    words = []
    kinds = [x.kind for x in found.parameters.values()]
    for i, x in enumerate(found.parameters.values()):
        if x.name == "self":
            continue
        if x.kind is x.KEYWORD_ONLY and not {x.KEYWORD_ONLY, x.VAR_POSITIONAL} & set(kinds[:i]):
            words.append("*")
        word = {x.VAR_POSITIONAL: "*", x.VAR_KEYWORD: "**"}.get(x.kind, "") + x.name
        if x.annotation is not x.empty:
            word += f": {annotation(x.annotation)}"
        if x.default is not x.empty:
            word += f" = {x.default!r}" if x.annotation is not x.empty else f"={x.default!r}"
        words.append(word)
    returned = ""
    if found.return_annotation is not found.empty and not inspect.isclass(value):
        returned = f" -> {annotation(found.return_annotation)}"
    line = f"{name}({', '.join(words)}){returned}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returned}"


def description(name: str, value: Any) -> Iterator[str]:
    """The docstring; an attention operator's arguments as a table."""
    from torch_paged_attn.ops import signature as of_op
    from torch_paged_attn.ops.backend import backends

    doc = inspect.getdoc(value) or ""
    module = getattr(value, "__module__", "")
    if name in OPS and module.startswith("torch_paged_attn.ops"):
        before, _, after = doc.partition("\nArgs:\n")
        yield from prose(before)
        rows = ["| argument | type | default | shape and meaning |", "|---|---|---|---|"]
        for x in of_op.arguments(name):
            none = x.default is dataclasses.MISSING
            default = "" if none else "from shapes" if x.is_hint else f"`{x.default!r}`"
            meaning = ". ".join(part for part in (x.shape, x.meaning) if part)
            if x.is_optional:
                some = [backend.name for backend in backends() if x.name not in backend.lacks]
                meaning += f" *Optional:* supported by {', '.join(some)}."
            kind = annotation(x.type).replace("|", "\\|")
            rows.append(f"| `{x.name}` | `{kind}` | {default} | {meaning} |")
        yield "\n".join(rows)
        rest = re.search(r"^(Returns|Raises):", after, re.MULTILINE)
        doc = after[rest.start() :] if rest else ""
    yield from prose(doc)


def prose(doc: str) -> Iterator[str]:
    """A docstring as markdown: sections, entries `name: meaning`, examples and code."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(doc))
    for block in filter(str.strip, blocks):
        lines = block.splitlines()
        if (found := SECTION.match(lines[0])) is not None:
            yield f"**{found[1]}**" + (f" {found[2]}" if found[2] else "")
            block = textwrap.dedent("\n".join(lines[1:]))
            lines = block.splitlines()
            if not lines:
                continue
        if all(line.startswith("    ") for line in lines):
            yield f"```text\n{textwrap.dedent(block)}\n```"
        elif lines[0].startswith(">>>"):
            code = "\n".join(line.removeprefix(">>> ").removeprefix("... ") for line in lines)
            yield f"```python\n{code}\n```"
        elif ENTRY.match(block):
            yield "\n".join(f"- {line}" for line in entries(lines))
        else:
            yield block


def entries(lines: list[str]) -> Iterator[str]:
    """Each `name: meaning`, in one line; continuation lines are indented."""
    joined: list[str] = []
    for line in lines:
        if joined and line.startswith(" "):
            joined[-1] += " " + line.strip()
        else:
            joined.append(line)
    for line in joined:
        found = ENTRY.match(line)
        if found is None:
            yield line
            continue
        listed = ", ".join(f"`{name}`" for name in found[1].split(", "))
        yield f"{listed}: {found[2]}"
