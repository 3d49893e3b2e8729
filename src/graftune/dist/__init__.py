"""Runs of several processes: how they meet (world.py), sum gradients (reduce.py), share the base and watch each
other."""
