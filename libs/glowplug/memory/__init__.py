"""GPU memory: who may have which bytes, and how they are put behind a model's addresses.

Two things live here. The **ledger** (ledger.py) is the agent's record of bytes: each byte of each GPU has at most one
named owner, and a start that does not fit is refused before anything begins; discovery.py says what GPUs there are. The
rest is how memory moves from one model to another without being allocated again (WarmServe section 4.2):

    chunk   physical memory of one size, created once (32 MiB on a GPU)     host_memory.py, cuda_memory.py
    pool    all chunks of a GPU, each free or with its holders              pool.py
    slot    addresses of one model, as many as the GPU has bytes: weights
            from offset 0, KV cache behind them                             slots.py
    owner   a process that creates chunks and lends them to others          owner.py, owner_client.py, peers.py

Who owns what. The pool creates chunks and never maps; a slot maps and never creates. In one process a slot takes from a
ChunkPool; across processes loaders and engines borrow from the owner over a Unix socket, where the connection is the
lock: a process that dies has given its chunks back. Weights are published under a name and attached by others, read
only, and each of their chunks is free with its last holder. The owner has no context on the device, so a fault there
does not reach it; when it dies, engines compute on and hand what they have to the next owner.

What a switch of models does (switch.py):

1. `prewarm`: take chunks, map a run of them, copy the weights that have come, map the next run meanwhile. Copies wait
   for more urgent ones (copies.py).
2. `activate`: a request comes. The other slots lose their chunks, and the winner's KV cache grows into all that is
   free: first a GiB, then run by run while the engine serves.
3. `donate`: the instance drains. What WarmServe Eq. 1 does not keep of its KV cache goes back to the pool, where the
   next model is prewarmed.
4. `evict`: it is gone. Its chunks go back, or its weights stay and only its KV cache goes.

A model's addresses are the same all the while, so its tensors (dlpack.py) and CUDA graphs stay valid. The port is
gpu_memory.py; mappings.py refuses what a GPU would refuse, so host memory, which stands for a GPU in tests, is as
strict. What is measured and what is not stands in docs/gpu.md. No engine of the fleet serves from slots yet.
"""
