"""One picture of the fleet, which every controller, the console and the command line read."""
