"""Eq. 1 of WarmServe: the part of a draining instance's KV cache for other models' weights.

Paper: WarmServe section 4.1, Eq. 1. With R requests running of at most C, and K of M bytes of KV cache in use:

    keep = max(M R / C, K + M / C)

Departures:
- The paper calls this value "memory to reserve for prewarming"; it stays for the running requests, and the rest is for
  prewarming (erratum E2).
- The published code compares M R / C with the *free* bytes, so that it keeps K + M R / C (erratum E3); `literal_code`
  does that. At R/C = 8/32 and K = 40 % of M the paper frees 57 %, the code 35 %.
- The paper computes it at each completion, here a timer does too, since a cache may only shrink.
"""


def prewarmable_bytes(
    num_running: int, max_concurrency: int, kv_bytes_used: int, kv_bytes_total: int, *, literal_code: bool = False
) -> int:
    """Return the cache bytes free for other weights: all unused ones once no request runs. Raises ValueError for
    impossible counts."""
    if max_concurrency < 1 or num_running < 0 or not 0 <= kv_bytes_used <= kv_bytes_total:
        raise ValueError(f"{num_running} of {max_concurrency} running, {kv_bytes_used} of {kv_bytes_total} bytes used")
    if num_running == 0:
        return kv_bytes_total - kv_bytes_used
    expected = kv_bytes_total * num_running // max_concurrency
    if literal_code:
        keep = kv_bytes_used + expected
    else:
        keep = max(expected, kv_bytes_used + kv_bytes_total // max_concurrency)
    return max(0, kv_bytes_total - keep)
