"""The placer: which GPU an instance goes to, and who leaves for it."""
