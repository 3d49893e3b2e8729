"""Files on disk: written whole or not at all, locked, hashed, read with bounds; the user's cache folder; the Hub."""
