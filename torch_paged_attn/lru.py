"""A bounded dictionary that drops its least recently used entries."""

import itertools
import threading
from collections.abc import Hashable
from typing import Any


class LRU:
    """A dictionary of at most `bound` entries.

    When it is full, the least recently used eighth of the entries is dropped at once, so that the
    search for old entries is rare. It is thread-safe; reading takes no lock.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        # key -> [value, time of last use]; the time is a counter
        self._entries: dict[Hashable, list[Any]] = {}
        self._now = itertools.count().__next__
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """The value stored under `key`, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = self._now()
        return entry[0]

    def put(self, key: Hashable, value: Any) -> None:
        """Store `value` under `key`."""
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
