"""An attention backend of SGLang: `--attention-backend paged_attn`.

SGLang finds `register` by the entry point `sglang.srt.plugins` and calls it in each of its
processes. The backend itself is in `_sglang_backend.py`. Tested with the pools, layers and
registries of SGLang 0.5.23 on a CPU, but not in the engine, which has no CPU package on PyPI.
"""

from typing import Any

from torch_paged_attn.integrations._versions import require

NAME = "paged_attn"


def register() -> None:
    """Make NAME an attention backend of SGLang. A second call changes nothing.

    Raises:
        ImportError: SGLang is not installed, or too old.
        RuntimeError: another package has registered the name.
    """
    require("sglang", "integrations.sglang", "sglang")
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    taken = ATTENTION_BACKENDS.get(NAME)
    if taken is create:
        return
    if taken is not None:
        raise RuntimeError(
            f"torch_paged_attn.integrations.sglang: SGLang has an attention backend {NAME!r} of"
            f" {taken.__module__} already"
        )
    register_attention_backend(NAME)(create)
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])


def create(runner: Any) -> Any:
    """The backend for one of SGLang's model runners."""
    from torch_paged_attn.integrations._sglang_backend import PagedAttnBackend

    return PagedAttnBackend(runner)
