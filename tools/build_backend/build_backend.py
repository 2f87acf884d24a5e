"""The PEP 517 backend: setuptools', with the headers of the torch that is already installed.

pip builds in an environment of its own, where there is no torch. This finds the torch of the
environment that pip installs into, and asks for one from the index only if there is none, so that
`pip install .` neither downloads a second torch nor builds without one.
"""

import os
import re
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def installed_torch() -> str | None:
    """The folder of the first torch, 2.11 or later, that this Python's environment holds."""
    places = [sysconfig.get_path("platlib"), *site.getsitepackages(), *sys.path]
    for place in dict.fromkeys(places):
        version = Path(place, "torch/version.py")
        if not version.is_file():
            continue
        found = re.search(r"__version__ = '(\d+)\.(\d+)", version.read_text())
        if found is not None and (int(found[1]), int(found[2])) >= (2, 11):
            return str(version.parent)
    return None


def _torch() -> list[str]:
    """The build requirement for torch, if it has to come from the index."""
    if os.environ.get("PAGED_ATTN_BUILD_CPP") == "0" or os.environ.get("PAGED_ATTN_TORCH"):
        return []
    return ["torch>=2.11"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch()]


if (found := installed_torch()) is not None:
    os.environ.setdefault("PAGED_ATTN_TORCH", found)
