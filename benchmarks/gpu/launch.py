"""Host time of one eager call, in inference mode: what Python and the launcher cost."""

import time

import torch
from attention import Decode, decode_calls

CALLS = 300


@torch.inference_mode()
def main() -> None:
    for problem in (Decode((1024,), 32, 8), Decode((4096,) * 64, 32, 8)):
        call = decode_calls(problem, None)[0]["ours"]
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        samples = []
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples.append((time.perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
        print(f"{problem}: {sorted(samples)[4]:.1f} us of host time a call (median of 9)")


if __name__ == "__main__":
    main()
