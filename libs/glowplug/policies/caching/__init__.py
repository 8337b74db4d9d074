"""Caching: the choice of weights that leave host memory first."""
