"""The dictionary with a bound, in which plans, kernels and scratch memory are kept."""

import threading

from torch_paged_attn.lru import LRU


def test_lru_drops_what_was_used_least_recently():
    lru = LRU(2)
    lru.put("a", 1)
    lru.put("b", 2)
    assert lru.get("a") == 1
    lru.put("c", 3)
    assert [lru.get(x) for x in "abc"] == [1, None, 3]
    lru.put("c", 4)  # no new entry: nothing makes room for it
    assert len(lru) == 2 and lru.get("a") == 1 and lru.get("c") == 4
    lru.clear()
    assert len(lru) == 0 and lru.get("a") is None


def test_threads_that_read_put_and_clear_meet_no_error_and_no_other_value():
    lru, failures = LRU(8), []

    def work(seed):
        try:
            for i in range(3000):
                key = (i * seed) % 23
                found = lru.get(key)
                if found is None:
                    lru.put(key, key)
                elif found != key:
                    failures.append((key, found))
                if i % 500 == 0:
                    lru.clear()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(lru) <= 8
