"""An attention backend of vLLM: `vllm serve MODEL --attention-backend CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its
processes. Without `--attention-backend CUSTOM` nothing changes. The backend itself is in
`_vllm_backend.py`. Works with vLLM 0.29 and later; tested with 0.32.
"""

import functools
import logging
from typing import Any

from torch_paged_attn.integrations._versions import TESTED

BACKEND = "torch_paged_attn.integrations._vllm_backend.PagedAttentionBackend"
OLDEST = tuple(map(int, TESTED["vllm"].oldest.split(".")))

logger = logging.getLogger("torch_paged_attn")


def register() -> None:
    """Register the backend as vLLM's CUSTOM, on GPUs and on CPUs. A second call changes nothing. If
    another package has registered CUSTOM, or vLLM is too old, a warning is logged instead.
    """
    import vllm

    version = getattr(vllm, "__version_tuple__", (0, 0))[:2]
    if version < OLDEST:
        logger.warning(
            "torch_paged_attn serves vLLM %d.%d and later, and this is vLLM %s: CUSTOM is not ours",
            *OLDEST,
            vllm.__version__,
        )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning(
            "vLLM's attention backend CUSTOM is %s; torch_paged_attn leaves it so",
            custom.get_path(),
        )
        return
    register_backend(custom, BACKEND)
    _let_cpus_choose(custom)


def _let_cpus_choose(custom: Any) -> None:
    """Make vLLM's CPU platform use CUSTOM if it is selected; otherwise it always uses CPU_ATTN."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.get_attn_backend_cls
    if hasattr(stock, "_is_ours"):
        return

    @functools.wraps(stock.__func__)
    def choose(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        wanted = attn_selector_config
        if selected_backend is custom and not wanted.use_mla and not wanted.use_sparse:
            return BACKEND
        return stock(selected_backend, attn_selector_config, *args, **kwargs)

    choose._is_ours = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(choose)
