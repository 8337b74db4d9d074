"""The placer: which GPU an instance goes to, and who makes room."""
