"""Registers of the sequencer: numbers that exist only when the program runs."""

from typing import Any, NoReturn

from nki_emulator.machine import require


class VirtualRegister:
    """A number that Python may not look at: no arithmetic, no comparison, no `if`, no `range`."""

    def __init__(self, value: int | None = None, read_only: bool = False) -> None:
        self.value, self.read_only = value, read_only

    def known(self) -> int:
        """The number, for the emulator's own use."""
        require(self.value is not None, "a register is used before it holds a number")
        assert self.value is not None
        return self.value

    def _refuse(self, *_args: Any) -> NoReturn:
        raise TypeError("a register has no value while the kernel is traced")

    __bool__ = __int__ = __index__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, _other: object) -> bool:
        self._refuse()
