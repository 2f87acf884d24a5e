"""A dictionary with a bound."""

import itertools
import threading
from collections.abc import Hashable
from typing import Any


class LRU:
    """A dictionary of up to `bound` entries. When it is full, the eighth of the entries that was
    used least recently is dropped at once, so that few calls have to look for what to drop. Any
    number of threads may use it. Reading takes no lock.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        # value, and when it was last used
        self._entries: dict[Hashable, list[Any]] = {}
        self._now = itertools.count().__next__
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """The value put for `key`, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = self._now()
        return entry[0]

    def put(self, key: Hashable, value: Any) -> None:
        """Keep `value` for `key`."""
        with self._lock:
            if key not in self._entries and len(self._entries) >= self.bound:
                by_use = sorted(self._entries, key=lambda k: self._entries[k][1])
                for old in by_use[: max(self.bound // 8, 1)]:
                    del self._entries[old]
            self._entries[key] = [value, self._now()]

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
