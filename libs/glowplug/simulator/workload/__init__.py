"""What arrives: readers of public traces, samplers as the papers describe them, and a generator for those without."""
