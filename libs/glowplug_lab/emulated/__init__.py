"""The emulated engine process: vLLM's HTTP subset over modelled time. Everything it says is labelled emulated.

`driver` for the agent · `profiles` what a step costs · `batch` which sequences run (pure) · `engine` steps in time ·
`api` the routes · `stages` a pipeline's connections · `consolidation` how a stage gets all of the model.
It imports little, since hundreds of these processes run on one machine.
"""
