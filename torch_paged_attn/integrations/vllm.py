"""vLLM's attention on these operators: `vllm serve MODEL --attention-backend CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its
processes. Nothing else has to be done, and nothing changes for who does not ask for CUSTOM. The
backend itself is in `_vllm_backend.py`. Works with vLLM 0.29 and later; run with 0.32.
"""

import functools
import logging
from typing import Any

from torch_paged_attn.integrations._versions import TESTED

BACKEND = "torch_paged_attn.integrations._vllm_backend.PagedAttentionBackend"
OLDEST = tuple(map(int, TESTED["vllm"].oldest.split(".")))

logger = logging.getLogger("torch_paged_attn")


def register() -> None:
    """Make CUSTOM of vLLM's attention backends ours, on GPUs and on CPUs. A second call changes
    nothing; where another package has taken CUSTOM, or vLLM is too old, the log says so.
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
    """Make vLLM's CPU platform return CUSTOM where CUSTOM is asked for; by itself it returns
    CPU_ATTN whatever is asked for.
    """
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
