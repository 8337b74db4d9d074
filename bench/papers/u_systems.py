"""U: the systems compared: the union, every paper alone, the baselines they were compared with.

What each is stands in `libs/glowplug/policies/systems.py`, where fleets and scenarios read it too.
"""

UNION = "union"
SYSTEMS = {
    UNION: "union",
    "WarmServe": "warmserve",
    "HydraServe": "hydraserve",
    "PreServe": "preserve",
    "SwapServeLLM": "swapserve",
    "mCache": "mcache",
    "SLLM-GPU": "sllm_gpu",
    "ServerlessLLM": "serverlessllm",
    "serverless vLLM": "serverless_vllm",
    "Llumnix-like": "llumnix_like",
    "proactive": "proactive",
    "hybrid": "hybrid",
    "round robin": "round_robin",
    "minimum use": "minimum_use",
    "MuxServe-like": "muxserve_like",
}
"""As a page calls it -> its name, the word of GLOWPLUG_POLICIES."""
PAPERS = ("WarmServe", "HydraServe", "PreServe", "SwapServeLLM", "mCache")
CACHES = ("SLLM-GPU", "ServerlessLLM", "serverless vLLM")
ROUTERS = ("PreServe", "Llumnix-like", "round robin", "minimum use", "serverless vLLM")
"""Where instances neither come nor go a system is its router; least request is that of all others."""
