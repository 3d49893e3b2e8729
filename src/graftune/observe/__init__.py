"""What a run shows and records: events, console, plot, memory and speed.

Everything here works with torch, numpy and the standard library alone; rich (terminals) and matplotlib (the plot) are
imported inside the functions that draw with them, so a bare GPU machine can still train and log.
"""
