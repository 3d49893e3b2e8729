"""Several processes, one run: who is there (world.py), and what they add up (reduce.py)."""
