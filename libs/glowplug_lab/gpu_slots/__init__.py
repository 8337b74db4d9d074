"""GPU memory mapped to a model's addresses and moved between models without reallocation (WarmServe section 4.2). No
engine of the fleet uses slots yet.

    chunk   physical memory of one size, created once (32 MiB on a GPU)     host_memory.py, cuda_memory.py
    pool    all chunks of a GPU, each free or with its holders              pool.py
    slot    addresses of one model, as many as the GPU has bytes: weights
            from offset 0, KV cache behind them                             slots.py
    owner   a process that creates chunks and lends them to others          owner.py, owner_client.py, peers.py

The pool creates chunks and never maps; a slot maps and never creates. Across processes, loaders and engines borrow from
the owner over a Unix socket; a connection's end frees its chunks. Published weights are attached by name, read only,
and are free after their last holder. The owner has no device context, so device faults do not reach it; when it dies,
engines go on and hand their chunks to the next.

A switch of models (switch.py):

1. `prewarm`: map chunks run by run and copy the weights meanwhile, after urgent copies (copies.py).
2. `activate`: take the other slots' chunks for the KV cache: first a GiB, then run by run while serving.
3. `donate`: while draining, give up the KV cache that WarmServe Eq. 1 does not keep.
4. `evict`: give back all chunks, or only the KV cache's.

Addresses never change, so tensors (dlpack.py) and CUDA graphs stay valid. gpu_memory.py is the port; mappings.py
refuses what a GPU would. See docs/gpu.md for measurements.
"""
