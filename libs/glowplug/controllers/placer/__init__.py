"""The placer: decides where instances run, which instances leave for them, and what is prewarmed."""
