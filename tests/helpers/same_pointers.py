"""A launch that is called again has to get what its kernel was compiled for: on a GPU the kernel is
looked up once. Triton's interpreter takes anything, so a wrapper looks."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton.runtime.launch_cache import Launch


def _kind(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return x.dtype if isinstance(x, Tensor) else type(x)


def watch() -> None:
    """From now on, in this process."""
    if Launch._through_triton.__name__ == "launch":
        return
    through_triton = Launch._through_triton
    # a launch has no place for more; those that are kept keep their numbers
    known: dict[int, tuple[Launch, Any]] = {}

    def launch(self: Launch, pointers: tuple[Any, ...]) -> Any:
        now = _kind(pointers)
        _, before = known.setdefault(id(self), (self, now))
        if before != now:
            raise TypeError(f"{self.kernel.__name__}: it got {before}, then {now}")
        return through_triton(self, pointers)

    Launch._through_triton = launch
