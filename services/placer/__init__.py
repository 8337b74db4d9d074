"""The placer, which chooses the GPUs of an instance and the instances that leave for it."""
