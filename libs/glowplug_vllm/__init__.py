"""Glowplug's part of a vLLM environment. Imports nothing of Glowplug, and vLLM only where used.

parked/           one process with vLLM imported; a server is a fork of it
server.py         one vLLM server that waits for its weights: `python -m glowplug_vllm.server RUN_DIR`; names broken
                  files before vLLM reads them, and adds a default system prompt to the model's template
plugin.py         loaded by vLLM: tells the agent the port, and whether the engine core answers
sleeping.py       routes of the agent to put a server to sleep and wake it
worker.py         the CPU worker that frees memory; cpu_weights.py, region.py, layout.py: its weights
shared_load.py    load a model in its files' pages
landing.py        landed bytes of files that the node still fetches
rendezvous.py     messages with the driver
arriving.py       a server whose weights arrive; arriving_load.py: reads them in vLLM's loader as they land
replaced.py       replace a name of vLLM for a while
reloading.py      reload a GPU worker's weights from host memory
kv_limit.py       shrink a KV cache under running requests
convert_gguf.py   re-save a GGUF file as a directory for vLLM"""

__version__ = "0.2.0"
