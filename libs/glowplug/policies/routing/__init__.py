"""Routing: the choice of a ready instance for each request. A target at its `max_concurrency` is never chosen; ties
break by id.
"""
