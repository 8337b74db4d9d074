"""What Glowplug adds to a vLLM environment. Imports nothing of Glowplug, and vLLM only where it is used.

parked/           one process with vLLM imported; a server is a fork of it
server.py         one vLLM server that waits for its weights: `python -m glowplug_vllm.server RUN_DIR`; broken files are
                  named before vLLM trips over them, and the model's template gets a default system prompt
plugin.py         loaded by vLLM: tells the agent the port, and whether the engine core still answers
sleeping.py       routes by which the agent puts a server to sleep and wakes it
worker.py         the CPU worker that gives memory back; cpu_weights.py, region.py, layout.py: its weights
shared_load.py    a model that is in its files' pages when it is loaded
landing.py        which bytes of the files are there, while the node still fetches them
arriving.py       a server whose weights arrive; arriving_load.py: vLLM's loader, which reads them as they land
replaced.py       a name of vLLM's that holds something else for a while
reloading.py      a GPU worker's weights again from host memory
kv_limit.py       a KV cache that is cut down under running requests
convert_gguf.py   a GGUF file re-saved as a directory that vLLM can load
"""

__version__ = "0.2.0"
