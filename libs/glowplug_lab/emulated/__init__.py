"""The emulated engine process: vLLM's HTTP subset over modelled time. All output is labelled emulated.

`driver` for the agent · `profiles` step costs · `batch` scheduling (pure) · `engine` steps in time · `api` routes ·
`stages` pipeline connections. Hundreds of these processes share a
machine, so imports stay few.
"""
