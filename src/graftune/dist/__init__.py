"""Runs of several processes: how they meet and sum gradients (world.py), share the base (shard.py) and watch
each other (watch.py)."""
