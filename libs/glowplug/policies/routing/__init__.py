"""Which ready instance a request goes to.

Every policy here is `route(targets, params, state) -> RouteDecision`: `targets` are the instances a router may choose
now, `state` is the instance chosen last for this model ("" at first). A target at its `max_concurrency` is never
chosen; when all are, `instance_id` is "" and the request is held. Ties break by instance id.
"""
