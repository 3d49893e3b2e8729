"""What a run shows and records: events, console, plot, memory and speed.

rich (terminals) and matplotlib (the plot) are imported inside the functions that draw with them: a run whose output is
a file starts without loading either.
"""
