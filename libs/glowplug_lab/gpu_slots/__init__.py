"""GPU memory mapped to a model's addresses, and moved from one model to another without allocating it again (WarmServe
section 4.2). No engine of the fleet serves from slots yet.

    chunk   physical memory of one size, created once (32 MiB on a GPU)     host_memory.py, cuda_memory.py
    pool    all chunks of a GPU, each free or with its holders              pool.py
    slot    addresses of one model, as many as the GPU has bytes: weights
            from offset 0, KV cache behind them                             slots.py
    owner   a process that creates chunks and lends them to others          owner.py, owner_client.py, peers.py

Who owns what. The pool creates chunks and never maps; a slot maps and never creates. In one process a slot takes from a
ChunkPool; across processes loaders and engines borrow from the owner over a Unix socket, where the connection is the
lock: when a process dies, its chunks are free again. Weights are published under a name and attached by others, read
only, and each of their chunks is free once its last holder gives it back. The owner has no context on the device, so a
fault there does not reach it; when the owner dies, engines compute on and hand their chunks to the next owner.

The steps of a switch of models (switch.py):

1. `prewarm`: take chunks, map a run of them, copy the weights that have arrived, map the next run meanwhile. Copies
   wait for more urgent ones (copies.py).
2. `activate`: a request comes. The other slots lose their chunks, and the winner's KV cache grows into all free memory:
   first a GiB, then run by run while the engine serves.
3. `donate`: the instance drains. The part of its KV cache that WarmServe Eq. 1 does not keep goes back to the pool,
   where the next model is prewarmed.
4. `evict`: the instance is gone. Its chunks go back, or its weights stay and only its KV cache goes.

A model's addresses never change, so its tensors (dlpack.py) and CUDA graphs stay valid. The port is gpu_memory.py;
mappings.py refuses what a GPU would refuse, so host memory, which stands for a GPU in tests, is as strict. docs/gpu.md
says what is measured and what is not.
"""
