"""Which pages of a KV cache are free, how many sequences hold each, and which are found by a hash.

A page that no sequence holds can still be found by the hash of what was written to it, until it is
given to another sequence; of such pages the least recently used is given away first.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass
class PagePool:
    """The pages 0 to num_pages - 1.

    ref_counts: for each page, how many sequences hold it. A page that none holds is in one of the
        next two
    blank: pages that no hash finds, the next one to be given away last
    evictable: pages that a hash finds, the least recently used first
    page_of_hash, hash_of_page: the pages that are found, and by what
    """

    num_pages: int
    ref_counts: list[int] = field(init=False)
    blank: list[int] = field(init=False)
    evictable: OrderedDict[int, None] = field(default_factory=OrderedDict)
    page_of_hash: dict[bytes, int] = field(default_factory=dict)
    hash_of_page: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ref_counts = [0] * self.num_pages
        self.blank = list(reversed(range(self.num_pages)))

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds, those that a hash finds included."""
        return len(self.blank) + len(self.evictable)

    def free_beside(self, kept: Collection[int]) -> int:
        """Pages that no sequence holds, without those in `kept`, which a hash found."""
        return self.num_free - sum(page in self.evictable for page in kept)

    def take(self) -> int:
        """Give a page to one sequence: a blank one, else the least recently used evictable one."""
        if self.blank:
            page = self.blank.pop()
        else:
            page, _ = self.evictable.popitem(last=False)
            self.forget(page)
        self.ref_counts[page] = 1
        return page

    def share(self, page: int) -> None:
        """Give a page, held or evictable, to one more sequence."""
        self.evictable.pop(page, None)
        self.ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take a sequence's last pages, in their order, from it."""
        # the last page goes in first and is evicted first: a prefix is useless without its start
        for page in reversed(pages):
            self.ref_counts[page] -= 1
            if self.ref_counts[page] == 0:
                if page in self.hash_of_page:
                    self.evictable[page] = None
                else:
                    self.blank.append(page)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the first hashes, up to the first that finds none."""
        pages = []
        for digest in hashes:
            if digest not in self.page_of_hash:
                break
            pages.append(self.page_of_hash[digest])
        return pages

    def list_under(self, digest: bytes, page: int) -> None:
        """Let the hash find this held page, unless it finds another already."""
        if digest not in self.page_of_hash:
            self.page_of_hash[digest], self.hash_of_page[page] = page, digest

    def forget(self, page: int) -> None:
        """Let no hash find a held page, whose contents change or were never written."""
        digest = self.hash_of_page.pop(page, None)
        if digest is not None:
            del self.page_of_hash[digest]
